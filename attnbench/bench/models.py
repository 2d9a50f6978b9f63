"""Training and decoding of whole models on sentences of random words."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from attnbench.bench import sentences
from attnbench.bench.sentences import Load, batches
from attnbench.bench.subjects import Subject
from attnbench.bench.timer import TOLERANCE, Case
from attnbench.core import native
from attnbench.core.packed import pack
from attnbench.data.base import BOS, PAD, Batch
from attnbench.models.base import Seq2SeqModel
from attnbench.search.base import Hypothesis, SpecialIds, searches
from attnbench.tasks.base import Task, tasks
from attnbench.tasks.pairs import NO_TOKEN
from attnbench.tasks.sources import source_of
from attnbench.train.optim import optimizers
from attnbench.train.recorded import Accumulate, accumulator, records
from attnbench.train.runtime import Runtime
from attnbench.train.step import accumulate, clip

_SETTLED = 2
"""Calls before those that are timed, where updates are recorded: the third batch of a shape is."""


def task() -> Task:
    """Copying: the task whose batches bring nothing but random words."""
    return tasks.parse({"kind": "copying", "dataset": "copy"}).bind()


def training(subject: Subject, count: int, runtime: Runtime) -> Case:
    """Updates as a training makes them: forward, backward, clipping, the optimiser, at a learning rate of 0, so that
    all rounds meet the same weights. Work: target tokens, EOS counted."""
    bound, how = task(), subject.update
    model = subject.build(runtime.device).train()
    longest = min(subject.longest, (model.max_length or sys.maxsize) - 1)
    given = batches(count, torch.device("cpu"), how.tokens, subject.sizes, longest)  # as the data give them
    optimizer = optimizers.parse(how.optimizer).build(model.parameters())

    def update(gradients_of: Accumulate) -> None:
        for batch in given:
            gradients_of([batch])
            if how.clip:
                clip(model, how.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    recording = records(runtime)
    gradients_of = accumulator(bound, model, how.smoothing, runtime, pool=_pool() if recording else None)

    def check() -> float:
        """How far such a model lies from torch operations in float32, without dropout (_apart); in half precision, how
        much farther than those do in it: there a last digit decides which keys have a weight."""
        made, defined = (subject.build(runtime.device, defined=each, dropout=False) for each in (False, True))
        own = accumulator(bound, made, how.smoothing, runtime, pool=_pool() if recording else None)
        found = _slopes(made, own, given[0], 1 + _SETTLED if recording else 0)
        wanted = _slopes(defined, _definition(bound, defined, how.smoothing, Runtime(runtime.device)), given[0])
        if runtime.precision == "fp32":
            return _apart(found, wanted)
        rounded = _slopes(defined, _definition(bound, defined, how.smoothing, runtime), given[0])
        return float(torch.tensor([_apart(found, wanted) - _apart(rounded, wanted), 0.0]).max())

    tokens = sum(bound.count(batch) for batch in given)

    def cost() -> float:
        defined = subject.build(runtime.device, defined=True).train()
        with native.off():
            return operations(lambda: [accumulate(bound, defined, [batch], how.smoothing, runtime) for batch in given])

    run, settle = lambda: update(gradients_of), _SETTLED if recording else 0
    counted = cost if subject.counted else None
    return Case(subject.group, subject.name, run, tokens, check, counted, settle=settle)


@functools.cache
def _pool() -> Any:
    """Memory for the records of all models, which are played in turns."""
    return torch.cuda.graph_pool_handle()


def _definition(bound: Task, model: Seq2SeqModel, smoothing: float, runtime: Runtime) -> Accumulate:
    """Gradients by torch operations."""

    def gradients_of(batches: list[Any]) -> tuple[torch.Tensor, int]:
        with native.off():
            return accumulate(bound, model, batches, smoothing, runtime)

    return gradients_of


def _slopes(
    model: Seq2SeqModel, gradients_of: Accumulate, batch: Batch, before: int = 0
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a token, and the gradient of each parameter. before: calls that go before, as when timed."""
    model.train()
    for _ in range(before):
        gradients_of([batch])
    model.zero_grad()
    totals, tokens = gradients_of([batch])
    loss = totals[0].item() / tokens
    return loss, {name: _slope(each).double() for name, each in model.named_parameters()}


def _slope(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _apart(found: tuple[float, dict[str, torch.Tensor]], wanted: tuple[float, dict[str, torch.Tensor]]) -> float:
    """How far losses and gradients lie apart, as parts of 1: losses, the length and the direction of the whole gradient
    (1 - cosine, which is half the square of a small difference), and half that square for each parameter. Very small
    gradients are measured in parts of a hundredth of the average one: those of keys' biases are 0 but for rounding."""
    (loss, mine), (right, theirs) = found, wanted
    near, slope = (torch.cat([each.flatten() for each in slopes.values()]) for slopes in (mine, theirs))
    alike = slope.norm() / len(slope) ** 0.5
    apart = [abs(loss / right - 1), abs(float(near.norm() / slope.norm()) - 1)]
    apart.append(1 - float(torch.nn.functional.cosine_similarity(near, slope, dim=0)))
    for name, each in theirs.items():
        least = alike * each.numel() ** 0.5 / 100
        apart.append(float(((mine[name] - each).norm() / torch.maximum(each.norm(), least)) ** 2) / 2)
    return float(torch.tensor(apart, dtype=torch.float64).max())  # which keeps a NaN, wherever it stands


_aten: Any = torch.ops.aten
_RECURRENT = {
    _aten.mkldnn_rnn_layer: 2, _aten.mkldnn_rnn_layer_backward: 4, _aten._cudnn_rnn: 2, _aten._cudnn_rnn_backward: 4,
}  # fmt: skip
"""Layers that torch counts nothing of: operations for each token and number in a weight."""


class _Flops(TorchDispatchMode):
    """Counts the operations of products, as torch counts them, and of recurrent layers; its own counter also follows
    modules, which gradients within a forward pass do not let it."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count, each = flop_registry.get(func.overloadpacket), _RECURRENT.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        elif each is not None:
            tokens, weights = args[0].numel() // args[0].shape[-1], args[1] if isinstance(args[1], list) else args[1:3]
            self.total += each * tokens * sum(weight.numel() for weight in weights if weight.dim() == 2)
        return out


def operations(run: Callable[[], object]) -> float:
    """Of the products of a call as torch makes them."""
    with _Flops() as counter:
        run()
    return counter.total


def decoding(subject: Subject, load: Load, runtime: Runtime) -> Case:
    """Outputs of 30 tokens, or as many as the model can make, past EOS. Work: tokens of the best outputs."""
    model = subject.build(runtime.device).eval()
    steps = _steps(model)
    bound, batch = task(), load.sources(runtime.device, subject.sizes)
    search = _searched(subject, load, steps)
    quantized = search["quantization"]
    searcher = searches.parse(search).build()
    lower = runtime.precision == "fp32" and searcher.spec.precision_on(runtime.device) == "bf16"
    if lower:  # of a cell, whatever the others are timed in
        runtime = replace(runtime, precision="bf16")

    with runtime.autocast():
        pack(model, quantized)  # once, as before all batches of a split

    def run() -> dict[int, Hypothesis]:
        with runtime.autocast():
            return bound.decode(model, [batch], searcher, to_limit=True)

    def define() -> Seq2SeqModel:
        """The model in plain torch operations."""
        plain = subject.build(runtime.device, defined=True).eval()
        if quantized:
            with native.off():  # as it is defined
                pack(plain, quantized)
        return plain

    @functools.cache
    def defined() -> tuple[list[Hypothesis], float]:
        """The best outputs of that model, and the operations of their products."""
        plain, best, special = define(), list[Hypothesis](), SpecialIds(bos=BOS, eos=NO_TOKEN, pad=PAD)
        with native.off(), torch.no_grad():
            count = operations(lambda: best.extend(each for each, *_ in searcher(plain, source_of(batch), special)))
        return best, count

    def check() -> float:
        """How far the scores of the best outputs lie from those of the definition in plain torch operations, as a part
        of them: see `_together`. What other words it found there the definition scores; one output in fifty may have
        another score than the definition's own output, parted at a close call. In half precision and in 8 bits, where
        many are others, all are scored by the definition, and the mean counts; a search that is wrong altogether shows
        in how much worse they are, of which a twentieth counts."""
        made = run()
        found = [made[row] for row in range(load.rows)]
        if any(len(best.tokens) != _steps(model) for best in found):  # the work that is told
            return float("inf")
        wanted, scored = defined()[0], _off_scores(define(), batch, found)
        if runtime.precision != "fp32" or quantized:
            worse = 1 - sum(best.score for best in wanted) / sum(best.score for best in found)  # scores are negative
            return float(torch.tensor([sum(scored) / len(scored), worse / 20]).max())
        pairs = list(zip(found, wanted, strict=True))
        apart = [abs(best.score / right.score - 1) for best, right in pairs]
        others = [best.tokens != right.tokens for best, right in pairs]
        parted = sum(other and not each <= TOLERANCE for other, each in zip(others, apart, strict=True))
        told = [off if other else each for off, other, each in zip(scored, others, apart, strict=True)]
        return _together(told) if parted <= len(pairs) // 50 else float("inf")

    # nothing here says how fast products of 8 bits can be, nor those of another precision than the run's
    counted = (lambda: defined()[1]) if subject.counted and quantized is None and not lower else None
    work = load.rows * steps
    return Case(load.group(subject.group), subject.name, run, work, check, counted, quantized is not None or lower)


def _steps(model: Seq2SeqModel) -> int:
    return sentences.STEPS if model.max_length is None else min(sentences.STEPS, model.max_length)


def _searched(subject: Subject, load: Load, steps: int) -> dict[str, Any]:
    """The search, as YAML has it, with outputs of so many tokens."""
    usual = {"kind": "greedy"} if load.beam == 1 else {"kind": "beam", "size": load.beam}
    own = {"quantization": subject.quantization, **(usual if load.beam is not None else subject.search or {})}
    return {**own, "max_ratio": 0.0, "max_extra": steps}


def _off_scores(plain: Seq2SeqModel, batch: Batch, found: list[Hypothesis]) -> list[float]:
    """How far the log-probabilities of outputs lie from those that the model gives them, as parts of them."""
    tokens = torch.tensor([best.tokens for best in found], device=batch.source.device)
    given = torch.cat([tokens.new_full((len(tokens), 1), BOS), tokens[:, :-1]], 1)
    with native.off(), torch.no_grad():
        logits = plain.logits(plain.decode(plain.encode(source_of(batch)), given).hidden)
        wanted = logits.log_softmax(-1).gather(2, tokens[:, :, None]).sum((1, 2)).tolist()
    return [abs(best.log_prob / right - 1) for best, right in zip(found, wanted, strict=True)]


def _together(apart: list[float]) -> float:
    """The mean difference, or a tenth of the largest one: a last digit may decide between two words, or between two
    keys of top-k, and move a few outputs a little."""
    each = torch.tensor(apart, dtype=torch.float64)
    return float(torch.maximum(each.mean(), each.max() / 10))
