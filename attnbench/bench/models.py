"""Training and decoding of whole Transformers on sentences of random words."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from attnbench.attention.patterns.base import PatternSpec
from attnbench.attention.transforms.base import TransformSpec, transforms
from attnbench.attention.types import ROLES, Role
from attnbench.bench.ops import TRANSFORMS, kind_of, mechanism
from attnbench.bench.timer import TOLERANCE, Case
from attnbench.core import native
from attnbench.core.packed import pack
from attnbench.core.tree import map_batch
from attnbench.data.base import BOS, EOS, PAD, SPECIALS, Batch
from attnbench.data.batching import cut
from attnbench.models.base import Seq2SeqModel, Sizes, models
from attnbench.models.transformer import TransformerSpec
from attnbench.search.base import Hypothesis, SpecialIds, searches
from attnbench.tasks.base import Task, tasks
from attnbench.tasks.pairs import NO_TOKEN, source_of
from attnbench.train.optim import AdamSpec
from attnbench.train.recorded import Accumulate, accumulator, records
from attnbench.train.runtime import Runtime
from attnbench.train.step import accumulate, clip

WORDS = 10_000
"""Vocabulary, joint."""
TOKENS = 4096
"""Padded tokens a side of a training batch, at most."""
SMOOTHING = 0.1
STEPS = 30
"""Tokens that every output has."""
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"preset": "tiny"},
    "mini": {"preset": "mini", "layers": 2},
    "iwslt": {"preset": "iwslt"},
    "base": {"preset": "base"},
}
"""Presets of the Transformer; `mini` with two layers, as other packages' benchmarks have it."""
COMPARED = ("softmax", "topk, k = 8", "sparsemax", "entmax15", "entmax, learned alpha")
PATTERNS = ("window, n = 8", "random, n = 8")
"""What decoding is timed with beside them, wherever such a pattern can stand; on a processor a step reads these keys
alone."""

QUANTIZED = ", int8"
"""After the name of a transform: searched with products of whole numbers of 8 bits."""
DEFINED = " (dense)"
"""After the name of a transform: as it is defined, not as `auto` has it on a GPU."""
_SETTLED = 2
"""Calls before those that are timed, where updates are recorded: the third batch of a shape is."""


def compared(device: torch.device, also: Iterable[str] = ()) -> list[str]:
    """Names of the mechanisms that are timed there. also: of others."""
    names = [*COMPARED, *also]
    defined = [name + DEFINED for name in names[1:]] if device.type == "cuda" else []
    return [*names, *defined]


def build(
    size: str, site: Mapping[str, Any], device: torch.device, roles: Iterable[Role] = ROLES, **more: Any
) -> Seq2SeqModel:
    """A Transformer of that size with the same stages at these sites. more: other fields of it."""
    torch.manual_seed(0)
    spec = fields_of(size, attention={role: dict(site) for role in roles}, **more)
    return spec.build(Sizes(WORDS, WORDS, True, PAD)).to(device)


def _named(size: str, name: str, device: torch.device, *, defined: bool = False, **more: Any) -> Seq2SeqModel:
    """defined: whatever is named, with the same weights. more: fields of the model."""
    backend = {"backend": "dense"} if defined or name.endswith(DEFINED) else {}
    spec = _mechanism(name)
    stage = "transform" if isinstance(spec, TransformSpec) else "pattern"
    return build(size, {stage: spec, **backend}, device, spec.roles, **more)


def _mechanism(name: str) -> TransformSpec | PatternSpec:
    plain = name.removesuffix(DEFINED)
    return transforms.parse(TRANSFORMS[plain]) if plain in TRANSFORMS else mechanism(kind_of(plain))


def fields_of(size: str, **more: Any) -> TransformerSpec:
    """The Transformer of that size."""
    spec = models.parse({"kind": "transformer", **SIZES[size], "dropout": 0.1, **more})
    assert isinstance(spec, TransformerSpec)
    return spec


def batches(count: int, device: torch.device, tokens: int | None = None) -> list[Batch]:
    """Training batches at equal distances from short sentences to long ones: a source has 25 words give or take 10, 4
    to 60, a target as many give or take 3. tokens: padded ones a side, at most; None: TOKENS."""
    draw = np.random.default_rng(0)
    source = np.clip(np.rint(draw.normal(25, 10, 6000)), 4, 60).astype(int)
    target = np.clip(np.rint(source + draw.normal(0, 3, 6000)), 4, 60).astype(int)
    order = np.lexsort((source, target))
    widths = np.maximum(source, target)[order] + 1
    whole = list(itertools.pairwise(cut(widths, tokens or TOKENS)))
    chosen = [whole[int((place + 0.5) * len(whole) / count)] for place in range(count)]
    return [_batch(source[order[a:b]], target[order[a:b]], draw, device) for a, b in chosen]


def _batch(source: Any, target: Any, draw: np.random.Generator, device: torch.device) -> Batch:
    def side(lengths: Any) -> tuple[torch.Tensor, torch.Tensor]:
        words = draw.integers(len(SPECIALS), WORDS, (len(lengths), lengths.max() + 1))
        place = np.arange(words.shape[1])[None]
        words[place > lengths[:, None]] = PAD
        words[place == lengths[:, None]] = EOS
        return torch.from_numpy(words), torch.from_numpy(place <= lengths[:, None])

    sources, source_valid = side(source)
    out, valid = side(target)
    shifted = torch.cat([torch.full((len(out), 1), BOS), out[:, :-1]], 1).masked_fill(~valid, PAD)
    batch = Batch(sources, source_valid, shifted, out, valid, torch.arange(len(out)))
    return map_batch(lambda tensor: tensor.to(device), batch)


def task() -> Task:
    return tasks.parse({"kind": "copying", "dataset": "copy"}).bind()


def training(size: str, transform: str, count: int, runtime: Runtime) -> Case:
    """Updates as a training makes them: forward, backward, clipping, Adam, at a learning rate of 0, so that all rounds
    meet the same weights. Work: target tokens, EOS counted."""
    bound, given = task(), batches(count, torch.device("cpu"))  # as the data give them
    model = _named(size, transform, runtime.device).train()
    optimizer = AdamSpec().build(model.parameters())

    def update(gradients_of: Accumulate) -> None:
        for batch in given:
            gradients_of([batch])
            clip(model, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    recording = records(runtime)
    gradients_of = accumulator(bound, model, SMOOTHING, runtime, _pool() if recording else None)

    def check() -> float:
        """How far such a model lies from torch operations in float32, without dropout (_apart); in half precision, how
        much farther than those do in it: there a last digit decides which keys have a weight."""
        made, defined = (_named(size, transform, runtime.device, defined=each, dropout=0.0) for each in (False, True))
        own = accumulator(bound, made, SMOOTHING, runtime, _pool() if recording else None)
        found = _slopes(made, own, given[0], 1 + _SETTLED if recording else 0)
        wanted = _slopes(defined, _definition(bound, defined, Runtime(runtime.device)), given[0])
        if runtime.precision == "fp32":
            return _apart(found, wanted)
        rounded = _slopes(defined, _definition(bound, defined, runtime), given[0])
        return float(torch.tensor([_apart(found, wanted) - _apart(rounded, wanted), 0.0]).max())

    tokens = sum(bound.count(batch) for batch in given)

    def cost() -> float:
        defined = _named(size, transform, runtime.device, defined=True).train()
        return operations(lambda: [accumulate(bound, defined, [batch], SMOOTHING, runtime) for batch in given])

    run, settle = lambda: update(gradients_of), _SETTLED if recording else 0
    return Case(size, transform, run, tokens, check, _counted(transform, cost), settle=settle)


def _counted(name: str, cost: Callable[[], float]) -> Callable[[], float] | None:
    """None for a pattern, which looks at fewer keys than the definition multiplies."""
    return None if isinstance(_mechanism(name.removesuffix(QUANTIZED)), PatternSpec) else cost


@functools.cache
def _pool() -> Any:
    """Memory for the records of all models, which are played in turns."""
    return torch.cuda.graph_pool_handle()


def _definition(bound: Task, model: Seq2SeqModel, runtime: Runtime) -> Accumulate:
    """Gradients by torch operations."""

    def gradients_of(batches: list[Any]) -> tuple[torch.Tensor, int]:
        with native.off():
            return accumulate(bound, model, batches, SMOOTHING, runtime)

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
    (1 - cosine, which is half the square of a small difference), and half that square for each parameter. A gradient
    shorter than a hundredth of what it would be, were all alike, is measured by that: those of keys' biases are 0 but
    for rounding."""
    (loss, mine), (right, theirs) = found, wanted
    near, slope = (torch.cat([each.flatten() for each in slopes.values()]) for slopes in (mine, theirs))
    alike = slope.norm() / len(slope) ** 0.5
    apart = [abs(loss / right - 1), abs(float(near.norm() / slope.norm()) - 1)]
    apart.append(1 - float(torch.nn.functional.cosine_similarity(near, slope, dim=0)))
    for name, each in theirs.items():
        least = alike * each.numel() ** 0.5 / 100
        apart.append(float(((mine[name] - each).norm() / torch.maximum(each.norm(), least)) ** 2) / 2)
    return float(torch.tensor(apart, dtype=torch.float64).max())  # which keeps a NaN, wherever it stands


class _Flops(TorchDispatchMode):
    """Counts the operations of products, as torch counts them; its own counter also follows modules, which gradients
    within a forward pass do not let it."""

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def operations(run: Callable[[], object]) -> float:
    """Of the products of a call as torch makes them."""
    with _Flops() as counter:
        run()
    return counter.total


class Load(NamedTuple):
    """What is decoded: so many sources of one length, EOS counted, with a beam of so many; 1 is greedy search."""

    rows: int
    length: int
    beam: int

    def group(self, size: str) -> str:
        return f"{size}, {'greedy' if self.beam == 1 else f'beam {self.beam}'}, {self.rows} x {self.length}"

    def sources(self, device: torch.device) -> Batch:
        draw = np.random.default_rng(0)
        return _batch(np.full(self.rows, self.length - 1), np.full(self.rows, STEPS - 1), draw, device)


def decoding(size: str, transform: str, load: Load, runtime: Runtime) -> Case:
    """Outputs of 30 tokens, past EOS. Work: tokens of the best outputs."""
    quantized = "int8" if transform.endswith(QUANTIZED) else None
    model = _named(size, transform.removesuffix(QUANTIZED), runtime.device).eval()
    bound, batch = task(), load.sources(runtime.device)
    limit = {"max_ratio": 0.0, "max_extra": STEPS, "quantization": quantized}
    raw = {"kind": "greedy", **limit} if load.beam == 1 else {"kind": "beam", "size": load.beam, **limit}
    search = searches.parse(raw).build()

    with runtime.autocast():
        pack(model, quantized)  # once, as before all batches of a split

    def run() -> dict[int, Hypothesis]:
        with runtime.autocast():
            return bound.decode(model, [batch], search, to_limit=True)

    def check() -> float:
        """How far the scores of the best outputs lie from those of the definition in plain torch operations, as a part
        of them: see `_together`. What other words it found there the definition scores; one output in fifty may have
        another score than the definition's own output, parted at a close call. In half precision and in 8 bits, where
        many are others, all are scored by the definition, and the mean counts; a search that is wrong altogether shows
        in how much worse they are, of which a twentieth counts."""
        special = SpecialIds(bos=BOS, eos=NO_TOKEN, pad=PAD)
        plain = _named(size, transform.removesuffix(QUANTIZED), runtime.device, defined=True).eval()
        if quantized:
            with native.off():  # as it is defined
                pack(plain, quantized)
        made = run()
        found = [made[row] for row in range(load.rows)]
        if any(len(best.tokens) != STEPS for best in found):  # the work that is told
            return float("inf")
        with native.off(), torch.no_grad():
            wanted = [best for best, *_ in search(plain, source_of(batch), special)]
        scored = _off_scores(plain, batch, found)
        if runtime.precision != "fp32" or quantized:
            worse = 1 - sum(best.score for best in wanted) / sum(best.score for best in found)  # scores are negative
            return float(torch.tensor([sum(scored) / len(scored), worse / 20]).max())
        pairs = list(zip(found, wanted, strict=True))
        apart = [abs(best.score / right.score - 1) for best, right in pairs]
        others = [best.tokens != right.tokens for best, right in pairs]
        parted = sum(other and not each <= TOLERANCE for other, each in zip(others, apart, strict=True))
        told = [off if other else each for off, other, each in zip(scored, others, apart, strict=True)]
        return _together(told) if parted <= len(pairs) // 50 else float("inf")

    def cost() -> float:
        return _of_decoding(size, load, runtime.device, WORDS, STEPS)

    return Case(
        load.group(size), transform, run, load.rows * STEPS, check, _counted(transform, cost), quantized is not None
    )


@functools.cache
def _of_decoding(size: str, load: Load, device: torch.device, words: int, steps: int) -> float:
    """Of the products of that decoding as it is defined, whatever the transform. words, steps: those of this module."""
    model = _named(size, "softmax", device, defined=True).eval()
    limit = {"max_ratio": 0.0, "max_extra": steps}
    raw = {"kind": "greedy", **limit} if load.beam == 1 else {"kind": "beam", "size": load.beam, **limit}
    special = SpecialIds(bos=BOS, eos=NO_TOKEN, pad=PAD)
    with native.off(), torch.no_grad():
        return operations(lambda: list(searches.parse(raw).build()(model, source_of(load.sources(device)), special)))


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
