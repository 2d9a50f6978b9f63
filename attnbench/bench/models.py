"""Training and decoding of whole Transformers on sentences of random words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnbench.bench.ops import TRANSFORMS
from attnbench.bench.timer import Case
from attnbench.core.tree import map_batch
from attnbench.data.base import BOS, EOS, PAD, SPECIALS, Batch
from attnbench.models.base import Seq2SeqModel, Sizes, models
from attnbench.search.base import searches
from attnbench.tasks.base import Task, tasks
from attnbench.train.optim import AdamSpec
from attnbench.train.runtime import Runtime
from attnbench.train.step import accumulate, clip

WORDS = 10_000
"""Vocabulary, joint."""
TOKENS = 4096
"""Padded tokens a side of a training batch, at most."""
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


def build(size: str, transform: Mapping[str, Any], device: torch.device) -> Seq2SeqModel:
    """A Transformer of that size with one transform at every site."""
    torch.manual_seed(0)
    fields = {
        "kind": "transformer",
        **SIZES[size],
        "dropout": 0.1,
        "attention": {"default": {"transform": dict(transform)}},
    }
    return models.parse(fields).build(Sizes(WORDS, WORDS, True, PAD)).to(device)


def batches(count: int, device: torch.device, seed: int = 0) -> list[Batch]:
    """Training batches at equal distances from short sentences to long ones: a source has 25 words give or take 10, 4
    to 60, a target as many give or take 3."""
    draw = np.random.default_rng(seed)
    source = np.clip(np.rint(draw.normal(25, 10, 6000)), 4, 60).astype(int)
    target = np.clip(np.rint(source + draw.normal(0, 3, 6000)), 4, 60).astype(int)
    order = np.lexsort((source, target))
    widths = np.maximum(source, target)[order] + 1
    bounds = [0]
    for row in range(len(order)):
        if (row - bounds[-1] + 1) * widths[bounds[-1] : row + 1].max() > TOKENS:
            bounds.append(row)
    whole = list(zip(bounds, [*bounds[1:], len(order)], strict=True))
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


def training_cases(sizes: list[str], transforms: list[str], count: int, runtime: Runtime) -> Iterator[Case]:
    """Updates as a training makes them: forward, backward, clipping, Adam. Work: target tokens, EOS counted."""
    bound, given = task(), batches(count, runtime.device)
    tokens = sum(bound.count(batch) for batch in given)
    for size in sizes:
        for name in transforms:
            model = build(size, TRANSFORMS[name], runtime.device).train()
            optimizer = AdamSpec().build(model.parameters())

            def run(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
                for batch in given:
                    accumulate(bound, model, [batch], 0.1, runtime)
                    clip(model, 1.0)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)

            yield Case(size, name, run, tokens, flops=_flops(run))


def _flops(run: Any) -> float:
    with FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())


def decoding_cases(
    sizes: list[str], transforms: list[str], rows: list[int], lengths: list[int], beams: list[int], runtime: Runtime
) -> Iterator[Case]:
    """Batches of sources of one length, outputs of 30 tokens, past EOS. Work: tokens of the best outputs."""
    bound = task()
    for size in sizes:
        built = {name: build(size, TRANSFORMS[name], runtime.device).eval() for name in transforms}
        for count in rows:
            for length in lengths:
                draw = np.random.default_rng(0)
                sides = np.full(count, length - 1)
                batch = _batch(sides, np.full(count, STEPS - 1), draw, runtime.device)
                for beam in beams:
                    limit = {"max_ratio": 0.0, "max_extra": STEPS}
                    raw = {"kind": "greedy", **limit} if beam == 1 else {"kind": "beam", "size": beam, **limit}
                    search = searches.parse(raw).build()
                    group = f"{size}, {'greedy' if beam == 1 else f'beam {beam}'}, {count} x {length}"
                    for name, model in built.items():

                        def run(model: Any = model, search: Any = search, batch: Batch = batch) -> None:
                            with runtime.autocast():
                                bound.decode(model, [batch], search, to_limit=True)

                        yield Case(group, name, run, count * STEPS)
