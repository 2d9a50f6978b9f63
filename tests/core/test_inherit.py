"""What a class says of a method ends where the method is replaced."""

from __future__ import annotations

from attnbench.core.inherit import is_outdated


class Parent:
    fact = 1

    def method(self) -> None: ...


class Same(Parent): ...


class Anew(Parent):
    def method(self) -> None: ...


class Both(Parent):
    fact = 2

    def method(self) -> None: ...


class Mixed(Anew, Same): ...


class Said(Anew):
    fact = 3


def test_a_fact_is_outdated_where_the_method_comes_of_a_more_special_class():
    assert [is_outdated(each, "fact", "method") for each in (Parent, Same, Anew, Both, Mixed, Said)] == [
        False, False, True, False, True, False,
    ]  # fmt: skip
