"""Cost against length, k, memory slots and vocabulary, with its exponent: the slope of log time over log size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from attnbench.attention.catalog import build_transform
from attnbench.attention.spec import AttentionSpec
from attnbench.attention.types import Dims, Positions
from attnbench.bench.models import operations
from attnbench.bench.ops import (
    HEAD,
    Method,
    Mixer,
    both_ways,
    farthest,
    gradient_off,
    moved,
    multiplied,
    on_a_gpu,
    slopes_apart,
)
from attnbench.bench.results import Exponent
from attnbench.bench.timer import Case, Timing
from attnbench.core import native
from attnbench.tasks.loss import smoothed_cross_entropy

HEADS, N, WIDTH = 4, 32, 256
METHODS: dict[str, Method] = {
    "softmax": Method(),
    "topk, k = 32": Method(transform={"kind": "topk", "k": N}),
    "entmax15": Method(transform="entmax15"),
    **{f"{name}, n = {N}": Method(pattern={"kind": name, "n": N}) for name in ("window", "block", "global", "bigbird")},
}
LONGEST = 8192
"""Beyond it are timed SDPA, the Triton kernels, and patterns that cost as much as their keys; nothing is compared with
its definition there, which writes all scores."""
MOVED = ("k",)
"""Whose costs are bytes, not operations."""
OF_PRECISION = ("length",)
"""Whose cases are of the precision that is asked for; the others are float32."""


def cases(
    lengths: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, int, Case]]:
    """(what it grows with, its size, the case): forward with backward, one sequence or one batch. dtype: of what grows
    with the length."""
    for length in lengths:
        draw = torch.Generator().manual_seed(0)
        given = [torch.randn(1, HEADS, length, HEAD, generator=draw).to(device, dtype) for _ in range(3)]
        sdpa = nn.functional.scaled_dot_product_attention
        methods = METHODS if device.type != "cuda" else on_a_gpu(METHODS, device)
        if length > LONGEST:
            methods = {
                k: m
                for k, m in methods.items()
                if m.backend == "triton" or (m.pattern != "full" and m.backend != "dense")
            }
        for name, method in {"SDPA": Method(), **methods}.items():
            function = sdpa if name == "SDPA" else Mixer(method, HEADS, device)
            plain = Mixer(method._replace(backend="dense"), HEADS, device)
            yield "length", length, Case(
                f"length {length}", name, both_ways(function, *given, upstream=given[0]),
                check=partial(slopes_apart, function, plain, given) if length <= LONGEST else None,
                cost=partial(multiplied, method, HEADS, length, device, both=True),
            )  # fmt: skip
    given = scores(device)
    for k in (1, 4, 16, 64, 256):
        function = build_transform("topk", k=k)
        yield "k", k, Case(
            f"k {k}", "topk, 512 keys", both_ways(function, given, upstream=given),
            check=partial(gradient_off, function, given, given), cost=partial(moved, given, both=True),
        )  # fmt: skip
    for slots in (8, 16, 32, 64, 128):
        yield "memory slots", slots, _memory(slots, device)
    for words in (1000, 4000, 16000, 64000):
        yield "vocabulary", words, _output(words, device)


def scores(device: torch.device) -> Tensor:
    """Of which top-k keeps more and more."""
    return torch.randn(4, HEADS, 256, 512, generator=torch.Generator().manual_seed(0)).to(device)


def _memory(slots: int, device: torch.device) -> Case:
    """A query to each of 64 memories."""
    site = AttentionSpec.model_validate({"cross": {"module": {"kind": "fixed_memory", "slots": slots}}}).site("cross")
    module = site.build("cross", WIDTH, Dims(heads=1, query_width=WIDTH, key_width=WIDTH, longest_source=200), 0.0)
    module.to(device)
    memory = module.memorize(torch.randn(64, 200, WIDTH, device=device), None)
    query = torch.randn(64, 1, WIDTH, device=device)
    at = Positions(torch.zeros(1, dtype=torch.long, device=device), torch.arange(200, device=device))

    def run() -> Tensor:
        with torch.no_grad():
            return module(query, memory, at).context

    def check() -> float:
        with native.off():
            wanted = run()
        return farthest([run()], [wanted])

    own = check if device.type == "cpu" else None  # on a GPU the definition is all there is
    return Case(f"slots {slots}", "fixed_memory, a query", run, check=own, cost=lambda: operations(run))


def _output(words: int, device: torch.device) -> Case:
    """Forward and backward of 512 tokens."""
    hidden = torch.randn(512, WIDTH, device=device, requires_grad=True)
    weight = torch.randn(words, WIDTH, device=device, requires_grad=True)
    wanted = torch.randint(words, (512,), device=device)

    def run() -> None:
        hidden.grad = weight.grad = None
        smoothed_cross_entropy(nn.functional.linear(hidden, weight), wanted, 0.1)[0].backward()

    def check() -> float:
        with native.off():
            run()
        before = [_taken(each) for each in (hidden, weight)]
        run()
        apart = [(_taken(each) - old).norm() / old.norm() for each, old in zip((hidden, weight), before, strict=True)]
        return float(torch.stack(apart).max())

    own = check if device.type == "cpu" else None  # on a GPU the definition is all there is
    return Case(f"vocabulary {words}", "output and its loss, 512 tokens", run, check=own, cost=lambda: operations(run))


def _taken(parameter: Tensor) -> Tensor:
    """Its gradient."""
    assert parameter.grad is not None
    return parameter.grad.clone()


def exponents(measured: Sequence[tuple[int, Timing]]) -> dict[str, Exponent]:
    """Of each name, from (size, timing)."""
    series: dict[str, list[tuple[int, Timing]]] = {}
    for size, timing in measured:
        series.setdefault(timing.name, []).append((size, timing))
    return {name: _exponent(sorted(points)) for name, points in series.items() if len(points) > 1}


def _exponent(points: Sequence[tuple[int, Timing]]) -> Exponent:
    """The medians of single rounds', as multiples are: what slows a machine for minutes meets all sizes."""
    sizes = [size for size, _ in points]
    turns = [list(zip(sizes, turn, strict=True)) for turn in zip(*(each.rounds for _, each in points), strict=True)]
    slopes, lasts = ([slope(turn[first:]) for turn in turns] for first in (0, -2))
    return Exponent(
        statistics.median(slopes), sizes[0], sizes[-1],
        (max(slopes) - min(slopes)) / 2 if len(slopes) > 1 else None,
        statistics.median(lasts) if len(sizes) > 2 else None,
    )  # fmt: skip


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Of the straight line through the logarithms of (size, seconds), by least squares."""
    xs, ys = [math.log(size) for size, _ in points], [math.log(cost) for _, cost in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)
