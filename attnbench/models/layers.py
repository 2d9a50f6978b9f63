"""What models are made of: embeddings, positions, feed-forward blocks, residual connections."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnbench.core import hooks
from attnbench.core.dropout import Dropout
from attnbench.core.errors import AttnbenchError
from attnbench.models.base import Sizes

PositionKind = Literal["sinusoid", "learned"]
NormKind = Literal["pre", "post"]
TieKind = Literal["all", "decoder", "none"]
L = TypeVar("L", bound=nn.Module)


class Stack(nn.ModuleList, Generic[L]):
    """A ModuleList that remembers what it holds."""

    def __init__(self, layers: Iterable[L]) -> None:
        super().__init__(layers)

    def __iter__(self) -> Iterator[Any]:  # Any is L: nn.ModuleList fixes the declared type
        return super().__iter__()


def sinusoid(positions: Int[Tensor, "N"], width: int) -> Float[Tensor, "N D"]:
    """`PE(p, 2i) = sin(p / 10000^{2i/D})`, `PE(p, 2i+1) = cos(...)` (Vaswani et al. 2017, section 3.5)."""
    pairs = torch.arange((width + 1) // 2, device=positions.device, dtype=torch.float64)
    angles = positions.double()[:, None] * torch.exp(-math.log(10000.0) * 2 * pairs / width)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :width]


def require_positions(end: int, max_length: int) -> None:
    """Raise AttnbenchError where a sequence of `end` tokens leaves the positions that a model has."""
    if end > max_length:
        raise AttnbenchError(
            f"a sequence of {end} tokens is longer than model.max_length {max_length}; "
            "raise it, or lower task.max_length"
        )


class Embedding(nn.Module):
    """Token embeddings times sqrt(D), plus positions, then dropout. The table may be shared between sides."""

    def __init__(self, table: nn.Embedding, positions: PositionKind, max_length: int, dropout: float) -> None:
        super().__init__()
        self.table = table
        self.width = table.embedding_dim
        self.max_length = max_length
        self.learned = nn.Embedding(max_length, self.width) if positions == "learned" else None
        self.waves: Tensor
        self.register_buffer("waves", sinusoid(torch.arange(max_length), self.width).float(), persistent=False)
        if self.learned is not None:
            nn.init.normal_(self.learned.weight, std=self.width**-0.5)
        self.dropout = Dropout(dropout)

    @property
    def positions(self) -> Float[Tensor, "max_length D"]:
        """The encoding of every position."""
        return self.waves if self.learned is None else self.learned.weight

    def forward(self, tokens: Int[Tensor, "B N"], start: int = 0) -> Float[Tensor, "B N D"]:
        """start: the position of the first token. Raises AttnbenchError past the last position."""
        end = start + tokens.shape[1]
        require_positions(end, self.max_length)
        embedded = self.table(tokens) * math.sqrt(self.width) + self.positions[start:end].to(self.table.weight.dtype)
        return self.dropout(embedded)


def embedding_table(rows: int, width: int, pad: int, std: float | None = None) -> nn.Embedding:
    """Normal with deviation `std`, else 1/sqrt(D), which makes embeddings times sqrt(D) unit variance; PAD is zero."""
    table = nn.Embedding(rows, width, padding_idx=pad)
    nn.init.normal_(table.weight, std=std or width**-0.5)
    with torch.no_grad():
        table.weight[pad].zero_()
    return table


def require_joint(tie: TieKind, sizes: Sizes) -> None:
    """Raise ValueError where the sides are tied, and have vocabularies of their own."""
    if tie == "all" and not sizes.joint:
        raise ValueError(
            "tie 'all' shares one table between both sides, and task.tokenizer keeps two vocabularies; set "
            "model.tie: decoder, or take one for both (task.tokenizer: {kind: bpe, joint: true})"
        )


def embedding_tables(
    sizes: Sizes, width: int, tie: TieKind, std: float | None = None
) -> tuple[nn.Embedding, nn.Embedding]:
    """The tables of source and target, one and the same with the tie `all`. Raises ValueError where that cannot be."""
    require_joint(tie, sizes)
    target = embedding_table(sizes.target_vocab, width, sizes.pad, std)
    return target if tie == "all" else embedding_table(sizes.source_vocab, width, sizes.pad, std), target


class FeedForward(nn.Module):
    """`W_2 dropout(relu(W_1 x + b_1)) + b_2` (Vaswani et al. 2017, eq. 2)."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(width, inner)
        self.contract = nn.Linear(inner, width)
        self.dropout = Dropout(dropout)
        for linear in (self.expand, self.contract):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, states: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.contract(self.dropout(torch.relu_(self.expand(states))))


class Residual(nn.Module):
    """One residual connection with its layer norm: `x + f(norm(x))` (pre) or `norm(x + f(x))` (post)."""

    def __init__(self, width: int, norm: NormKind, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.before = norm == "pre"
        self.dropout = Dropout(dropout)

    def forward(self, states: Float[Tensor, "... D"], sublayer: Callable[[Tensor], Tensor]) -> Float[Tensor, "... D"]:
        if self.before:
            return self._add(states, sublayer(self.norm(states)))
        return self.norm(self._add(states, sublayer(states)))

    def _add(self, states: Tensor, found: Tensor) -> Tensor:
        own = type(self.dropout) is Dropout and "forward" not in vars(self.dropout)
        if own and found.shape == states.shape and not hooks.are_on(self.dropout):
            return self.dropout(found, to=states)
        return states + self.dropout(found)
