import pytest
import torch
from pydantic import ValidationError

from attnbench.core.registry import MemberError
from attnbench.search.beam import BeamSpec
from attnbench.search.length_penalty import LengthPenaltySpec, length_penalties

LENGTHS = torch.arange(1, 200)


@pytest.mark.parametrize(
    ("spec", "length", "expected"),
    [
        ("none", 9, 1.0),
        ("avg", 9, 9.0),
        ({"kind": "avg", "alpha": 0.5}, 9, 3.0),
        ({"kind": "avg", "alpha": 0.0}, 9, 1.0),
        ({"kind": "wu", "alpha": 1.0}, 7, 2.0),
        ("wu", 19, 4.0**0.6),
        ({"kind": "wu", "alpha": 0.0}, 19, 1.0),
    ],
)
def test_values_by_hand(spec, length, expected):
    assert length_penalties.parse(spec).divisor(torch.tensor([length])).item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", length_penalties.kinds())
def test_a_divisor_is_positive_and_never_falls(kind):
    divisor = length_penalties.parse(kind).divisor(LENGTHS)
    assert divisor.dtype == torch.float64
    assert (divisor > 0).all()
    assert (divisor.diff() >= 0).all()


def test_another_shape_is_told_before_a_search():
    class Whole(LengthPenaltySpec):
        kind: str = "whole"

        def divisor(self, length):
            return length.double().sum()

    with pytest.raises(MemberError, match=r"Whole\.divisor gives a tensor of shape \(\) where \(3,\) is asked for"):
        BeamSpec(penalty=Whole())


def test_the_family():
    assert {"none", "avg", "wu"} <= set(length_penalties.kinds())
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        length_penalties.parse({"kind": "wu", "alpha": -1.0})
    assert length_penalties.parse("wu").digest() == length_penalties.parse({"kind": "wu", "alpha": 0.6}).digest()
