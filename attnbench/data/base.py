"""What training and evaluation see of prepared data: batches of ids, splits, vocabularies."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Bool, Int
from torch import Tensor

from attnbench.data.special import BOS, EOS, PAD, SPECIALS, UNK

__all__ = ["BOS", "EOS", "PAD", "SPECIALS", "UNK", "Batch", "Cursor"]


class Batch(NamedTuple):
    """Sentence pairs padded on the right with PAD. A source ends with EOS.

    target_in begins with BOS; target_out is the same shifted by one, ending with EOS.
    index: the line of each pair in its split (0-based).
    fertility: of data with fertilities, the target tokens that each source token is aligned to; EOS 1, padding 0.
    """

    source: Int[Tensor, "B S"]
    source_valid: Bool[Tensor, "B S"]
    target_in: Int[Tensor, "B T"]
    target_out: Int[Tensor, "B T"]
    target_valid: Bool[Tensor, "B T"]
    index: Int[Tensor, "B"]  # type: ignore[assignment]  # no one asks a batch for tuple.index
    fertility: Int[Tensor, "B S"] | None = None


class Cursor(NamedTuple):
    """A place in the endless stream of training batches: go on with batch `batch` of pool `pool` of epoch `epoch`."""

    epoch: int = 0
    pool: int = 0
    batch: int = 0
