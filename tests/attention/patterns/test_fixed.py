"""The fixed patterns against double loops over their definitions, at every length and budget that papers use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from pydantic import Field
from torch import Tensor

from attnbench.attention import build_pattern
from attnbench.attention.patterns.base import Extent, Layout, dense
from attnbench.attention.patterns.window import WindowSpec
from attnbench.attention.types import MaskMod, Positions, Role

LONGEST, MOST = 70, 40
Said = Callable[[int, int, int, bool], bool]


def offsets(n: int, causal: bool) -> list[int]:
    return list(range(1 - n, 1)) if causal else list(range(-(n // 2), (n - 1) // 2 + 1))


def block(i: int, j: int, n: int, causal: bool) -> bool:
    return i // n == j // n


def window(i: int, j: int, n: int, causal: bool) -> bool:
    return j - i in offsets(n, causal)


def dilated(i: int, j: int, n: int, causal: bool) -> bool:
    return j - i in [2 * step for step in offsets(n, causal)]


def sparser(i: int, j: int, n: int, causal: bool) -> bool:
    return j - i in [3 * step for step in offsets(n, causal)]


def first_ones(i: int, j: int, n: int, causal: bool) -> bool:
    return j < n or i < n


CASES = [
    pytest.param("block", {}, block, id="block"),
    pytest.param("window", {}, window, id="window"),
    pytest.param("dilated", {}, dilated, id="dilated"),
    pytest.param("dilated", {"dilation": 3}, sparser, id="dilated-3"),
    pytest.param("global", {}, first_ones, id="global"),
]


@pytest.mark.parametrize("role", ["encoder_self", "decoder_self"])
@pytest.mark.parametrize(("name", "fields", "said"), CASES)
def test_a_pattern_is_its_definition(name: str, fields: dict[str, int], said: Said, role: str):
    causal = role == "decoder_self"
    for n in range(1, MOST + 1):
        wanted = torch.tensor(
            [
                [said(i, j, n, causal) and (j <= i or not causal) for j in range(LONGEST)]
                for i in range(LONGEST)
            ]
        )  # fmt: skip
        pattern = build_pattern(name, n=n, **fields)
        assert wanted.any(1).all()
        for length in range(1, LONGEST + 1):
            assert torch.equal(pattern.dense(length, length, role), wanted[:length, :length])


@pytest.mark.parametrize(("name", "fields", "said"), CASES)
def test_an_ordinary_row_has_the_positions_of_the_budget(name: str, fields: dict[str, int], said: Said):
    for n in range(1, 9):
        for role in ("encoder_self", "decoder_self"):
            row = build_pattern(name, n=n, **fields).dense(80, 80, role)[40 // n * n + n - 1]
            assert int(row.sum()) == n
            assert bool(row[40 // n * n + n - 1]) == (name != "global")


@pytest.mark.parametrize(
    ("n", "first", "last"), [(1, 0, 0), (2, -1, 0), (3, -1, 1), (4, -2, 1), (5, -2, 2)]
)  # fmt: skip
def test_a_window_of_an_even_number_reaches_further_back(n: int, first: int, last: int):
    row = build_pattern("window", n=n).dense(21, 21)[10].nonzero().squeeze(1) - 10
    assert row.tolist() == list(range(first, last + 1))


def test_layers_and_sites_alike_share_one_rule():
    """Block masks are kept by it."""
    rule = WindowSpec(n=5).mask_mod("decoder_self", 0)
    assert WindowSpec(n=5).mask_mod("decoder_self", 3) is rule
    assert WindowSpec(n=5).mask_mod("encoder_self") is not rule
    assert WindowSpec(n=4).mask_mod("decoder_self") is not rule


def test_a_pattern_that_holds_a_list_has_its_rule_all_the_same():
    class Listed(WindowSpec):
        held: list[int] = Field(default_factory=list)

    at = Positions(torch.arange(9), torch.arange(9))
    found = dense(Listed(n=3).mask_mod("encoder_self"), at)[0, 0]
    assert torch.equal(found, build_pattern("window", n=3).dense(9, 9))


def test_a_dilation_of_one_is_the_window():
    for role in ("encoder_self", "decoder_self"):
        assert torch.equal(
            build_pattern("dilated", n=5, dilation=1).dense(30, 30, role),
            build_pattern("window", n=5).dense(30, 30, role),
        )


class _Farther(WindowSpec):
    kind: Literal["farther"] = "farther"

    def near(self, q: Tensor, k: Tensor, n: int, *, causal: bool) -> Tensor:
        return (k - q).abs() <= 2 * n


class _Everywhere(WindowSpec):
    kind: Literal["everywhere"] = "everywhere"

    def mask_mod(self, role: Role, layer: int = 0, **others: object) -> MaskMod:
        return lambda b, h, q, k: k > -1


class _Elsewhere(_Farther):
    kind: Literal["elsewhere"] = "elsewhere"

    def layout(self, role: Role, layer: int = 0, **others: object) -> Layout:
        return Layout(self.mask_mod(role, layer), Extent(-4, 4))


@pytest.mark.parametrize("spec", [_Farther, _Everywhere])
def test_where_keys_of_a_parent_lie_does_not_hold_of_another_rule(spec):
    """Else keys farther away would be left out, and nothing said."""
    assert not spec.sparse
    assert spec(n=2).layout("encoder_self") is None
    assert WindowSpec.sparse


@pytest.mark.parametrize("spec", [_Farther, _Everywhere, _Elsewhere])
def test_how_many_keys_a_parent_allows_does_not_hold_of_another_rule(spec):
    assert spec(n=2).most("encoder_self") is None
    assert WindowSpec(n=2).most("encoder_self") == 2


def test_a_layout_of_ones_own_is_kept():
    layout = _Elsewhere(n=2).layout("encoder_self")
    assert layout is not None
    assert layout.extent == Extent(-4, 4)
