from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from attnbench.core.errors import SpecError
from attnbench.core.files import dump_yaml, parse_yaml
from attnbench.core.registry import Family, Registry
from attnbench.core.spec import Spec, differing, dotted, problems, spec_error, unknown


class Shape(Spec):
    kind: str


shapes: Registry[Shape] = Registry("shape", Shape, "attnbench.core")


@shapes.register
class Circle(Shape):
    kind: Literal["circle"] = "circle"
    radius: float = Field(default=1.0, gt=0)


@shapes.register
class Square(Shape):
    kind: Literal["square"] = "square"
    side: int
    style: Literal["full", "hollow"] = "full"


class Box(Spec):
    shape: Annotated[Shape, Family(lambda: shapes)] = Field(default_factory=Circle)
    count: int = Field(default=1, ge=1)
    weight: float = 1.0
    lid: bool = True
    where: Path | None = None
    names: list[str] = Field(default_factory=list)
    sizes: dict[str, float] = Field(default_factory=dict)
    inner: Box | None = None

    @model_validator(mode="after")
    def _liftable(self) -> Self:
        if self.weight > 1000:
            raise ValueError("weight above 1000: no one can lift it")
        return self


def faults(text: str) -> list[str]:
    """The lines of the error that a YAML text gives as a Box."""
    raw, lines = parse_yaml(text, "box.yaml")
    with pytest.raises(ValidationError) as caught:
        Box.model_validate(raw)
    return str(spec_error(caught.value, "box.yaml", lines)).splitlines()


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("lid: true\ncuont: 3\n", "box.yaml:2: cuont: ", ["'cuont'", "did you mean 'count'?"]),
        ("count: '3'\n", "box.yaml:1: count: ", ["valid integer", "'3'"]),
        ("count: 1.5\n", "box.yaml:1: count: ", ["integer", "1.5"]),
        ("count: 0\n", "box.yaml:1: count: ", ["greater than or equal to 1", "0"]),
        ("lid: 1\n", "box.yaml:1: lid: ", ["boolean"]),
        ("lid: no\n", "box.yaml:1: lid: ", ["boolean", "'no'"]),
        ("weight: heavy\n", "box.yaml:1: weight: ", ["number", "'heavy'"]),
        ("names: a\n", "box.yaml:1: names: ", ["list"]),
        ("names:\n  - a\n  - 2\n", "box.yaml:3: names.1: ", ["string", "2"]),
        ("shape: circel\n", "box.yaml:1: shape.kind: ", ["unknown shape 'circel'", "did you mean 'circle'?"]),
        ("shape:\n  kind: circel\n", "box.yaml:2: shape.kind: ", ["did you mean 'circle'?"]),
        ("shape: {radius: 2}\n", "box.yaml:1: shape: ", ["needs a 'kind'", "circle, square"]),
        ("shape: 3\n", "box.yaml:1: shape: ", ["a shape is a name or a mapping"]),
        ("shape:\n  kind: circle\n  raduis: 2\n", "box.yaml:3: shape.raduis: ", ["did you mean 'radius'?"]),
        ("shape:\n  kind: circle\n  radius: -1\n", "box.yaml:3: shape.radius: ", ["greater than 0", "-1"]),
        ("lid: true\nshape: square\n", "box.yaml:2: shape.side: ", ["required"]),
        (
            "inner:\n  inner:\n    shape:\n      kind: square\n      side: 2\n      style: round\n",
            "box.yaml:6: inner.inner.shape.style: ",
            ["unknown choice 'round'", "full, hollow"],
        ),
        ("inner:\n  weight: 2000\n", "box.yaml:1: inner: ", ["no one can lift it"]),
        ("weight: 2000\n", "box.yaml:1: ", ["no one can lift it"]),
        ("inner: {count: 2,\n  cuont: 3}\n", "box.yaml:2: inner.cuont: ", ["did you mean 'count'?"]),
    ],
)
def test_a_fault_is_told_at_its_line_and_path(text: str, place: str, words: list[str]):
    (line,) = faults(text)
    assert line.startswith(place), line
    for word in words:
        assert word in line


def test_every_fault_is_told_once():
    found = faults("count: 0\nlid: 3\nshape: {kind: circle, radius: 0}\ninner: {weight: x}\n")
    assert [line.split(": ")[1] for line in found] == ["shape.radius", "count", "lid", "inner.weight"]


class Union(Spec):
    names: str | list[str] = "a"
    sizes: dict[str, str | int] = Field(default_factory=dict)
    depth: Annotated[float, Field(ge=1)] | Literal["deep"] = 1.0


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("names: 3", "names: input should be a valid string (given: 3), or input should be a valid list (given: 3)"),
        ("names: [a, 3]", "names.1: input should be a valid string (given: 3)"),
        ("sizes: {str: 1, int: 1.5}", "sizes.int: input should be a valid string (given: 1.5), or input should be a"),
        ("depth: 0.5", "depth: input should be greater than or equal to 1 (given: 0.5), or input should be 'deep'"),
        ("depth: dep", "depth: input should be a valid number (given: 'dep'), or unknown choice 'dep'; did you mean"),
    ],
)
def test_a_union_is_one_place(text: str, fault: str):
    raw, lines = parse_yaml(text)
    with pytest.raises(ValidationError) as caught:
        Union.model_validate(raw)
    (row,) = str(spec_error(caught.value, "f", lines)).splitlines()
    assert row.startswith(f"f:1: {fault}"), row


def test_a_path_given_elsewhere_is_told_there():
    with pytest.raises(ValidationError) as caught:
        Box.model_validate({"count": 0, "lid": 3, "weight": "x"})
    lines = {(): 1, ("count",): "--set count=0", ("lid",): 4}
    found = str(spec_error(caught.value, "box.yaml", lines)).splitlines()
    assert [line.split(": ")[0] for line in found] == ["--set count=0", "box.yaml:1", "box.yaml:4"]
    assert str(spec_error(caught.value, "a command", {})).startswith("a command: count: ")


def test_a_path_may_begin_below_the_text():
    with pytest.raises(ValidationError) as caught:
        Circle.model_validate({"radius": 0})
    assert problems(caught.value, ("shape",))[0][0] == ("shape", "radius")


@pytest.mark.filterwarnings("ignore:Field name:UserWarning")  # by which pydantic lets it pass
def test_a_field_cannot_be_called_what_a_parent_tells():
    class Parent(Spec):
        @property
        def outputs(self) -> int:
            return 1

    class Child(Parent):  # which tells it itself
        @property
        def outputs(self) -> int:
            return 2

    assert Child().outputs == 2
    with pytest.raises(TypeError, match=r"^Other\.outputs: Parent tells something by this name"):
        type("Other", (Parent,), {"__annotations__": {"outputs": int}, "__module__": __name__, "outputs": 3})


def test_specs_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Box().count = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_replace_keeps_what_was_given_and_validates():
    box = Box(count=2, names=["a"]).replace(count=3)
    assert box == Box(count=3, names=["a"])
    with pytest.raises(ValidationError):
        box.replace(count=0)
    with pytest.raises(ValidationError, match="unknown key"):
        box.replace(cuont=1)


def test_unknown_names_the_nearest_and_all():
    assert (
        unknown("site", "cros", ["cross", "self"]) == "unknown site 'cros'; did you mean 'cross'? (known: cross, self)"
    )
    assert unknown("site", "xyz", ["cross"]) == "unknown site 'xyz' (known: cross)"
    assert unknown("site", "x", []) == "unknown site 'x' (known: none)"
    assert dotted(("a", 0, "b")) == "a.0.b"


SHAPES = st.one_of(
    st.just("circle"),
    st.fixed_dictionaries(
        {"kind": st.just("circle")}, optional={"radius": st.sampled_from([1, 1.0, 2, 2.5, math.inf])}
    ),
    st.fixed_dictionaries(
        {"kind": st.just("square"), "side": st.integers(1, 3)}, optional={"style": st.sampled_from(["full", "hollow"])}
    ),
)
BOXES = st.recursive(
    st.fixed_dictionaries(
        {},
        optional={
            "shape": SHAPES,
            "count": st.integers(1, 3),
            "weight": st.sampled_from([1, 1.0, 2, 2.0, 0.5, -1e-7, 12345.678e-2]),
            "lid": st.booleans(),
            "names": st.lists(st.sampled_from(["a", "b", "no", "1"]), max_size=2),
            "sizes": st.dictionaries(st.sampled_from("xyz"), st.sampled_from([1, 1.0, 2.5]), max_size=2),
        },
    ),
    lambda inner: st.fixed_dictionaries({}, optional={"inner": inner, "count": st.integers(1, 2)}),
    max_leaves=2,
)


@settings(max_examples=150, deadline=None)
@given(BOXES, BOXES)
def test_equal_specs_have_equal_digests_and_others_differ(one: dict[str, Any], two: dict[str, Any]):
    first, second = Box.model_validate(one), Box.model_validate(two)
    assert (first == second) == (first.digest() == second.digest())


@settings(max_examples=40, deadline=None)
@given(BOXES)
def test_a_digest_survives_yaml_and_the_order_of_keys(raw: dict[str, Any]):
    box = Box.model_validate(raw)
    assert len(box.digest()) == 12
    back, _ = parse_yaml(dump_yaml(box.dump()))
    assert Box.model_validate(back) == box
    assert Box.model_validate(back).digest() == box.digest()
    assert Box.model_validate(reversed_keys(raw)).digest() == box.digest()


def reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_keys(item) for key, item in reversed(value.items())}
    return value


@settings(max_examples=50, deadline=None)
@given(BOXES)
def test_a_field_added_with_a_default_keeps_the_digests(raw: dict[str, Any]):
    class Later(Box):
        added: int = 3

    box, later = Box.model_validate(raw), Later.model_validate(raw)
    assert later.digest() == box.digest()
    assert later.replace(added=4).digest() != box.digest()


def test_only_the_class_of_a_family_member_tells_it_apart():
    @shapes.register
    class Disc(Shape):
        kind: Literal["disc"] = "disc"
        radius: float = 1.0

    assert Box(shape=Disc()).digest() != Box(shape=Circle()).digest()
    assert Box(shape=Disc(radius=2)).dump()["shape"] == {"kind": "disc", "radius": 2.0}


@settings(max_examples=50, deadline=None)
@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_numbers_are_told_apart_to_the_last_bit(one: float, two: float):
    assume(max(one, two) <= 1000)
    assert (one == two) == (Box(weight=one).digest() == Box(weight=two).digest())


def test_a_known_digest():
    # half a table may have been made by an earlier version
    assert Box(shape=Square(side=2), weight=0.5, where=Path("a/b"), sizes={"b": 1.0}).digest() == "875f1855a39d"


def test_what_is_no_mapping_is_a_spec_error():
    with pytest.raises(ValidationError) as caught:
        Box.model_validate([1])
    assert isinstance(spec_error(caught.value, "f", {}), SpecError)


def test_where_two_specs_part():
    ours = {"kind": "a", "seed": 1, "deep": {"x": 1, "y": {"kind": "p", "q": 1}}, "only": 3}
    assert differing(ours, ours) == []
    assert differing(ours, {"kind": "a", "seed": 2, "deep": {"x": 2, "y": {"kind": "p", "q": 1}}}) == ["deep.x", "seed"]
    assert differing(ours, {**ours, "deep": {"x": 1, "y": {"kind": "r", "q": 1}}}) == ["deep.y"]
    assert differing(ours, {**ours, "deep": None}) == ["deep"]


def test_a_fault_of_the_whole_names_the_options_that_changed_a_part():
    class Pair(Spec):
        low: int = 1
        high: int = 2

        @model_validator(mode="after")
        def _ordered(self) -> Self:
            if self.low > self.high:
                raise ValueError("low lies above high")
            return self

    class Outer(Spec):
        pair: Pair

    lines = {("pair",): 3, ("pair", "low"): "--set pair.low=5", ("pair", "high"): 4}
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"pair": {"low": 5, "high": 2}})
    told = str(spec_error(caught.value, "s.yaml", lines))
    assert told == "s.yaml:3: pair: low lies above high (as changed by --set pair.low=5)"
    assert "changed" not in str(spec_error(caught.value, "s.yaml", {("pair",): 3}))
