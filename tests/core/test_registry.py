from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, Literal

import pytest
from pydantic import TypeAdapter, ValidationError

from attnbench.core.registry import Family, MemberError, Registry, unwritten
from attnbench.core.spec import Spec

FILES = {
    "__init__": "",
    "_base": """
        from typing import Annotated
        from attnbench.core.registry import Family, Registry
        from attnbench.core.spec import Spec

        class Shape(Spec):
            kind: str

        shapes = Registry("shape", Shape, "{name}")

        class Box(Spec):
            shape: Annotated[Shape, Family(lambda: shapes)]
    """,
    "circle": """
        from typing import Literal
        from {name}._base import Shape, shapes

        @shapes.register
        class Circle(Shape):
            kind: Literal["circle"] = "circle"
            radius: float = 1.0
    """,
    "square": """
        from typing import Literal
        from {name}._base import Shape, shapes

        @shapes.register
        class Square(Shape):
            kind: Literal["square"] = "square"
            side: int
    """,
    "_broken": "raise ImportError('a module with an underscore is no member')",
}


def make_package(folder: Path, name: str, files: dict[str, str]) -> None:
    (folder / name).mkdir()
    for module, text in files.items():
        (folder / name / f"{module}.py").write_text(dedent(text).replace("{name}", name))
    importlib.invalidate_caches()


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The `_base` module of a family package that was never imported before."""
    name = f"attnbench_family_{tmp_path.name}"
    monkeypatch.syspath_prepend(tmp_path)
    make_package(tmp_path, name, FILES)
    yield importlib.import_module(f"{name}._base")
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_members_are_found_when_first_asked_for(family: ModuleType):
    assert not any(module.endswith(".circle") for module in sys.modules if module.startswith(family.__package__ or "?"))
    assert family.shapes.kinds() == ["circle", "square"]
    assert family.shapes.get("square").__name__ == "Square"


def test_a_member_in_one_new_file_is_known(family: ModuleType):
    package = Path(family.__file__ or "").parent
    text = FILES["circle"].replace("circle", "ring").replace("Circle", "Ring").replace("{name}", package.name)
    (package / "ring.py").write_text(dedent(text))
    importlib.invalidate_caches()
    assert "ring" in family.shapes.kinds()
    assert family.shapes.parse("ring").radius == 1.0


@pytest.mark.parametrize("raw", ["circle", {"kind": "circle"}, {"kind": "circle", "radius": 1}])
def test_a_member_is_a_name_or_a_mapping_or_itself(family: ModuleType, raw: Any):
    circle = family.shapes.parse(raw)
    assert circle.dump() == {"kind": "circle", "radius": 1.0}
    assert family.shapes.parse(circle) is circle


def test_an_unknown_kind_names_the_nearest(family: ModuleType):
    with pytest.raises(ValueError, match=r"unknown shape 'circel'; did you mean 'circle'\? \(known: circle, square\)"):
        family.shapes.get("circel")
    with pytest.raises(ValueError, match="did you mean 'circle'"):
        family.shapes.parse("circel")


def test_a_member_that_was_not_registered_is_named(family: ModuleType):
    package = Path(family.__file__ or "").parent
    text = FILES["circle"].replace("circle", "ring").replace("Circle", "Ring").replace("{name}", package.name)
    (package / "ring.py").write_text(dedent(text.replace("@shapes.register", "")))
    importlib.invalidate_caches()
    with pytest.raises(ValueError, match=r"the shape 'ring' is not registered: .*\.ring\.Ring lacks the decorator"):
        family.shapes.parse("ring")


def test_a_field_holds_any_member_with_all_its_fields(family: ModuleType):
    for raw in ("circle", {"kind": "square", "side": 3}):
        box = family.Box.model_validate({"shape": raw})
        assert family.Box.model_validate(box.dump()) == box
        assert json.loads(box.model_dump_json()) == box.dump()
    with pytest.raises(ValidationError, match="side"):
        family.Box.model_validate({"shape": "square"})


def test_the_schema_lists_the_members(family: ModuleType):
    schema = TypeAdapter(family.Box).json_schema()
    text = json.dumps(schema)
    assert '["circle", "square"]' in text
    assert '"radius"' in text
    assert '"side"' in text


def test_two_members_cannot_share_a_name_and_a_stranger_is_refused():
    class Base(Spec):
        kind: str

    family: Registry[Base] = Registry("thing", Base, "attnbench.core")

    @family.register
    class One(Base):
        kind: Literal["one"] = "one"

    assert family.register(One) is One  # a module that is imported twice

    class Other(Base):
        kind: Literal["one"] = "one"

    with pytest.raises(MemberError, match="two things are called 'one'"):
        family.register(Other)

    class Nameless(Base):
        pass

    class Stranger(Spec):
        kind: Literal["stranger"] = "stranger"

    class AnyName(Base):
        kind: str = "any"

    class NoSpec:
        pass

    for cls in (Nameless, Stranger, AnyName, NoSpec):
        with pytest.raises(TypeError, match=f"{cls.__name__} must extend Base with `kind: Literal"):
            family.register(cls)


@pytest.mark.parametrize("name", ["a_copy", "z_copy"])
def test_a_copied_file_that_keeps_its_names_is_refused(family: ModuleType, name: str):
    """Whichever of the two is read first."""
    package = Path(family.__file__ or "").parent
    (package / f"{name}.py").write_text((package / "circle.py").read_text())
    importlib.invalidate_caches()
    with pytest.raises(MemberError) as caught:
        family.shapes.kinds()
    first, second = sorted((f"{package.name}.circle.Circle", f"{package.name}.{name}.Circle"))
    assert str(caught.value) == f"two shapes are called 'circle': {first} and {second}; rename one"


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("import no_such_module_anywhere\n", 1, "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("\n\ndef broken(:\n", 3, "SyntaxError: "),
        ("x = 1\nx.missing\n", 2, "AttributeError: "),
    ],
)
def test_a_member_that_cannot_be_imported_is_told_each_time(family: ModuleType, text: str, line: int, told: str):
    path = Path(family.__file__ or "").parent / "bad.py"
    path.write_text(text)
    importlib.invalidate_caches()
    for ask in (family.shapes.kinds, lambda: family.Box.model_validate({"shape": "circle"})):
        with pytest.raises(MemberError) as caught:
            ask()
        assert str(caught.value).startswith(f"{path}:{line}: {told}")
        assert str(caught.value).endswith("; mend that file or what it imports, or remove it")


def test_a_method_that_nobody_wrote_is_named():
    class Base(Spec):
        def build(self) -> int:
            raise unwritten(self, "build")

        @classmethod
        def of(cls) -> Base:
            raise unwritten(cls, "of")

    class Member(Base):
        pass

    for call, method in ((Member().build, "build"), (Member.of, "of")):
        with pytest.raises(MemberError, match=rf"Member has no `{method}`, which every Base needs$"):
            call()


def test_a_family_field_needs_a_member():
    class Base(Spec):
        kind: str

    adapter: TypeAdapter[Any] = TypeAdapter(
        __import__("typing").Annotated[Base, Family(lambda: Registry("thing", Base, "attnbench.core"))]
    )
    with pytest.raises(ValidationError, match="unknown thing 'x'"):
        adapter.validate_python("x")
