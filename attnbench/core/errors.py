"""The errors a user may see: one line of message that names the place and the mend, and a stable exit code."""

from __future__ import annotations


class AttnbenchError(Exception):
    """A run failed for a reason that the message names. Exit code 1."""

    exit_code = 1


class SpecError(AttnbenchError):
    """Bad usage or a bad spec: nothing was run. Exit code 2."""

    exit_code = 2


class MissingExtraError(AttnbenchError):
    """An optional package or a piece of hardware is missing. Exit code 3."""

    exit_code = 3


class DataError(AttnbenchError):
    """Data is absent, broken or cannot be had. Exit code 4."""

    exit_code = 4


def first_line(error: Exception) -> str:
    """What an error of a library says first, or its type where it says nothing: part of a message of one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
