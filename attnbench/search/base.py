"""What a search needs (a model that can step) and what it returns (hypotheses, best first)."""

from __future__ import annotations

from typing import Annotated, NamedTuple, Protocol

from attnbench.core.registry import Family, Registry
from attnbench.core.spec import Spec
from attnbench.models.base import Seq2SeqModel, Source


class Limits(NamedTuple):
    """Special ids, and how long an output may grow: `ratio * source length + extra` tokens, EOS included."""

    bos: int
    eos: int
    pad: int
    ratio: float = 1.2
    extra: int = 10


class Hypothesis(NamedTuple):
    """tokens: ids without BOS and EOS. log_prob: summed nats, EOS included. score: what ranked it. finished: EOS came."""

    tokens: list[int]
    log_prob: float
    score: float
    finished: bool


class Searcher(Protocol):
    """Hypotheses of each source in the batch's order, best first."""

    def __call__(self, model: Seq2SeqModel, source: Source, limits: Limits) -> list[list[Hypothesis]]: ...


class SearchSpec(Spec):
    """The fields of one search in YAML, and how to build it."""

    kind: str

    def build(self) -> Searcher:
        raise NotImplementedError


searches: Registry[SearchSpec] = Registry("search", SearchSpec, "attnbench.search")
SearchField = Annotated[SearchSpec, Family(lambda: searches)]
