"""The interface of a score transform, its spec, and the rules that every transform obeys.

Rules, the same for every transform (scores `[..., K]`, all per row):

- a row without a valid key, or whose valid scores are all -inf, gives zeros and zero gradients;
- a masked key has weight and gradient exactly 0, whatever its score holds (NaN and inf included);
- a -inf score counts as masked; NaN or +inf at a valid key makes that row's valid weights NaN and no other row's;
- float16 and bfloat16 are computed in float32 and cast back; K = 0 gives an empty result.

A transform in plain torch operations keeps them by beginning with `prepare` and ending with `finish`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnbench.attention.patterns.base import PatternSpec
from attnbench.attention.types import ROLES, Dims, Role
from attnbench.core.inherit import is_outdated
from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec


class ScoreTransform(Protocol):
    """A pure function, or a torch module when it has parameters."""

    def __call__(
        self,
        scores: Float[Tensor, "... K"],
        *,
        valid: Bool[Tensor, "..."] | None = None,
        keep: Bool[Tensor, "..."] | None = None,
        upper: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "... K"]:
        """Weights of each row.

        valid: broadcastable to scores; False gives weight exactly 0. keep: always attended if valid.
        upper: bounds on the weights, broadcastable to scores.
        Raises ValueError where the transform cannot honour `keep` or `upper`.
        """
        ...


FusedKind = Literal["softmax", "topk", "sparsemax", "entmax15", "entmax", "sigmoid"]
"""In the order of `Kind` in _transform.hpp."""


class Fused(NamedTuple):
    """Which compiled transform makes the same weights. k, keep: of topk, keep as in topk_oow; k = 0 keeps all. excess:
    of entmax, alpha - 1 in (0, 1], a number or a tensor that broadcasts to the scores with a last dimension of 1.
    share: of topk instead of k, so many of so many valid keys, rounded up, and the third number at least. first: of
    topk, of equal scores those that come first, k in all.

    Only processors know sigmoid, share and first, the last two only forwards.
    """

    kind: FusedKind
    k: int = 0
    keep: Bool[Tensor, "..."] | None = None
    excess: float | Float[Tensor, "..."] = 0.0
    share: tuple[int, int, int] | None = None
    first: bool = False


SOFTMAX_BELOW = 1e-4
"""Of entmax: at alpha - 1 up to this, softmax, since 1/(alpha - 1) holds no digits there."""


class TransformSpec(Spec):
    """The fields of one transform in YAML, and how to build it."""

    kind: str
    rows: ClassVar[Literal["simplex", "gates"]] = "simplex"
    """simplex: a row with a valid key sums to 1. gates: each weight stands alone."""
    roles: ClassVar[frozenset[Role]] = frozenset(ROLES)
    needs_upper: ClassVar[bool] = False
    """True: depends on what was attended before, so only decoders that run step by step can use it."""
    paper: ClassVar[str] = ""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if is_outdated(cls, "fused", "build") or is_outdated(cls, "fused", "keep"):
            cls.fused = TransformSpec.fused  # a parent's kernel does not make what this one builds, or keeps
        if is_outdated(cls, "is_softmax", "build"):
            cls.is_softmax = TransformSpec.is_softmax

    @property
    def ordered(self) -> bool:
        """Whether weights depend on the order in which the keys stand."""
        return False

    def build(self, dims: Dims) -> ScoreTransform:
        raise unwritten(self, "build")

    def fused(self, built: ScoreTransform) -> Fused | None:
        """What a kernel for whole attention needs to know of what `build` made, but for a `keep` that the site brings;
        None: there is none that serves it."""
        return None

    def require(self) -> None:
        """Raise ValueError when a field that has no default (k of top-k) was given neither directly nor by a budget."""

    def is_softmax(self, keys: int | None = None) -> bool:
        """Whether its weights are those of softmax in every row of at most so many keys; None: of any number."""
        return keys is not None and keys <= 1 and self.rows == "simplex" and not self.needs_upper

    @property
    def may_fail(self) -> bool:
        """Whether it raises an error for a row whose keys may receive less than a row gives."""
        return False

    def keep(self, role: Role) -> PatternSpec | None:
        """Where its `keep` comes from at a site; None: it has none."""
        return None

    @classmethod
    def from_budget(cls, n: int, role: Role) -> Self | None:
        """The transform that attends n positions; None: it takes no budget."""
        return None


transforms: Registry[TransformSpec] = Registry("transform", TransformSpec, "attnbench.attention.transforms")
TransformField = Annotated[TransformSpec, Family(lambda: transforms)]


class Prepared(NamedTuple):
    """scores in float32 (or float64) with -inf at every key that gets no weight; alive: the keys that may get some.

    A row with NaN or +inf at a living key holds NaN at all of them.
    """

    scores: Float[Tensor, "... K"]
    alive: Bool[Tensor, "... K"]


def widen(scores: Float[Tensor, "... K"]) -> Float[Tensor, "... K"]:
    """float16 and bfloat16 are computed in float32. Raises TypeError for integers, as which weights would be 0 or 1."""
    if not scores.is_floating_point():
        raise TypeError(f"scores are floating-point numbers, not {scores.dtype}; convert them, like scores.float()")
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()


def prepare(scores: Float[Tensor, "... K"], valid: Bool[Tensor, "..."] | None) -> Prepared:
    """Scores ready for a row-wise normaliser: widened, and masked with `where` so that no gradient leaks."""
    wide = widen(scores)
    alive = wide != -torch.inf  # NaN counts as alive: it must spoil its row
    if valid is not None:
        alive = alive & valid
    sound = (~alive | (wide < torch.inf)).all(-1, keepdim=True) | ~alive
    wide = wide * torch.where(sound, 1.0, torch.nan)  # a product, so that the gradient of a spoilt row is NaN, too
    return Prepared(wide.masked_fill(~alive, -torch.inf), alive)


def finish(weights: Float[Tensor, "... K"], alive: Bool[Tensor, "... K"], like: Tensor) -> Float[Tensor, "... K"]:
    """The last step after `prepare`: weight 0 at dead keys, no gradient through them, and the dtype of `like`."""
    return weights.masked_fill(~alive, 0.0).to(like.dtype)


def refuse(name: str, **given: Any) -> None:
    """Raise ValueError for an argument that the transform called `name` cannot honour."""
    for argument, value in given.items():
        if value is not None:
            raise ValueError(f"the transform '{name}' takes no '{argument}'")


def check_mask(name: str, given: Tensor | None, scores: Tensor) -> None:
    """Raise ValueError for a mask that does not broadcast to the shape of the scores."""
    if given is None:
        return
    if given.dtype != torch.bool:
        raise ValueError(f"'{name}' must be a boolean mask (True: may be attended), not {given.dtype}")
    fits = zip(reversed(given.shape), reversed(scores.shape), strict=False)
    # each by itself: where sizes are symbols of torch.compile, one of them is not found among numbers
    if given.dim() > scores.dim() or any(size != 1 and size != wanted for size, wanted in fits):
        raise ValueError(f"'{name}' of shape {tuple(given.shape)} does not broadcast to scores {tuple(scores.shape)}")
