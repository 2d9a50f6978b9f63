"""What `attnbench speed` measures: each plan gives the sections of its report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from attnbench.bench import models, ops, scaling
from attnbench.bench.peers import Peer
from attnbench.bench.results import Section
from attnbench.bench.timer import Case, Timing, measure
from attnbench.train.runtime import Runtime

What = Literal["ops", "train", "decode", "scaling"]


class Plan(NamedTuple):
    """quick: fewer and smaller cases, for a look before a release. peak: measured FLOP/s of matrix products."""

    runtime: Runtime
    rounds: int
    quick: bool
    peers: list[Peer]
    peak: float
    sizes: list[str] | None = None

    def time(self, cases: list[Case], *, loose: bool = False) -> list[Timing]:
        """loose: the cases are of the precision, not float32 whatever it is."""
        return measure(
            cases, rounds=self.rounds, chunk=0.05 if self.quick else 0.2, device=self.runtime.device,
            loose=loose and self.runtime.precision == "bf16",
        )  # fmt: skip


def ops_sections(plan: Plan) -> list[Section]:
    device = plan.runtime.device
    dtype = torch.bfloat16 if plan.runtime.precision == "bf16" else torch.float32
    shapes = ops.SHAPES[:1] if plan.quick else ops.SHAPES
    found = []
    for shape in shapes:  # one shape at a time: what its cases hold is let go before the next
        cases = list(ops.transform_cases((shape,), device, plan.peers))
        found += plan.time(cases)
    sections = [Section("transforms of scores", (ops.BASELINE,), found)]
    found = []
    for shape in shapes:
        found += plan.time(list(ops.attention_cases((shape,), device, dtype)), loose=True)
    return [*sections, Section("attention, from projected queries, keys and values", ("SDPA", "softmax"), found)]


def train_sections(plan: Plan) -> list[Section]:
    sizes = plan.sizes or (["tiny"] if plan.quick else ["mini", "iwslt"])
    found = []
    for size in sizes:
        found += plan.time(list(models.training_cases([size], list(models.COMPARED), 2, plan.runtime)))
    return [Section("training, target tokens", ("softmax",), found, "tokens", peak_flops=plan.peak)]


def decode_sections(plan: Plan) -> list[Section]:
    sizes = plan.sizes or (["tiny"] if plan.quick else ["mini", "iwslt"])
    rows, lengths, beams = ([16], [26], [1]) if plan.quick else ([1, 64], [26, 100], [1, 5])
    found = []
    for size in sizes:
        cases = models.decoding_cases([size], list(models.COMPARED), rows, lengths, beams, plan.runtime)
        found += plan.time(list(cases))
    return [Section("decoding, tokens of the best outputs", ("softmax",), found, "tokens")]


def scaling_sections(plan: Plan) -> list[Section]:
    lengths = (128, 256, 512) if plan.quick else (512, 1024, 2048, 4096)
    made = list(scaling.cases(lengths, plan.runtime.device))
    timed = plan.time([case for _, _, case in made])
    measured = [(what, size, timing) for (what, size, _), timing in zip(made, timed, strict=True)]
    slopes = scaling.exponents(measured)
    return [
        Section(
            f"cost against {group}", ("SDPA",), [timing for what, _, timing in measured if what == group],
            exponents={name: value for (what, name), value in slopes.items() if what == group},
        )
        for group in scaling.GROUPS
    ]  # fmt: skip


PLANS: dict[What, Callable[[Plan], list[Section]]] = {
    "ops": ops_sections,
    "train": train_sections,
    "decode": decode_sections,
    "scaling": scaling_sections,
}
