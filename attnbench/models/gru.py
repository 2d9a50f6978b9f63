"""The GRU encoder-decoder, with or without attention (Cho et al. 2014; Bahdanau et al. 2015)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import nn

from attnbench.models.base import models
from attnbench.models.recurrent import RecurrentSpec


@models.register
class GruSpec(RecurrentSpec):
    """GRU layers on both sides; `query: previous` attends before each step, as Bahdanau et al. do."""

    kind: Literal["gru"] = "gru"
    cell: ClassVar[type[nn.RNNBase]] = nn.GRU
