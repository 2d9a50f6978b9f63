"""A member of a registry as the laws try it."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError


def filled(cls: Any, n: int, *more: Any) -> Any:
    """The member that a budget of n gives, else the bare one. Raises TypeError for one that is neither."""
    try:
        return cls.from_budget(n, *more) or cls()
    except ValidationError as error:
        fields = ", ".join(str(each["loc"][0]) for each in error.errors() if each["loc"])
        raise TypeError(f"{cls.__name__}: the laws try it from a budget, or bare: give {fields} a default") from error
