"""What a search needs (a model that can step) and what it returns (hypotheses, best first)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from typing import Annotated, Literal, NamedTuple, Protocol

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor, nn

from attnbench.core.bfloat16 import multiplies_bfloat16
from attnbench.core.packed import Quantization, packed
from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec
from attnbench.models.base import Seq2SeqModel, Source


class SpecialIds(NamedTuple):
    """Special ids of the target: `bos` begins an output, `eos` ends it; neither `pad` nor `bos` stands in one."""

    bos: int
    eos: int
    pad: int


class Hypothesis(NamedTuple):
    """tokens: ids without BOS and EOS. log_prob: nats, EOS included. score: what ranked it. finished: EOS came."""

    tokens: list[int]
    log_prob: float
    score: float
    finished: bool


DEAD_END = Hypothesis([], float("-inf"), float("-inf"), False)
"""The answer where the model left nothing to choose: every continuation was impossible, or not a number."""


class Searcher(Protocol):
    """Hypotheses of each source in the batch's order, best first, at least one.

    What a source gets depends on it alone, not on the batch. The model should be in eval mode, and compute as the
    spec asks: `computing`.
    """

    @property
    def spec(self) -> SearchSpec: ...

    def __call__(self, model: Seq2SeqModel, source: Source, special: SpecialIds) -> list[list[Hypothesis]]: ...


class SearchSpec(Spec):
    """The fields of one search in YAML, and how to build it."""

    kind: str
    max_ratio: float = Field(default=1.2, ge=0, le=1000, allow_inf_nan=False)
    """An output has at most max_ratio * (length of its source) + max_extra tokens, EOS included."""
    max_extra: int = Field(default=10, ge=0, le=1_000_000)
    """See max_ratio."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: outputs are looked for with products in bfloat16 by autocast; weights, scores and normalisers stay in
    float32, and so does all else that is measured of a model, as its perplexity. Where the device has no instructions
    for bfloat16 all is float32. A training that decodes at its validations does so in its own precision."""
    quantization: Quantization | None = None
    """int8: linear layers multiply whole numbers of 8 bits (Wu et al. 2020), each row of weights and states rounded by
    a step of its own; recurrent cells, convolutions, attention itself, coverages and fertilities do not, nor does what
    else is measured of a model, as its perplexity. None: numbers of the precision."""

    @property
    def places(self) -> int:
        """Hypotheses of a source that grow at the same time."""
        return 1

    @property
    def outputs(self) -> int:
        """Hypotheses that it returns of a source, at most."""
        return 1

    @property
    def asks_received(self) -> bool:
        """Whether it asks a model what each source word has received of its attention."""
        return False

    def precision_on(self, device: torch.device) -> Literal["fp32", "bf16"]:
        """What the device computes in: float32 where it has no instructions for the other."""
        return "bf16" if self.precision == "bf16" and multiplies_bfloat16(device) else "fp32"

    def room(self, source: Source, most: int | None = None) -> Int[Tensor, "B"]:
        """The most tokens each output may have, EOS included: at least one, whatever the source.

        most: what the model can read (Seq2SeqModel.max_length); it bounds every output.
        """
        ratio = Fraction(str(self.max_ratio))  # the decimal that was written: 1.15 times 100 is 115, and 114 in binary
        room = [math.floor(length * ratio) + self.max_extra for length in source.valid.sum(1).tolist()]
        return torch.tensor(room, dtype=torch.int64, device=source.valid.device).clamp(1, most)

    def build(self) -> Searcher:
        raise unwritten(self, "build")


searches: Registry[SearchSpec] = Registry("search", SearchSpec, "attnbench.search")
SearchField = Annotated[SearchSpec, Family(lambda: searches)]


@contextmanager
def computing(model: nn.Module, spec: SearchSpec) -> Iterator[None]:
    """In the block the model computes as a search asks: in its precision, from weights that are packed for it.

    The weights must not change meanwhile; blocks within blocks of one spec add nothing (core.packed).
    """
    device = next(model.parameters()).device
    lower = spec.precision_on(device) == "bf16"
    with torch.autocast(device.type, torch.bfloat16) if lower else nullcontext(), packed(model, spec.quantization):
        yield


def accumulator(device: torch.device) -> torch.dtype:
    """The type in which log-probabilities are summed."""
    return torch.float32 if device.type == "mps" else torch.float64
