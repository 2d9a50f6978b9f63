"""Optimisers and learning-rate schedules, each a small spec."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import nn

from attnbench.core.inherit import is_outdated
from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec


class OptimizerSpec(Spec):
    """The fields of one optimiser in YAML, and how to build it."""

    kind: str

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """An optimiser with learning rate 0: the schedule sets it before each step."""
        raise unwritten(self, "build")


class ScheduleSpec(Spec):
    """Learning rate as a function of the update, counted from 1."""

    kind: str

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if is_outdated(cls, "ends", "rate"):
            cls.ends = ScheduleSpec.ends

    def ends(self) -> int | None:
        """The update from which on the rate is 0; None: there is none, or nobody knows."""
        return None

    @property
    def reads_width(self) -> bool:
        """Whether the rate depends on the width of the model."""
        return any(self.rate(10**power, 1) != self.rate(10**power, 2) for power in range(8))

    def rate(self, step: int, width: int) -> float:
        """The learning rate of update `step`; width: the model's D, which Noam's rule reads."""
        raise unwritten(self, "rate")


optimizers: Registry[OptimizerSpec] = Registry("optimizer", OptimizerSpec, "attnbench.train")
schedules: Registry[ScheduleSpec] = Registry("schedule", ScheduleSpec, "attnbench.train")
OptimizerField = Annotated[OptimizerSpec, Family(lambda: optimizers)]
ScheduleField = Annotated[ScheduleSpec, Family(lambda: schedules)]


class _AdamFields(OptimizerSpec):
    betas: list[float] = Field(default_factory=lambda: [0.9, 0.98])
    """Decay of the first and second moment."""
    eps: float = Field(default=1e-9, gt=0, allow_inf_nan=False)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Adam: added to the gradient. AdamW: taken from the weights."""

    @field_validator("betas")
    @classmethod
    def _two(cls, betas: list[float]) -> list[float]:
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are two numbers in [0, 1), not {betas}")
        return betas

    def _build(self, cls: type[torch.optim.Adam], parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        pair = (self.betas[0], self.betas[1])
        return cls(parameters, lr=0.0, betas=pair, eps=self.eps, weight_decay=self.weight_decay, fused=True)


@optimizers.register
class AdamSpec(_AdamFields):
    """Adam (Kingma & Ba 2015); weight decay as L2 regularisation."""

    kind: Literal["adam"] = "adam"

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self._build(torch.optim.Adam, parameters)


@optimizers.register
class AdamWSpec(_AdamFields):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"

    def unused(self) -> Iterator[tuple[str, str]]:
        if not self.weight_decay:
            yield "kind", "with weight_decay 0 it is adam"

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return self._build(torch.optim.AdamW, parameters)


@optimizers.register
class SgdSpec(OptimizerSpec):
    """Plain stochastic gradient descent."""

    kind: Literal["sgd"] = "sgd"
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Share of the last step in the next."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Added to the gradient."""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        momentum, decay = self.momentum, self.weight_decay
        # with momentum a fused step wants a gradient of every parameter from the first one on
        return torch.optim.SGD(parameters, lr=0.0, momentum=momentum, weight_decay=decay, fused=not momentum)


def _require_floor(minimum: float, lr: float) -> None:
    if minimum > lr:
        raise ValueError(f"minimum ({minimum}) is larger than lr ({lr}); lower it")


def _level(minimum: float, lr: float) -> Iterator[tuple[str, str]]:
    if minimum == lr:
        yield "minimum", "it is lr, so that the rate never falls, as with `schedule: constant`"


@schedules.register
class ConstantSpec(ScheduleSpec):
    """The same learning rate throughout, after a linear warm-up if any."""

    kind: Literal["constant"] = "constant"
    lr: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    """Learning rate."""
    warmup: int = Field(default=0, ge=0)
    """Updates of linear warm-up."""

    def rate(self, step: int, width: int) -> float:
        return self.lr * min(1.0, step / self.warmup) if self.warmup else self.lr


@schedules.register
class InverseSqrtSpec(ScheduleSpec):
    """Linear warm-up from `start` to `lr`, then `lr * sqrt(warmup / step)`, never below `minimum` after it."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    lr: float = Field(default=5e-4, gt=0, allow_inf_nan=False)
    """Learning rate at the end of the warm-up."""
    warmup: int = Field(default=4000, ge=1)
    """Updates of linear warm-up."""
    start: float = Field(default=1e-7, ge=0, allow_inf_nan=False)
    """Learning rate at update 0."""
    minimum: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Floor of the decay."""

    @model_validator(mode="after")
    def _falls(self) -> Self:
        _require_floor(self.minimum, self.lr)
        if self.is_set("start") and self.start > self.lr:
            raise ValueError(f"the warm-up rises from start {self.start:g} to lr {self.lr:g}; lower start, or raise lr")
        return self

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.warmup == 1 and self.is_set("start"):
            yield "start", "it is the rate of update 0, and with a warmup of 1 no update is below it"
        yield from _level(self.minimum, self.lr)

    def rate(self, step: int, width: int) -> float:
        if step < self.warmup:
            return self.start + (self.lr - self.start) * step / self.warmup
        return max(self.minimum, self.lr * (self.warmup / step) ** 0.5)


@schedules.register
class StairsSpec(ScheduleSpec):
    """The same learning rate for `first` updates, then `factor` times it for each `every` updates more (Luong 2015)."""

    kind: Literal["stairs"] = "stairs"
    lr: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Learning rate at the beginning."""
    first: int = Field(ge=1)
    """Updates at that rate."""
    every: int = Field(ge=1)
    """Updates at each rate after it."""
    factor: float = Field(default=0.5, gt=0, le=1)
    """What the rate is multiplied by."""

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.factor == 1:
            yield "factor", "at 1 the rate never falls, as with `schedule: constant`"

    def rate(self, step: int, width: int) -> float:
        return self.lr * self.factor ** max(0, -(-(step - self.first) // self.every))


class _DecayFields(ScheduleSpec):
    lr: float = Field(default=5e-4, gt=0, allow_inf_nan=False)
    """Learning rate at the end of the warm-up."""
    warmup: int = Field(default=0, ge=0)
    """Updates of linear warm-up."""
    steps: int = Field(ge=1)
    """The update at which the rate comes to `minimum`, where it stays."""
    minimum: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Learning rate at the end."""

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.steps <= self.warmup:
            raise ValueError(f"steps ({self.steps}) leave nothing after the warm-up ({self.warmup}); give more of them")
        _require_floor(self.minimum, self.lr)
        return self

    def unused(self) -> Iterator[tuple[str, str]]:
        yield from _level(self.minimum, self.lr)

    def ends(self) -> int | None:
        return None if self.minimum else self.steps

    def rate(self, step: int, width: int) -> float:
        if step < self.warmup:
            return self.lr * step / self.warmup
        left = 1 - min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.minimum + (self.lr - self.minimum) * self._share(left)

    def _share(self, left: float) -> float:
        """Of the rate's fall, what is still to come; left: of the updates."""
        raise unwritten(self, "_share")


@schedules.register
class LinearSpec(_DecayFields):
    """Linear warm-up from 0 to `lr`, then linearly down to `minimum` at update `steps`."""

    kind: Literal["linear"] = "linear"

    def _share(self, left: float) -> float:
        return left


@schedules.register
class CosineSpec(_DecayFields):
    """Linear warm-up from 0 to `lr`, then half a cosine to `minimum` at update `steps` (Loshchilov and Hutter 2017)."""

    kind: Literal["cosine"] = "cosine"

    def _share(self, left: float) -> float:
        return (1 - math.cos(math.pi * left)) / 2


@schedules.register
class NoamSpec(ScheduleSpec):
    """`scale * D^-0.5 * min(step^-0.5, step * warmup^-1.5)` (Vaswani et al. 2017, eq. 3)."""

    kind: Literal["noam"] = "noam"
    scale: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor on the whole rule; tensor2tensor's transformer_base has 2."""
    warmup: int = Field(default=4000, ge=1)
    """Updates of linear warm-up."""

    def rate(self, step: int, width: int) -> float:
        return self.scale * width**-0.5 * min(step**-0.5, step * self.warmup**-1.5)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step, for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
