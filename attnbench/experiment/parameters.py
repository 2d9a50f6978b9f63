"""How many parameters a cell trains, known without making them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from attnbench.experiment.spec import CellSpec


class _Unfilled(TorchFunctionMode):
    """Leaves normal weights undrawn, and makes positions where they have memory: for tensors without any, torch would
    first load its compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is nn.init.normal_:
            return args[0] if args else named["tensor"]
        return func(*args, **({**named, "device": "cpu"} if func is torch.arange else named))


def count_parameters(spec: CellSpec) -> int:
    """Parameters that the cell trains, shared ones once; no memory is taken."""
    with torch.device("meta"), _Unfilled():
        model = spec.model.build(spec.task.model_sizes())
    return trained_parameters(model)


def trained_parameters(model: nn.Module) -> int:
    """Parameters of the model that change in training, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
