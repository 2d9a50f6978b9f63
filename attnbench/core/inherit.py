"""What a class says of one of its methods, and a subclass that replaces the method no longer means."""

from __future__ import annotations


def is_outdated(cls: type, fact: str, method: str) -> bool:
    """Whether `fact` tells of a `method` that a more special class has replaced; both are names of attributes."""
    makers = [next(place for place, each in enumerate(cls.__mro__) if name in vars(each)) for name in (method, fact)]
    return makers[0] < makers[1]
