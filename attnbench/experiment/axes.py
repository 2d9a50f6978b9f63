"""The axes that commands name: budgets of `sweep-k`; transform, site and sparsify of `ablate`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from attnbench.attention.spec import AttentionSpec, Sites
from attnbench.attention.types import Role
from attnbench.core.errors import SpecError
from attnbench.core.files import parse_yaml
from attnbench.core.run_files import WHOLE_CELL
from attnbench.core.spec import unknown
from attnbench.experiment.document import Document, header_of, label_of, set_at
from attnbench.experiment.grid import Cell, Experiment
from attnbench.experiment.spec import CellSpec
from attnbench.models.base import models

BUDGETS: tuple[int | str, ...] = (1, 2, 4, 8, 16, "inf")
_SITES = "model.attention"
_DENSE: dict[str, Any] = {"pattern": "full", "transform": "softmax"}


def parse_budgets(text: str) -> list[int | str]:
    """`1,2,4,inf` -> [1, 2, 4, "inf"]. Raises SpecError for anything else."""
    budgets: list[int | str] = []
    for word in text.split(","):
        word = word.strip()
        if word != "inf" and not (word.isascii() and word.isdecimal() and int(word) > 0):
            raise SpecError(f"--k {text}: '{word}' is no budget; write whole numbers from 1 on, or inf, with commas")
        budgets.append(word if word == "inf" else int(word))
    if len(set(budgets)) != len(budgets):
        raise SpecError(f"--k {text}: a budget stands twice")
    return budgets


def with_budgets(document: Document, budgets: Sequence[int | str] | None) -> Document:
    """The document with an axis of budgets: its own one if it has one, else at the sites that take a budget.

    A number of positions that such a site has already gives way to the axis; a spec of nothing but dense attention is
    swept with top-k at every site. budgets: None keeps the spec's own values, or takes 1, 2, 4, 8, 16 and inf.
    Raises SpecError where no site can take a budget.
    """
    axes = header_of(document).grid.axes
    origin = f"--k {','.join(map(str, budgets))}" if budgets else None
    values = list(budgets or BUDGETS)
    own = [path for path in axes if path.endswith(".budget")]
    if own:
        for path in own if budgets else ():
            document = document.with_axis(path, values, origin)
        return document
    if not _has_sites(document.raw):  # told at its own place when the cells are made
        return document
    document = _freed(document)
    takers, roles = _takers(document.raw), _attention(document.raw).roles
    if not takers and not any(path.startswith(_SITES) for path in axes):
        document = _with_topk(document)
        takers = list(roles)
    if len(takers) == 1:
        return document.with_axis(f"{_SITES}.{takers[0]}.budget", values, origin)
    if len(takers) in (0, len(roles)) or _inherited(document.raw):
        return document.with_axis(f"{_SITES}.default.budget", values, origin)
    entries = [{"label": f"budget-{value}", **{role: {"budget": value} for role in takers}} for value in values]
    return document.with_axis(_SITES, entries, origin)


def require_budgets(experiment: Experiment) -> None:
    """Raise SpecError where two budgets make one and the same run: its attention is named by another axis.

    An axis entry that names a module, pattern or transform speaks for itself; a budget at `default` stays without
    effect there.
    """
    seen: dict[tuple[Any, ...], Cell] = {}
    for cell in experiment.cells:
        others = [(path, label) for path, label in cell.axes.items() if not path.endswith(".budget")]
        first = seen.setdefault((cell.seed, cell.digest, *others), cell)
        if first.label != cell.label:
            named = ", ".join(path for path, _ in others if path.startswith(_SITES)) or "another axis"
            raise SpecError(
                f"{experiment.document.at('grid', 'axes')}: '{first.label}' and '{cell.label}' are the same run: no "
                f"budget reaches the attention that {named} names; keep entries that take one (like "
                "`transform: topk`), drop the axis with --set grid.axes={}, or compare it without budgets by "
                "`attnbench ablate`"
            )


def _has_sites(raw: Mapping[str, Any]) -> bool:
    """Whether what is written of the model and its attention is of a form that a budget can be laid over."""
    model = raw.get("model") or {}
    attention = (model.get("attention") or {}) if isinstance(model, Mapping) else {}
    if not isinstance(model, (Mapping, str)) or not isinstance(attention, Mapping):
        return False
    return all(site is None or isinstance(site, Mapping) for site in attention.values())


def _node(raw: Mapping[str, Any], dotted: str) -> dict[str, Any]:
    node: Any = raw
    for name in dotted.split("."):
        node = node.get(name) or {} if isinstance(node, Mapping) else {}
    return dict(node) if isinstance(node, Mapping) else {}


def _attention(raw: Mapping[str, Any]) -> type[Sites]:
    """The class of the model's `attention`, which knows the model's sites."""
    model = raw.get("model")
    kind = model.get("kind", "transformer") if isinstance(model, Mapping) else model or "transformer"
    field = models.get(kind).model_fields.get("attention") if kind in models.kinds() else None
    found = field.annotation if field else None
    return found if isinstance(found, type) and issubclass(found, Sites) else AttentionSpec


def _takers(raw: Mapping[str, Any]) -> list[Role]:
    """The sites that take a budget."""
    default, sites = _node(raw, f"{_SITES}.default"), _attention(raw)
    return [role for role in sites.roles if sites.takes_budget({**default, **_node(raw, f"{_SITES}.{role}")}, role)]


def _inherited(raw: Mapping[str, Any]) -> bool:
    """Whether a budget at `default` is one for every site that takes one, and for no other."""
    sites = _node(raw, _SITES)
    try:
        _attention(raw).model_validate({**sites, "default": {**_node(sites, "default"), "budget": 1}})
    except ValueError:
        return False
    return True


def _freed(document: Document) -> Document:
    """The document without the numbers of positions of its transforms and patterns, where a budget can give them."""
    default, sites = _node(document.raw, f"{_SITES}.default"), _attention(document.raw)
    spots: list[tuple[str, tuple[Role, ...]]] = [("default", sites.roles), *((role, (role,)) for role in sites.roles)]
    for name, roles in spots:
        site = _node(document.raw, f"{_SITES}.{name}")
        for part in ("pattern", "transform"):
            given = site.get(part)
            if not isinstance(given, Mapping):
                continue
            whole = {**default, **site}
            if not _is_valid(sites, whole):  # told at its own place when the cells are made
                continue
            for field in [field for field in given if field != "kind"]:
                rest = {key: value for key, value in given.items() if key != field}
                if not any(sites.takes_budget(whole, role) for role in roles) and all(
                    sites.takes_budget({**whole, part: rest}, role) for role in roles
                ):
                    raw = copy.deepcopy(document.raw)
                    set_at(raw, f"{_SITES}.{name}.{part}", rest, merge=False)
                    path = (*_SITES.split("."), name, part, field)
                    return _freed(document.laid_over(raw, path, None))
    return document


def _is_valid(sites: type[Sites], raw: Mapping[str, Any]) -> bool:
    """Whether a site written like this can be one, budget or no budget."""
    try:
        sites.site_class.model_validate(raw)
    except ValueError:
        return False
    return True


def _with_topk(document: Document) -> Document:
    default, sites = _node(document.raw, f"{_SITES}.default"), _attention(document.raw)
    for role in sites.roles:
        try:
            site = sites.site_class.model_validate({**default, **_node(document.raw, f"{_SITES}.{role}")})
        except ValueError:
            continue  # told at its own place when the cells are made
        if "transform" not in site.module.stages:
            raise SpecError(
                f"{document.at('model', 'attention')}: model.attention.{role}: nothing here can be swept: the module "
                f"'{site.module.kind}' attends to nothing; take another one, like `module: single_head`"
            )
        if (site.pattern.kind, site.transform.kind) != ("full", "softmax"):
            raise SpecError(
                f"{document.at('model', 'attention')}: model.attention: nothing here can be swept: neither the pattern "
                f"'{site.pattern.kind}' nor the transform '{site.transform.kind}' takes a budget; name one that does "
                "(like `transform: topk`), or compare transforms by `attnbench ablate --axis transform=...`"
            )
    raw = copy.deepcopy(document.raw)
    set_at(raw, f"{_SITES}.default", {"transform": "topk"}, merge=True)
    return document.laid_over(raw, (*_SITES.split("."), "default", "transform"), None)


def with_axis(document: Document, option: str) -> Document:
    """The document with one axis from the command line: `transform=softmax,topk`, `site=all,cross`, `PATH=[...]`.

    A value that is the label of an entry in the spec's own axis of that path is that entry. Raises SpecError when the
    option is not of that form.
    """
    name, equals, text = option.partition("=")
    name = name.strip()
    if not equals or not name or not text.strip():
        raise SpecError(f"--axis {option}: write it as name=value,value, like --axis sparsify=train,both")
    values, _ = parse_yaml(text if text.lstrip().startswith("[") else f"[{text}]", f"--axis {option}")
    if not isinstance(values, list) or not values:
        raise SpecError(f"--axis {option}: the values are a list, like transform=[softmax, {{kind: topk, k: 8}}]")
    written = header_of(document).grid.axes
    origin = f"--axis {option}"
    if name == "site":
        roles = _attention(document.raw).roles
        _require_once(document, _SITES, origin)
        return document.with_axis(_SITES, [_at_site(str(value), option, roles) for value in values], origin)
    whole = [WHOLE_CELL, *(key for key in CellSpec.model_fields if key != "seed")]
    if name not in (*_ALIASES, *whole) and "." not in name:
        raise SpecError(f"{origin}: {unknown('axis', name, [*_ALIASES, 'site', *whole, 'or a dotted path'])}")
    path = _ALIASES.get(name, name)
    _require_once(document, path, origin)
    own = {str(label_of(entry)): entry for entry in written.get(path, [])}
    chosen = [own.get(value, value) if isinstance(value, str) else value for value in values]
    return document.with_axis(path, chosen, origin)


def _require_once(document: Document, path: str, origin: str) -> None:
    before = str(document.lines.get(("grid", "axes", path)))
    if before.startswith("--axis "):
        raise SpecError(f"{origin}: {before} names the values of this axis already; give all of them in one")


_ALIASES = {
    "transform": f"{_SITES}.default.transform",
    "pattern": f"{_SITES}.default.pattern",
    "sparsify": f"{_SITES}.default.sparsify",
    "budget": f"{_SITES}.default.budget",
}


def _at_site(chosen: str, option: str, roles: Sequence[Role]) -> dict[str, Any]:
    """An axis entry: the spec's own attention at `chosen` alone, dense attention at the other sites."""
    if chosen not in (*roles, "all", "none"):
        raise SpecError(f"--axis {option}: {unknown('site', chosen, [*roles, 'all', 'none'])}")
    entry: dict[str, Any] = {"label": chosen}
    for role in roles:
        if chosen not in (role, "all"):
            entry[role] = {**_DENSE, "budget": None}
    return entry
