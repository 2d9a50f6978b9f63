"""The code that a cell was made with, as its result notes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnbench.core.provenance import changed_members
from attnbench.core.run_files import MECHANISMS


def changed_mechanisms(now: Mapping[str, str], noted: Mapping[str, Any]) -> list[str]:
    """Modules whose file was another one when something was noted; older notes do not say."""
    return changed_members(now, noted.get(MECHANISMS) or {})
