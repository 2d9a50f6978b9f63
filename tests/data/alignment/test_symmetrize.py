from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.data.alignment.symmetrize import METHODS, symmetrize

NEIGHBOURS = ((-1, 0), (0, -1), (1, 0), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))


def koehn(forward, reverse, sources, targets, method):
    """The published pseudo-code: e a target word, f a source word, over the whole grid."""
    e2f, f2e = ({(e, f) for f, e in side} for side in (forward, reverse))
    alignment = e2f & f2e
    union = e2f | f2e

    def aligned_e(e):
        return any((e, f) in alignment for f in range(sources))

    def aligned_f(f):
        return any((e, f) in alignment for e in range(targets))

    added = True
    while added:
        added = False
        for e in range(targets):
            for f in range(sources):
                if (e, f) in alignment:
                    for de, df in NEIGHBOURS:
                        new = e + de, f + df
                        if (not aligned_e(new[0]) or not aligned_f(new[1])) and new in union:
                            alignment.add(new)
                            added = True
    if method != "grow-diag":
        for side in (e2f, f2e):
            for e in range(targets):
                for f in range(sources):
                    free = [not aligned_e(e), not aligned_f(f)]
                    if (all(free) if method == "grow-diag-final-and" else any(free)) and (e, f) in side:
                        alignment.add((e, f))
    return sorted((f, e) for e, f in alignment)


@st.composite
def directed(draw):
    sources, targets = draw(st.integers(0, 7)), draw(st.integers(0, 7))
    if not sources or not targets:
        return set(), set(), sources, targets
    comes = draw(st.lists(st.integers(-1, sources - 1), min_size=targets, max_size=targets))
    goes = draw(st.lists(st.integers(-1, targets - 1), min_size=sources, max_size=sources))
    forward = {(f, e) for e, f in enumerate(comes) if f >= 0}
    reverse = {(f, e) for f, e in enumerate(goes) if e >= 0}
    return forward, reverse, sources, targets


@pytest.mark.parametrize("method", ["grow-diag", "grow-diag-final", "grow-diag-final-and"])
@settings(max_examples=150, deadline=None)
@given(case=directed())
def test_grown_alignments_are_those_of_the_pseudo_code(method, case):
    forward, reverse, sources, targets = case
    assert symmetrize(forward, reverse, method) == koehn(forward, reverse, sources, targets, method)


@settings(max_examples=50, deadline=None)
@given(directed())
def test_simple_methods_and_what_lies_within_what(case):
    forward, reverse, *_ = case
    found = {method: symmetrize(forward, reverse, method) for method in METHODS}
    assert found["forward"] == sorted(forward)
    assert found["reverse"] == sorted(reverse)
    assert found["intersection"] == sorted(forward & reverse)
    assert found["union"] == sorted(forward | reverse)
    order = ["intersection", "grow-diag", "grow-diag-final-and", "grow-diag-final", "union"]
    sets = [set(found[method]) for method in order]
    assert sets[0] <= sets[1] <= sets[2] <= sets[4]
    assert sets[1] <= sets[3] <= sets[4]


def test_a_point_behind_waits_for_the_next_pass():
    """(target 0, source 1) is next to (1, 1) but comes before it; it may bring (0, 0) only when it is visited again."""
    forward = [(1, 0), (1, 1)]
    reverse = [(0, 0), (1, 1)]
    assert symmetrize(forward, reverse, "grow-diag") == koehn(forward, reverse, 2, 2, "grow-diag") == [
        (0, 0), (1, 0), (1, 1),
    ]  # fmt: skip


def test_unknown_method_is_named():
    with pytest.raises(ValueError, match=r"unknown method 'grow'.*grow-diag-final-and"):
        symmetrize([], [], "grow")  # pyright: ignore[reportArgumentType]
