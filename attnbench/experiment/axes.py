"""The axes that commands name: budgets of `sweep-k`; transform, site and sparsify of `ablate`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from attnbench.attention.spec import SiteSpec
from attnbench.attention.types import ROLES, Role
from attnbench.core.errors import SpecError
from attnbench.core.files import parse_yaml
from attnbench.core.spec import unknown
from attnbench.experiment.grid import Document, place

BUDGETS: tuple[int | str, ...] = (1, 2, 4, 8, 16, "inf")
_SITES = "model.attention"
_DENSE: dict[str, Any] = {"pattern": "full", "transform": "softmax"}


def parse_budgets(text: str) -> list[int | str]:
    """`1,2,4,inf` -> [1, 2, 4, "inf"]. Raises SpecError for anything else."""
    budgets: list[int | str] = []
    for word in text.split(","):
        word = word.strip()
        if word != "inf" and not (word.isdecimal() and int(word) > 0):
            raise SpecError(f"--k {text}: '{word}' is no budget; write whole numbers from 1 on, or inf, with commas")
        budgets.append(word if word == "inf" else int(word))
    if len(set(budgets)) != len(budgets):
        raise SpecError(f"--k {text}: a budget stands twice")
    return budgets


def with_budgets(document: Document, budgets: Sequence[int | str] | None) -> Document:
    """The document with an axis of budgets: its own one if it has one, else at each site that takes a budget.

    A spec without any such site is swept with top-k attention at every site. budgets: None keeps the spec's own
    values, or takes 1, 2, 4, 8, 16 and inf.
    """
    raw = copy.deepcopy(document.raw)
    axes = raw.setdefault("grid", {}).setdefault("axes", {})
    own = [path for path in axes if path.endswith(".budget")]
    if own:
        if budgets is not None:
            gone = {str(value) for path in own for value in axes[path]} - {str(value) for value in budgets}
            more = raw["grid"].get("more_seeds") or {}
            raw["grid"]["more_seeds"] = {label: seeds for label, seeds in more.items() if str(label) not in gone}
            for path in own:
                axes[path] = list(budgets)
        return Document(raw, document.lines, document.source, document.path)
    values = list(budgets or BUDGETS)
    default = _node(raw, f"{_SITES}.default")
    takers = [role for role in ROLES if _takes(default, _node(raw, f"{_SITES}.{role}"), role)]
    if not takers and not any("." in path and path.startswith(_SITES) for path in axes):
        place(raw, f"{_SITES}.default", {"transform": "topk"}, merge=True)
        takers = list(ROLES)
    if len(takers) in (0, len(ROLES)):
        axes[f"{_SITES}.default.budget"] = values
    elif len(takers) == 1:
        axes[f"{_SITES}.{takers[0]}.budget"] = values
    else:
        axes[_SITES] = [{"label": str(value), **{role: {"budget": value} for role in takers}} for value in values]
    return Document(raw, document.lines, document.source, document.path)


def _node(raw: Mapping[str, Any], dotted: str) -> dict[str, Any]:
    node: Any = raw
    for name in dotted.split("."):
        node = node.get(name) or {} if isinstance(node, Mapping) else {}
    return dict(node) if isinstance(node, Mapping) else {}


def _takes(default: Mapping[str, Any], own: Mapping[str, Any], role: Role) -> bool:
    try:
        SiteSpec.model_validate({**default, **own, "budget": 1}).resolved(role)
    except (ValueError, ValidationError):
        return False
    return True


def with_axis(document: Document, option: str) -> Document:
    """The document with one axis from the command line: `transform=softmax,topk`, `site=all,cross`, `PATH=[...]`.

    Raises SpecError when it is not of that form.
    """
    name, equals, text = option.partition("=")
    name = name.strip()
    if not equals or not name or not text.strip():
        raise SpecError(f"--axis {option}: write it as name=value,value, like --axis sparsify=train,both")
    values, _ = parse_yaml(text if text.lstrip().startswith("[") else f"[{text}]", f"--axis {option}")
    if not isinstance(values, list) or not values:
        raise SpecError(f"--axis {option}: the values are a list, like transform=[softmax, {{kind: topk, k: 8}}]")
    raw = copy.deepcopy(document.raw)
    axes = raw.setdefault("grid", {}).setdefault("axes", {})
    if name == "site":
        axes[_SITES] = [_at_site(raw, str(value), option) for value in values]
    elif name in _ALIASES:
        axes[_ALIASES[name]] = values
    elif "." in name:
        axes[name] = values
    else:
        raise SpecError(f"--axis {option}: {unknown('axis', name, [*_ALIASES, 'site', 'or a dotted path'])}")
    return Document(raw, document.lines, document.source, document.path)


_ALIASES = {
    "transform": f"{_SITES}.default.transform",
    "pattern": f"{_SITES}.default.pattern",
    "sparsify": f"{_SITES}.default.sparsify",
    "budget": f"{_SITES}.default.budget",
}


def _at_site(raw: Mapping[str, Any], chosen: str, option: str) -> dict[str, Any]:
    """An axis entry: the spec's own attention at `chosen` alone, dense attention at the other sites."""
    if chosen not in (*ROLES, "all", "none"):
        raise SpecError(f"--axis {option}: {unknown('site', chosen, [*ROLES, 'all', 'none'])}")
    entry: dict[str, Any] = {"label": chosen}
    for role in ROLES:
        if chosen not in (role, "all"):
            entry[role] = {**_DENSE, "budget": None}
    return entry
