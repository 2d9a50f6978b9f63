"""What one YAML file can say: the cell that is run, the grid of its variations, the table they end in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from attnbench.core.run_files import CELLS, WHOLE_CELL
from attnbench.core.spec import Spec, unknown
from attnbench.experiment.timing import TimingSpec
from attnbench.models.base import ModelField
from attnbench.models.transformer import TransformerSpec
from attnbench.search.base import SearchField
from attnbench.search.beam import BeamSpec
from attnbench.tasks.base import TaskField
from attnbench.train.spec import TrainSpec


class CellSpec(Spec):
    """Everything that decides the numbers of one run. Its digest names the run folder."""

    task: TaskField
    """The data and how outputs are scored."""
    model: ModelField = Field(default_factory=TransformerSpec)
    """The model and its attention."""
    train: TrainSpec = Field(default_factory=TrainSpec)
    """Training."""
    search: SearchField = Field(default_factory=BeamSpec)
    """Decoding of the validation and test sets at the end."""
    timing: TimingSpec | None = None
    """Measure how long decoding takes; left out: it is not measured apart."""
    seed: int = Field(default=1, ge=0)
    """Seed of weights, dropout and the order of batches."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.search.outputs > 1 and self.timing is None:
            yield "search.n_best", "one output a source is scored"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        sizes = self.task.model_sizes()
        try:
            self.model.check(sizes)
        except ValueError as error:
            raise self._impossible_model(str(error)) from None
        if self.model.state_width is None and self.train.schedule.reads_width:
            raise ValueError(
                f"train.schedule: '{self.train.schedule.kind}' reads the width of the model, and '{self.model.kind}' "
                "tells none (state_width); take another schedule, like inverse_sqrt"
            )
        if self.search.asks_received and not self.model.attends:
            raise ValueError(
                f"search.coverage asks what each source word has received, and this '{self.model.kind}' attends to "
                "nothing; drop it, or give the model attention"
            )
        return self

    def _impossible_model(self, why: str) -> ValidationError:
        message = PydanticCustomError("impossible_model", "{message}", {"message": why})
        details = InitErrorDetails(type=message, loc=("model",), input=self.model)
        return ValidationError.from_exception_data("CellSpec", [details])


class GridSpec(Spec):
    """Variations of the cell: every combination of the axes, with every seed."""

    seeds: list[int] = Field(default_factory=list)
    """The same seeds in every cell, so that cells are paired. Left out: the cell's own seed."""
    more_seeds: dict[str, list[int]] = Field(default_factory=dict)
    """Label of an axis entry -> the seeds of its cells, where they differ: `{8: [1, 2, 3], inf: [1, 2, 3]}`. A cell of
    two such entries has the seeds of the axis that stands first."""
    axes: dict[str, list[Any]] = Field(default_factory=dict)
    """Dotted path -> the values it takes in turn. A mapping is merged into the node it names, `label` aside; one of
    another `kind` takes its place, and a bare name is a mapping with that kind. What a longer path names lies over what
    holds it, in whatever order they stand. The entries of the axis `cell` are pieces of a whole cell: {label, model,
    train}."""

    @field_validator("more_seeds", mode="before")
    @classmethod
    def _named(cls, raw: Any) -> Any:
        return {str(label): seeds for label, seeds in raw.items()} if isinstance(raw, dict) else raw

    @field_validator("more_seeds")
    @classmethod
    def _known(cls, more: dict[str, list[int]]) -> dict[str, list[int]]:
        for label, seeds in more.items():
            if not seeds:
                raise ValueError(f"the cells of '{label}' would have no seed; list some, or leave it out")
            cls._distinct(seeds)
        return more

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: list[int]) -> list[int]:
        if not seeds:
            raise ValueError("no seed stands here; list some, or leave it out for the cell's own")
        if len(set(seeds)) != len(seeds) or any(seed < 0 for seed in seeds):
            raise ValueError(f"seeds are different whole numbers from 0 on, not {seeds}")
        return seeds

    @field_validator("axes")
    @classmethod
    def _filled(cls, axes: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for path, values in axes.items():
            head = path.split(".")[0]
            if not values:
                raise _at(path, f"the axis '{path}' has no values")
            if path != WHOLE_CELL and head not in CellSpec.model_fields:
                raise _at(path, unknown("key", head, list(CellSpec.model_fields)))
            if path == "seed":
                raise _at(path, "seeds are no axis; list them under grid.seeds")
        return axes


def _at(axis: str, message: str) -> PydanticCustomError:
    """A fault that is told where the axis was given, not where all of them begin."""
    return PydanticCustomError("unknown_key", "{message}", {"key": axis, "message": message})


class CompareSpec(Spec):
    """Which of the paper's numbers stand beside ours."""

    file: str
    """YAML file with the paper's numbers, beside the spec or one of its parents."""
    where: dict[str, str | int] = Field(default_factory=dict)
    """Fields that a row of the file must have: table, dataset, metric, ..."""
    map: dict[str, str | int] = Field(default_factory=dict)
    """Our row label -> the paper's system (or its k); left out: rows are called as the paper's systems are."""

    @field_validator("map", mode="before")
    @classmethod
    def _named(cls, raw: Any) -> Any:
        return {str(label): system for label, system in raw.items()} if isinstance(raw, dict) else raw


class TableSpec(Spec):
    """How the cells become a table."""

    rows: str = "label"
    """`label`, or the axis whose values are the rows (its last name will do)."""
    cols: str | None = None
    """The axis whose values are the columns; left out: one line a row, one column a metric."""
    mean: bool = False
    """A last column, of what stands in all others of a line but the dense model's (budget inf), on average. A table of
    one line is shown from top to bottom, and has none."""
    value: Annotated[str | list[str], Field(min_length=1)] = "test/bleu"
    """The metric of the cells, the first one where several are named; left out: the task's own."""
    reduce: Literal["mean_std", "mean", "max"] = "mean_std"
    """How seeds become one number."""
    compare: CompareSpec | None = None
    """The paper's own numbers."""
    extra: list[str] = Field(default_factory=list)
    """More metrics, one column each."""
    omit: list[Literal["attended", "entropy", "train/tokens_per_s", "decode/tokens_per_s"]] = Field(
        default_factory=list
    )
    """Columns that tables for people have by themselves, to be left out; results.json and results.csv keep them."""

    @model_validator(mode="after")
    def _either(self) -> Self:
        if self.mean and self.cols is None:
            raise ValueError("mean: is over the columns of a line, and there is one a metric; name an axis in cols")
        for name in self.omit:
            if named := [metric for metric in self.extra if metric == name or metric.startswith(f"{name}/")]:
                raise ValueError(f"omit: {name} is left out, and extra asks for {named[0]}; drop one of the two")
        return self


class Header(Spec):
    """The part of an experiment that no cell sees."""

    name: str
    """Names the run folder: runs/<name>/. Letters, digits, `.`, `_`, `-`, and `/` between parts."""
    grid: GridSpec = Field(default_factory=GridSpec)
    """The variations."""
    table: TableSpec = Field(default_factory=TableSpec)
    """What is printed."""

    @field_validator("name")
    @classmethod
    def _folder(cls, name: str) -> str:
        if not all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", part) for part in name.split("/")):
            raise ValueError(f"'{name}' cannot name a folder: use letters, digits, '.', '_', '-' and '/' between parts")
        if CELLS in name.split("/"):
            raise ValueError(
                f"'{name}': a run keeps its own cells in a folder of the name '{CELLS}'; take another name"
            )
        return name


class ExperimentSpec(Header, CellSpec):
    """One experiment: one YAML file."""
