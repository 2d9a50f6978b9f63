"""The LSTM encoder-decoder, with or without attention (Sutskever et al. 2014; Luong et al. 2015)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import nn

from attnbench.models.base import models
from attnbench.models.recurrent import RecurrentSpec


@models.register
class LstmSpec(RecurrentSpec):
    """LSTM layers on both sides; `attention: {cross: {module: none}}` leaves the decoder the last state alone."""

    kind: Literal["lstm"] = "lstm"
    cell: ClassVar[type[nn.RNNBase]] = nn.LSTM
