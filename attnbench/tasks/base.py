"""What training and experiments see of a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor

from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec
from attnbench.models.base import Sizes
from attnbench.search.base import Hypothesis, Searcher

EVAL_TOKENS = 4096
"""Padded tokens a side of an evaluation batch."""


class Loss(NamedTuple):
    """Sums over the batch in nats: total is differentiated, nll (no smoothing) is for reading."""

    total: Tensor
    nll: Tensor


class Metrics(NamedTuple):
    """Named numbers, the signature of each score that has one, what they were measured on, and the lines decoded.

    outputs: lines in the order of the split, under the ending of the file they belong in ("txt", "rep.txt").
    """

    values: dict[str, float]
    signatures: dict[str, str]
    samples: dict[str, int]
    outputs: Mapping[str, list[str]]


@runtime_checkable
class Task(Protocol):
    """A task that is bound to its spec. Data is whatever open() returns."""

    def check(self, model: Any, data: Any) -> None:
        """Raise AttnbenchError where the data hold what the model cannot take: before training, not in its midst."""
        ...

    def adapt(self, model: Any, data: Any, seed: int, *, fresh: bool) -> Any:
        """The data as the model needs them; and what the model must learn of them before it is trained.

        fresh: its weights are new ones; others have been taught.
        """
        ...

    def count(self, batch: Any) -> int:
        """Target tokens of a batch, EOS included, padding not."""
        ...

    def sentences(self, batch: Any) -> int:
        """Targets of a batch: sentences, or whatever the task makes of one source."""
        ...

    def loss(self, model: Any, batch: Any, smoothing: float) -> Loss:
        """The summed loss, on the model's device, of one batch as the data give it."""
        ...

    def rounded(self, model: Any, batch: Any) -> Any:
        """The batch with more padding, so that its tensors have one of few shapes; the model's loss is the same."""
        ...

    def validate(self, model: Any, data: Any, split: str, tokens: int) -> dict[str, float]:
        """loss and ppl of a split by teacher forcing."""
        ...

    def evaluate(
        self, model: Any, data: Any, split: str, searcher: Searcher, tokens: int, *, brief: bool = False
    ) -> Metrics:
        """Decode a split and score it. `unfinished`: outputs that the length limit cut off. brief: `bleu` alone.

        tokens: padded tokens a side of a batch; a GPU may be given more at once.
        """
        ...

    @property
    def kept_texts(self) -> tuple[str, ...]:
        """Endings of the files that hold the corpus's own lines beside the outputs: "ref.txt" what these are compared
        with, "src.txt" what they were made from."""
        ...

    def texts(self, data: Any, split: str) -> dict[str, list[str]]:
        """Those lines, in the order of the split."""
        ...

    def decode(
        self, model: Any, batches: Iterable[Any], searcher: Searcher, *, to_limit: bool = False
    ) -> dict[int, Hypothesis]:
        """Line of its split -> the best output. to_limit: EOS ends no output, the search's limit does."""
        ...

    def sample_bleu(self, model: Any, data: Any, searcher: Searcher, tokens: int, size: int) -> float:
        """BLEU of `size` training sentences, and no more than valid has."""
        ...

    def translate(self, model: Any, data: Any, lines: Sequence[str], searcher: Searcher) -> list[str]:
        """Outputs for raw source lines, in their order."""
        ...

    def inspect(self, model: Any, data: Any, split: str, tokens: int) -> Metrics:
        """What attention did on a fixed sample of a split: attended positions and entropy of each site."""
        ...


class TaskSpec(Spec):
    """The fields of one task in YAML."""

    kind: str
    primary: ClassVar[str]
    """The metric that tables show first."""

    @property
    def corpus(self) -> str | None:
        """What its corpus is called; None: it has none."""
        return None

    @property
    def lowercased(self) -> bool:
        """Whether its text has no capitals, so that scores ignore case."""
        return False

    def model_sizes(self) -> Sizes:
        """What the data fixes about a model; known without the data."""
        raise unwritten(self, "model_sizes")

    def bind(self) -> Task:
        raise unwritten(self, "bind")

    def for_training(self, *, scored: bool) -> Self:
        """The same without what only says how outputs are scored. scored: training looks at scores, too."""
        return self

    def data_path(self, cache: Path) -> Path:
        """Where the prepared data stands or will stand."""
        raise unwritten(self, "data_path")

    def prepared(self, cache: Path) -> Path | None:
        """The folder of the prepared data; None while they are not prepared."""
        raise unwritten(self, "prepared")

    def own_files(self, source: Path | None) -> list[Path]:
        """The user's own files that the data are made from, there or not; none of a corpus that has a home."""
        return []

    def changed_files(self, cache: Path, source: Path | None) -> list[Path]:
        """Those of `own_files` that are not what they were when they were prepared: `prepare` prepares them again."""
        return []

    def prepare(self, cache: Path, source: Path | None, offline: bool) -> Path:
        """Download, read `source`, or generate; then tokenise. Nothing is done where it was done before."""
        raise unwritten(self, "prepare")

    def open(self, at: Path) -> Any:
        """The data of a prepared folder."""
        raise unwritten(self, "open")


tasks: Registry[TaskSpec] = Registry("task", TaskSpec, "attnbench.tasks")
TaskField = Annotated[TaskSpec, Family(lambda: tasks)]
