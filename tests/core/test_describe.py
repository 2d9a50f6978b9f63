"""A spec's fields are told with the types that YAML writers know."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from attnbench.attention.transforms.base import TransformField
from attnbench.core.describe import Parameter, parameters, summary
from attnbench.core.spec import Spec


class Inner(Spec):
    depth: int = 3


class Sample(Spec):
    """Of the first line alone.

    Not of the others.
    """

    kind: Literal["sample"] = "sample"
    wanted: int
    """What must be given."""
    ties: Literal["threshold", "index"] | None = None
    names: list[str] = Field(default_factory=list)
    transform: TransformField
    inner: Inner = Inner()


def test_fields_have_types_defaults_and_words():
    assert parameters(Sample) == {
        "wanted": Parameter("int", None, "What must be given.", required=True),
        "ties": Parameter("threshold | index | null", None, ""),
        "names": Parameter("list of str", [], ""),
        "transform": Parameter("transform", None, "", required=True),
        "inner": Parameter("Inner", {"depth": 3}, ""),
    }
    assert summary(Sample) == "Of the first line alone."
