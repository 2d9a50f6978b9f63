"""What specs of one's own inherit."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from attnbench.attention.patterns.window import WindowSpec
from attnbench.attention.transforms.base import ScoreTransform, TransformSpec, transforms
from attnbench.attention.transforms.softmax import SoftmaxSpec, softmax
from attnbench.attention.transforms.topk import TopKSpec
from attnbench.attention.types import Dims


def colder(scores: Tensor, *, valid: Tensor | None = None, **others: object) -> Tensor:
    return softmax(scores * 4, valid=valid)


class Colder(SoftmaxSpec):
    kind: Literal["colder"] = "colder"

    def build(self, dims: Dims) -> ScoreTransform:
        return partial(colder)


class Fewer(TopKSpec):
    kind: Literal["fewer"] = "fewer"


def test_a_kernel_of_the_parent_does_not_stand_for_what_a_child_builds():
    """Else steps of decoding would attend otherwise than training did."""
    dims = Dims()
    for spec in (Colder(), Colder.model_validate({})):
        assert spec.fused(spec.build(dims)) is None
    torch.testing.assert_close(Colder().build(dims)(torch.tensor([1.0, 2.0])), torch.tensor([4.0, 8.0]).softmax(0))


class Beside(TopKSpec):
    """Keeps a window, too, which its parent's kernel knows nothing of."""

    kind: Literal["beside"] = "beside"

    def keep(self, role):
        return WindowSpec(n=3)


def test_a_kernel_of_the_parent_does_not_stand_for_what_a_child_keeps():
    beside = Beside(k=2)
    assert beside.fused(beside.build(Dims())) is None


def test_a_child_that_builds_otherwise_is_not_called_softmax():
    assert SoftmaxSpec().is_softmax()
    assert not Colder().is_softmax()
    assert Fewer(k=2).is_softmax(2)


@pytest.mark.parametrize(("raw", "keys", "wanted"), [
    ({"kind": "entmax", "alpha": 1}, None, True), ({"kind": "entmax", "alpha": 1.00005}, None, True),
    ({"kind": "entmax", "alpha": 1.001}, None, False), ({"kind": "entmax", "alpha": "learned"}, None, False),
    ({"kind": "entmax", "alpha": "learned"}, 1, True), ("sparsemax", 1, True), ("sparsemax", 2, False),
    ({"kind": "topk", "ratio": 0.5, "at_least": 3}, 3, True), ({"kind": "topk", "ratio": 0.5}, 1, True),
    ({"kind": "topk", "ratio": 0.5}, 2, False), ("sigmoid", 1, False), ("csparsemax", 1, False),
])  # fmt: skip
def test_who_is_softmax_is_told(raw: Any, keys: int | None, wanted: bool):
    assert transforms.parse(raw).is_softmax(keys) is wanted


def test_what_builds_as_its_parent_keeps_the_kernel():
    fewer = Fewer(k=2)
    assert fewer.fused(fewer.build(Dims())) == TopKSpec(k=2).fused(TopKSpec(k=2).build(Dims()))
    assert Fewer.fused is not TransformSpec.fused
