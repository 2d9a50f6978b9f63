"""Models of every kind as torch's users write them, beside which ours are timed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnbench.bench import nn_convs2s, nn_loop, nn_recurrent, nn_transformer, sentences
from attnbench.bench.subjects import Subject
from attnbench.bench.timer import Case
from attnbench.models.base import ModelSpec
from attnbench.train.optim import optimizers

OURS = "attnbench"
SHIPPED = "torch.nn in a plain loop, float32, as shipped"
SET_UP = "torch.nn in a plain loop, float32"
"""With the products and the memory that every training here has."""
_KINDS: tuple[tuple[Callable[[ModelSpec], bool], Callable[..., nn_loop.Model]], ...] = (
    (nn_recurrent.serves, nn_recurrent.NNRecurrent),
    (nn_convs2s.serves, nn_convs2s.NNConvS2S),
    (nn_transformer.serves, nn_transformer.NNTransformer),
)


def serves(spec: ModelSpec) -> bool:
    """Whether torch's modules make such a model."""
    return any(served(spec) for served, _ in _KINDS)


def ours(subject: Subject) -> Subject:
    """What is timed beside `training` of the same."""
    return subject._replace(group=_group(subject), name=OURS)


def build(subject: Subject) -> nn_loop.Model:
    """The model in torch's modules; only of what this module `serves`."""
    spec = subject.spec
    torch.manual_seed(0)
    return next(made for served, made in _KINDS if served(spec))(spec, subject.sizes)


def training(subject: Subject, count: int, device: torch.device, name: str) -> Case:
    """Updates on the batches of models.training, by the optimiser of the subject's updates; only of what this module
    `serves`."""
    update, model = subject.update, build(subject).to(device)
    batches = sentences.batches(count, device, update.tokens, subject.sizes, subject.longest)
    optimizer = optimizers.parse(update.optimizer).build(model.parameters())
    return nn_loop.training(_group(subject), name, model, batches, optimizer, update.smoothing)


def _group(subject: Subject) -> str:
    return f"{subject.group}, {subject.name}"
