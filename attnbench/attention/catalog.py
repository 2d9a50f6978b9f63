"""Every mechanism of attention by its name: build a transform or a pattern, and list them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float
from pydantic import ValidationError
from torch import Tensor, nn

from attnbench.attention.biases.base import biases
from attnbench.attention.coverage.base import coverages
from attnbench.attention.modules.base import modules
from attnbench.attention.patterns.base import PatternSpec, dense, patterns
from attnbench.attention.scores.base import scores as score_family
from attnbench.attention.transforms.base import ScoreTransform, transforms
from attnbench.attention.types import Dims, Positions, Role
from attnbench.core.describe import Parameter, parameters, summary
from attnbench.core.registry import Registry
from attnbench.core.spec import Spec, dotted, problems, unknown

S = TypeVar("S", bound=Spec)


class Mechanism(NamedTuple):
    """kind: the stage of attention it serves ("transform", "pattern", ...). name: what YAML and `build_*` call it."""

    kind: str
    name: str
    parameters: dict[str, Parameter]
    paper: str
    description: str = ""


def build_transform(name: str, *, heads: int = 1, strict: bool = False, **params: Any) -> ScoreTransform:
    """The transform called `name` with the given parameters: `f(scores, *, valid=None, keep=None, upper=None)`.

    scores: `[..., K]`, for a learned alpha `[B, H, Q, K]` with H = heads. valid, keep: boolean and upper: float, each
    broadcastable to the scores. Gives the weights, shaped like the scores: exactly 0 where `valid` is False, and for
    rows without a valid key. The result is a torch module where it has parameters to train.

    strict: NaN or +inf at a valid key raises ValueError; without it that row's weights are NaN.
    Raises ValueError for an unknown name, an unknown, missing or bad parameter; the transform raises it for a `keep` or
    `upper` that it cannot honour.
    """
    if heads < 1:
        raise ValueError(f"a transform serves at least one head, not {heads}")
    spec = _parse(transforms, name, params)
    spec.require()
    transform = spec.build(Dims(heads=heads))
    return StrictTransform(transform) if strict else transform


def build_pattern(name: str, *, n: int | None = None, **params: Any) -> Pattern:
    """The pattern called `name` that lets a row far from both ends attend to n positions.

    Raises ValueError for an unknown name and an unknown, missing or bad parameter.
    """
    spec = _parse(patterns, name, params if n is None else {"n": n, **params})
    spec.require()
    return Pattern(spec)


class Pattern:
    """A pattern as a mask."""

    def __init__(self, spec: PatternSpec) -> None:
        self.spec = spec

    def dense(
        self, q_len: int, k_len: int, role: Role = "encoder_self", *, layer: int = 0, head: int = 0, seed: int = 0
    ) -> Bool[Tensor, "Q K"]:
        """Which keys each query may look at. In self-attention the queries are the last q_len of k_len positions, so
        that one row is a step of decoding; in cross-attention they are the first. seed: of draws, where the pattern has
        no own.

        Raises ValueError for a role that the pattern does not know, and for more queries than positions.
        """
        if role not in self.spec.roles:
            raise ValueError(
                f"the pattern '{self.spec.kind}' cannot stand at {role} ({', '.join(sorted(self.spec.roles))})"
            )
        if role != "cross" and q_len > k_len:
            raise ValueError(f"self-attention has as many keys as queries at least, not {k_len} for {q_len}")
        first = 0 if role == "cross" else k_len - q_len
        rule = self.spec.mask_mod(role, layer, lengths=torch.tensor([k_len]), seed=seed)
        if rule is None:
            return torch.ones(q_len, k_len, dtype=torch.bool)
        found = dense(rule, Positions(torch.arange(first, first + q_len), torch.arange(k_len)), head + 1)
        return found.expand(1, head + 1, q_len, k_len)[0, head]


class StrictTransform(nn.Module):
    """A transform that refuses scores it could only answer with NaN."""

    def __init__(self, transform: ScoreTransform) -> None:
        super().__init__()
        self.transform = transform

    def forward(
        self,
        scores: Float[Tensor, "... K"],
        *,
        valid: Bool[Tensor, "..."] | None = None,
        keep: Bool[Tensor, "..."] | None = None,
        upper: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "... K"]:
        weights = self.transform(scores, valid=valid, keep=keep, upper=upper)
        spoilt = ~(scores < torch.inf)  # NaN or +inf
        if valid is not None:
            spoilt = spoilt & valid
        if bool(spoilt.any()):
            at = tuple(spoilt.nonzero()[0].tolist())
            value = scores[at].item()
            raise ValueError(f"{int(spoilt.sum())} valid scores are NaN or +inf, the first {value} at index {at}")
        return weights


def _parse(family: Registry[S], name: str, params: Mapping[str, Any]) -> S:
    """The spec with these parameters. Raises ValueError with every fault."""
    cls = family.get(name)
    known = [field for field in cls.model_fields if field != "kind"]
    for given in params:
        if given not in known:
            raise ValueError(f"{name}: {unknown('parameter', given, known)}")
    try:
        return cls.model_validate({"kind": name, **params})
    except ValidationError as error:
        rows = (": ".join(filter(None, (name, dotted(path), message))) for path, message in problems(error))
        raise ValueError("; ".join(rows)) from None


def mechanisms() -> list[Mechanism]:
    """Every registered transform, pattern, score, bias, coverage and module, in this order, each family by name."""
    families: list[Registry[Any]] = [transforms, patterns, score_family, biases, coverages, modules]
    return [_describe(family, name) for family in families for name in family.kinds()]


def _describe(family: Registry[Any], name: str) -> Mechanism:
    cls: type[Spec] = family.get(name)
    paper = getattr(cls, "paper", "")
    return Mechanism(family.noun, name, parameters(cls), paper, summary(cls))
