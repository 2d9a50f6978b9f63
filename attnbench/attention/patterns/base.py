"""The interface of an attention pattern: one elementwise rule that training, decoding and kernels all evaluate."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from attnbench.attention.types import ROLES, MaskMod, Positions, Role
from attnbench.core.inherit import is_outdated
from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec


@runtime_checkable
class Draw(Protocol):
    """Keys that rows draw for themselves, n each."""

    n: int

    def keys(
        self, queries: int, heads: int, device: torch.device, first: int = 0
    ) -> tuple[Int[Tensor, "#B H Q n"], Bool[Tensor, "#B H Q n"]]:
        """The keys that each of so many positions draws, from `first` on, and which of the n places hold one."""
        ...


class Extent(NamedTuple):
    """Where a pattern's keys lie: none but those `first` to `last` away from a row, and the first `tokens` positions.

    first > last: no key is near. block: no row looks out of its block of so many positions, so that a path in whole
    blocks needs no neighbours; 0: there are none. tokens: they look at all keys themselves, where nothing is causal.
    """

    first: int = 0
    last: int = -1
    block: int = 0
    tokens: int = 0

    @property
    def near(self) -> bool:
        """Whether there are keys around a row."""
        return self.first <= self.last


class Layout(NamedTuple):
    """A pattern for a path that visits no other keys than its own. rule: elementwise, of all but what is drawn."""

    rule: MaskMod
    extent: Extent
    draw: Draw | None = None


class PatternSpec(Spec):
    """The fields of one pattern in YAML. A pattern never sees data; padding is not its business."""

    kind: str
    roles: ClassVar[frozenset[Role]] = frozenset(ROLES)
    drawn: ClassVar[bool] = False
    """True: it depends on a seed and, where it is not causal, on how many keys each row of the batch has."""
    sparse: ClassVar[bool] = False
    """True: it has a `layout`, and so costs no more than the keys that rows look at."""
    paper: ClassVar[str] = ""

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if is_outdated(cls, "layout", "mask_mod"):
            cls._lies_anywhere()
        if is_outdated(cls, "most", "mask_mod"):
            cls.most = PatternSpec.most

    @classmethod
    def _lies_anywhere(cls) -> None:
        """Where a parent's layout says nothing of this one's rule."""
        cls.layout, cls.sparse = PatternSpec.layout, False

    def mask_mod(
        self, role: Role, layer: int = 0, *, lengths: Int[Tensor, "B"] | None = None, seed: int = 0
    ) -> MaskMod | None:
        """The rule for one site, causality of `decoder_self` included; None: everyone may look at everyone.

        lengths: keys of each row of the batch. seed: the run's. Only a `drawn` pattern looks at them.
        """
        raise unwritten(self, "mask_mod")

    def layout(
        self, role: Role, layer: int = 0, *, lengths: Int[Tensor, "B"] | None = None, seed: int = 0
    ) -> Layout | None:
        """Where the keys lie that `mask_mod` of the same arguments allows; None: anywhere."""
        return None

    def most(self, role: Role) -> int | None:
        """The most keys that any row may look at; None: as many as there are, or nobody knows."""
        return None

    def require(self) -> None:
        """Raise ValueError when a field was not given that has no default, and a budget did not set it either."""

    @classmethod
    def from_budget(cls, n: int, role: Role) -> Self | None:
        """The pattern that lets an ordinary row attend n positions; None: it takes no budget."""
        return None


patterns: Registry[PatternSpec] = Registry("pattern", PatternSpec, "attnbench.attention.patterns")
PatternField = Annotated[PatternSpec, Family(lambda: patterns)]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A position looks at itself and at what came before."""
    return k <= q


def dense(rule: MaskMod, positions: Positions, heads: int = 1, rows: int = 1) -> Bool[Tensor, "#B #H Q K"]:
    """The rule as a boolean tensor over absolute positions. rows: of the batch, where it depends on them."""
    device = positions.q.device
    row = torch.arange(rows, device=device).view(rows, 1, 1, 1)
    head = torch.arange(heads, device=device).view(1, heads, 1, 1)
    return rule(row, head, positions.q.view(1, 1, -1, 1), positions.k.view(1, 1, 1, -1))


def hashable(pattern: PatternSpec) -> bool:
    """Whether what is made of it can be kept: a field that holds a list cannot be looked up."""
    try:
        hash(pattern)
    except TypeError:
        return False
    return True
