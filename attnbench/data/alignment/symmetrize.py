"""Two directed alignments become one (Och & Ney 2003; grow-diag and its kin: Koehn et al. 2005)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal, get_args

from attnbench.core.spec import unknown
from attnbench.data.alignment.links import Link, Links

Method = Literal[
    "forward", "reverse", "intersection", "union", "grow-diag", "grow-diag-final", "grow-diag-final-and"
]  # fmt: skip

METHODS: tuple[Method, ...] = get_args(Method)

_NEIGHBOURS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))


def require_method(name: str) -> None:
    """Raises ValueError for a method that is not among METHODS."""
    if name not in METHODS:
        raise ValueError(unknown("method", name, METHODS))


def symmetrize(forward: Iterable[Link], reverse: Iterable[Link], method: Method) -> Links:
    """One alignment of a pair, sorted by source, then target.

    forward: each target word takes at most one source word. reverse: each source word at most one target word.

    Where the published pseudo-code leaves open what is `e`: it is the target. Points are visited target word by target
    word, and the links of the forward direction are the first to be taken in the final step.

    Raises ValueError for an unknown method.
    """
    one, other = set(forward), set(reverse)
    if method == "forward":
        return sorted(one)
    if method == "reverse":
        return sorted(other)
    if method == "intersection":
        return sorted(one & other)
    if method == "union":
        return sorted(one | other)
    require_method(method)
    # from here on target first: the order in which sorting visits
    grown = _Growth(((target, source) for source, target in one & other))
    grown.grow({(target, source) for source, target in one | other})
    if method != "grow-diag":
        for side in (one, other):
            grown.finish(sorted((target, source) for source, target in side), both=method == "grow-diag-final-and")
    return sorted((source, target) for target, source in grown.points)


class _Growth:
    """Points (target, source), sorted, and the words that they cover."""

    def __init__(self, points: Iterable[Link]) -> None:
        self.points = sorted(points)
        self._targets = {target for target, _ in self.points}
        self._sources = {source for _, source in self.points}

    def grow(self, union: set[Link]) -> None:
        """Take neighbours out of `union` that cover a new word, pass by pass until a pass finds none."""
        waiting = union.difference(self.points)
        before = -1
        while waiting and len(self.points) > before:
            before = len(self.points)
            at = 0
            while at < len(self.points):
                target, source = self.points[at]
                for down, right in _NEIGHBOURS:
                    near = target + down, source + right
                    if near in waiting and not (near[0] in self._targets and near[1] in self._sources):
                        waiting.remove(near)
                        at += self._add(near) <= at  # a point behind us waits for the next pass
                at += 1

    def finish(self, links: list[Link], *, both: bool) -> None:
        """Take the links that cover a new word, or with `both` two."""
        for target, source in links:
            covered = (target in self._targets) + (source in self._sources)
            if covered == 0 or (covered == 1 and not both):
                self._add((target, source))

    def _add(self, point: Link) -> int:
        at = bisect_left(self.points, point)
        self.points.insert(at, point)
        self._targets.add(point[0])
        self._sources.add(point[1])
        return at
