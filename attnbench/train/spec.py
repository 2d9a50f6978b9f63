"""TrainSpec: everything YAML can say about training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from attnbench.core.spec import Spec
from attnbench.train.optim import AdamSpec, InverseSqrtSpec, OptimizerField, ScheduleField
from attnbench.train.step import Normalization


class TrainSpec(Spec):
    """How a model is trained, validated and chosen."""

    optimizer: OptimizerField = Field(default_factory=AdamSpec)
    """What turns gradients into updates."""
    schedule: ScheduleField = Field(default_factory=InverseSqrtSpec)
    """The learning rate of each update."""
    batch_tokens: int = Field(default=4096, ge=1)
    """Most padded tokens a side in one batch."""
    accumulate: int = Field(default=1, ge=1)
    """Batches whose gradients make one update."""
    normalization: Normalization = "tokens"
    """What the summed loss of an update is divided by: its target tokens, or its target sentences (documents, where
    those are translated), as OpenNMT-py does unless told otherwise. By sentences a gradient is as many times longer as
    a sentence has tokens, which SGD and `clip` feel."""
    clip: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Largest norm of the gradient; 0 leaves it alone."""
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    """Probability spread over the whole vocabulary."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: products in bfloat16 by autocast; weights, scores, normalisers and the loss stay in float32, on a GPU
    recurrent layers too. Where the device has no instructions for bfloat16 all is float32, as env.json then says."""
    max_steps: int = Field(default=100_000, ge=1)
    """Updates after which training ends."""
    max_epochs: int | None = Field(default=None, ge=1)
    """Passes over the data after which training ends, if that comes first."""
    log_every: int = Field(default=100, ge=1)
    """Updates between two lines of metrics.jsonl."""
    validate_every: Annotated[int, Field(ge=1)] | Literal["epoch"] = 1000
    """Updates between two validations, each of which is also a checkpoint; epoch: at the end of each pass over the
    data, which then has a line of its own in metrics.jsonl."""
    validate_bleu: bool = False
    """Decode the validation set greedily at each validation, for the curve and `select: bleu`; an output has at most
    1.2 times its source's tokens and 10, whatever `search` allows."""
    train_bleu: int = Field(default=0, ge=0)
    """Decode so many training sentences greedily at the end of each epoch, for the curve: no more than valid has, at
    equal distances (needs validate_every: epoch and validate_bleu)."""
    select: Literal["loss", "bleu"] = "loss"
    """What makes a checkpoint the best: validation loss, or validation BLEU (needs validate_bleu)."""
    patience: int | None = Field(default=None, ge=1)
    """Validations without a new best after which training ends."""
    average: int = Field(default=1, ge=1)
    """From 2 on: the mean of the weights at the last n validations is what is evaluated; 1: the best one."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if (count := self._validations) is not None:
            if self.average > count == 1:
                yield "average", "there is one validation"
            if self.patience is not None and self.patience >= count:
                yield "patience", f"of {count} validations at most the first is a best one"
        end = self.schedule.ends()
        by_steps = self.is_set("max_steps") and self.max_epochs is None and self.patience is None and self.average == 1
        if end is not None and end < self.max_steps and by_steps:
            yield "max_steps", f"from update {end} on the rate is 0; give schedule.minimum, or more schedule.steps"

    @property
    def _validations(self) -> int | None:
        """How many there are at most; None: the data decide."""
        if self.validate_every == "epoch":
            return self.max_epochs
        return -(-self.max_steps // self.validate_every)

    @field_validator("validate_every", mode="before")
    @classmethod
    def _number_or_epoch(cls, value: object) -> object:
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not number and value != "epoch":
            raise ValueError(f"validate_every is a whole number of updates from 1 on, or 'epoch', not {value!r}")
        return value

    @model_validator(mode="after")
    def _curve(self) -> Self:
        if self.train_bleu and not (self.validate_every == "epoch" and self.validate_bleu):
            raise ValueError("train_bleu needs validate_every: epoch and validate_bleu: true")
        if self.select == "bleu" and not self.validate_bleu:
            raise ValueError("select 'bleu' needs validate_bleu: true")
        return self
