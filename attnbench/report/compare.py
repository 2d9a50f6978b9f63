"""The paper's own numbers beside ours: reported.yaml, and which of its rows a row of ours stands for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnbench.core.errors import SpecError
from attnbench.core.files import packaged_specs, parse_yaml
from attnbench.report.collect import Experiment
from attnbench.report.rows import OWN_TEXT, Row

KEYS = ("table", "dataset", "metric", "system", "value", "source")
BESIDE = {
    "train/tokens_per_s": "train_Ktokens_per_s",
    "decode/tokens_per_s": "infer_Ktokens_per_s",
    "decode/seconds": "decode_seconds",
    "train/seconds_per_epoch": "seconds_per_epoch",
    "best/epoch": "epochs_to_converge",
    "params": "parameters",
    "test/rep": "REP",
    "test/drop": "DROP",
}
"""Our metric -> what reported.yaml calls it, of the metrics that stand beside the chosen one."""
_CORPORA = {
    "1b_words_copy_10k": "lm1b",
    "europarl_newstest16_ro_en": "europarl-ro-en",
    "iwslt17_ted_doc": "ted-doc",
    "kftt_ja_en": "kftt",
    "news_commentary_v11_doc": "nc-doc",
}
"""What reported.yaml calls a corpus -> our name of it, where that is another one."""
_TO_ONE = "_0to1"
"""How the metrics end that run to 1 in a paper, where ours run to 100."""


@dataclass(frozen=True)
class Reported:
    """One number of a paper. source: `paper`, `recalled` or `found: ...`. k: the budget, 'full' or 'avg'."""

    table: str
    dataset: str
    metric: str
    system: str
    value: float | str
    source: str
    k: str | None = None
    split: str | None = None
    confidence: str | None = None

    @property
    def text(self) -> str:
        """The number as printed, or on our scale; one that nobody checked against a copy says so."""
        value = f"{self.value:,}" if isinstance(self.value, int) else str(self.value)
        if not isinstance(self.value, str) and self.metric.endswith(_TO_ONE):
            value = f"{100 * self.value:g}"
        if self.source != "recalled":
            return value
        return f"{value} (recalled{f', {self.confidence} confidence' if self.confidence else ''})"


@dataclass(frozen=True)
class Note:
    """What to know of a table of the paper, or of all (None)."""

    text: str
    table: str | None = None
    dataset: str | None = None


@dataclass(frozen=True)
class Paper:
    """One reported.yaml."""

    title: str
    notes: tuple[Note, ...]
    rows: tuple[Reported, ...]


def load_reported(path: Path) -> Paper:
    """Raises SpecError, with file and line, for a file of another shape."""
    value, lines = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(value, Mapping) or not isinstance(value.get("rows"), list):
        raise SpecError(f"{path}: this is no file of reported numbers: it needs 'rows', a list")
    rows = []
    for index, row in enumerate(value["rows"]):
        absent = [key for key in KEYS if key not in row] if isinstance(row, Mapping) else list(KEYS)
        if absent:
            raise SpecError(f"{path}:{lines[('rows', index)]}: rows.{index}: no {', '.join(absent)}")
        rows.append(
            Reported(**{key: row[key] if key == "value" else _text(row.get(key)) for key in Reported.__annotations__})
        )
    notes = [
        Note(str(note.get("text", "")), _text(note.get("table")), _text(note.get("dataset")))
        for note in value.get("notes") or []
        if isinstance(note, Mapping)
    ]
    return Paper(str(value.get("paper", "")), tuple(notes), tuple(rows))


def _text(value: Any) -> Any:
    return None if value is None else str(value)


@dataclass(frozen=True)
class Comparison:
    """The numbers that the `compare` section of a table chooses; empty where there is none.

    systems: our row -> the paper's system, or its k. notes: what to print under a table.
    """

    rows: tuple[Reported, ...] = ()
    where: Mapping[str, str] = field(default_factory=dict)
    systems: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What the map chooses: a system, or the k of the one system that `where` names."""
        return "k" if "system" in self.where else "system"

    def find(self, names: Sequence[str], budget: object, metric: str | None = None) -> Reported | None:
        """The paper's number for the row that answers to one of `names`, at `budget` (None: the row has none).

        At budget inf every method is the dense model, which a paper may have under a name of its own.
        metric: one of the paper's metrics instead of the chosen one. None where no row, or more than one, answers.
        """
        chosen = next((self.systems[name] for name in names if name in self.systems), None)
        if chosen is None:
            return None
        where = {**self.where, self.key: chosen}
        if metric is not None:
            where["metric"] = metric
            where.pop("split", None)
        found = [row for row in self.rows if _meets(row, where)]
        endless = budget in ("inf", float("inf"))
        k = chosen if self.key == "k" else "full" if budget is None or endless else str(budget)
        answers = [row for row in found if row.k == k]
        if not answers and (budget is None or endless):  # at a budget of its own a row is not the paper's one system
            answers = [row for row in found if row.k is None]
        if endless and not answers and self.key == "system":
            del where["system"]
            answers = [row for row in self.rows if row.k == "full" and _meets(row, where)]
        return answers[0] if len(answers) == 1 else None

    def of(self, row: Row, metric: str | None = None, budget: object = None) -> Reported | None:
        """The paper's number for one of our rows; None where the row lies on an axis that the paper's table has not.

        budget: instead of the row's own.
        """
        _, label = row.coordinate("label")
        if budget is None:
            _, budget = row.coordinate("budget")
        names = [row.label, *([str(label)] if label is not None else [])]
        if not self.others(row.axes):
            names += map(str, row.axes.values())
        return self.find(names, budget, metric)

    def average(self, row: Row, metric: str, values: Sequence[str]) -> Reported | None:
        """The paper's own average over its budgets, of the system that one of our rows is."""
        number = self.of(row, budget="avg")
        return number if number is not None and metric_of(number, values) == metric else None

    def others(self, axes: Mapping[str, object]) -> list[str]:
        """The axes beside the one whose value the map knows, and the first of a budget, which is looked up."""
        budget = next((path for path in axes if path.rsplit(".", 1)[-1] == "budget"), None)
        named = next((path for path, value in axes.items() if str(value) in self.systems), None)
        if self.key == "k" and budget is not None:  # another axis may have the same numbers
            named = budget
        return [path for path in axes if path not in (named, budget)]

    def beside(self, row: Row, metric: str, values: Sequence[str]) -> Reported | None:
        """The paper's number that stands beside one of our metrics; values: the metrics that the table is about."""
        number = self.of(row)
        if number is not None and metric_of(number, values) == metric:
            return number
        return self.of(row, BESIDE[metric]) if metric in BESIDE else None


def comparison(experiment: Experiment) -> Comparison:
    """What the table of `experiment` compares with. A missing or broken file becomes a note."""
    wanted = experiment.table.get("compare")
    if not wanted:
        return Comparison()
    section: Mapping[str, Any] = {"file": wanted} if isinstance(wanted, str) else wanted
    name = str(section.get("file") or "reported.yaml")
    path = _locate(experiment, name)
    if path is None:
        return Comparison(notes=(f"no paper column: {name} was not found beside the spec",))
    try:
        paper = load_reported(path)
    except (SpecError, OSError, ValueError) as error:
        return Comparison(notes=(f"no paper column: {error}".splitlines()[0],))
    where = {str(key): str(value) for key, value in (section.get("where") or {}).items()}
    unknown = sorted(set(where) - set(Reported.__annotations__))
    if unknown:
        return Comparison(notes=(f"no paper column: {name} has no field {', '.join(unknown)}",))
    systems = {str(key): str(value) for key, value in (section.get("map") or {}).items()}
    chosen = Comparison(paper.rows, where, systems)
    if not systems:  # rows that are called as the paper calls them
        found = (getattr(row, chosen.key) for row in paper.rows if where and _meets(row, where))
        names = {str(name) for name in found if name is not None}
        chosen = Comparison(paper.rows, where, {name: name for name in sorted(names)})
    about = (
        *_notes(paper, chosen), *_of_another_corpus(experiment, where), *_misspelt(experiment, section),
        *_unmet(experiment, chosen),
    )  # fmt: skip
    return replace(chosen, notes=about)


def _notes(paper: Paper, chosen: Comparison) -> tuple[str, ...]:
    """Where the column comes from, whatever is said about that table, and systems that the file does not know."""
    where = chosen.where
    place = ", ".join([*([f"table {where['table']}"] if "table" in where else []), *(
        where[key] for key in ("dataset", "metric", "split") if key in where)])  # fmt: skip
    scaled = ", times 100" if where.get("metric", "").endswith(_TO_ONE) else ""
    notes = [f"paper: {paper.title}{f'; {place}' if place else ''}{scaled}"]
    wanted = list(dict.fromkeys(chosen.systems.values()))
    used = [row for row in paper.rows if getattr(row, chosen.key) in wanted and _meets(row, where)]
    if any(row.source == "recalled" for row in used):
        notes.append("recalled: from memory of the paper, never checked against a copy")
    notes += sorted({f"paper numbers {row.source}" for row in used if row.source.startswith("found")})
    known = {getattr(row, chosen.key) for row in used}
    notes += [f"no paper number for '{name}'" for name in wanted if name not in known]
    for note in paper.notes:
        if note.table is not None and note.table == where.get("table") and note.dataset in (None, where.get("dataset")):
            notes.append(f"paper, table {note.table}: {note.text}")
    return tuple(notes)


def _of_another_corpus(experiment: Experiment, where: Mapping[str, str]) -> list[str]:
    """A note where the paper's corpus is none of ours; of one's own text nothing is known."""
    theirs = where.get("dataset")
    folders = (str(cell.data["folder"]) for cell in experiment.cells if "folder" in cell.data)
    ours = dict.fromkeys(folder.partition("/")[0] for folder in folders)
    if theirs is None:
        return []
    meant = {_CORPORA.get(theirs, theirs.replace("_", "-")), *OWN_TEXT}
    strange = [name for name in ours if name not in meant]
    return [f"the paper's numbers are of {theirs}, these results of {', '.join(strange)}"] if strange else []


def _misspelt(experiment: Experiment, section: Mapping[str, Any]) -> list[str]:
    """A note for each row of ours that the map seems to mean, and does not name."""
    wanted = [str(name) for name in section.get("map") or {}]
    rows = dict.fromkeys(str(name) for cell in experiment.cells for name in (cell.label, *cell.axes.values()))
    lines = []
    for name in wanted:
        near = difflib.get_close_matches(name, [row for row in rows if row not in wanted], n=1, cutoff=0.8)
        if name not in rows and near:
            lines.append(f"table.compare.map: no row is called '{name}'; did you mean '{near[0]}'?")
    return lines


def _unmet(experiment: Experiment, chosen: Comparison) -> list[str]:
    """A note where rows are not the paper's, since an axis was added to its table."""
    systems = set(chosen.systems)
    rows = [cell.axes for cell in experiment.cells if cell.label not in systems]
    paths = dict.fromkeys(path for axes in rows if systems & set(map(str, axes.values()))
                          for path in chosen.others(axes))  # fmt: skip
    return [f"no paper numbers along {', '.join(paths)}: the table of the paper does not vary it"] if paths else []


def _meets(row: Reported, where: Mapping[str, str]) -> bool:
    return all(_text(getattr(row, key)) == want for key, want in where.items())


def _locate(experiment: Experiment, name: str) -> Path | None:
    """`name` beside the spec or above it, above the run folder (a committed copy lies below its spec), or packaged."""
    above = experiment.folder.resolve().parents
    places = [parent / name for parent in above[:3]]
    if experiment.source:
        beside = Path(experiment.source).parent
        specs = [parent / name for parent in (beside, *beside.parents[:3])]
        places = [*specs, *(parent / beside / name for parent in above), *places]
    places += [Path(name), packaged_specs() / name]
    return next((path for path in places if path.is_file()), None)


def metric_of(row: Reported, values: Sequence[str]) -> str | None:
    """Which of our value metrics a number stands beside: the first of its split (test unless it says otherwise) that
    the paper does not call otherwise."""
    split = row.split or "test"
    able = [name for name in values if BESIDE.get(name, row.metric) == row.metric]
    return next((name for name in able if name.startswith(f"{split}/")), able[0] if able else None)
