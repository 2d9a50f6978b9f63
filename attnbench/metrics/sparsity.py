"""Attended positions and entropy of attention weights, summed over batches as they come."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Sparsity:
    """Running means over attention rows: one a head and valid query."""

    def __init__(self) -> None:
        self.rows = 0
        self._attended = 0.0
        self._entropy = 0.0

    def add(self, weights: Float[Tensor, "B H Q K"], query_valid: Bool[Tensor, "B Q"]) -> None:
        """Count the rows whose query is valid; padding keys have weight 0 and so count for nothing.

        Raises ValueError where the shapes do not belong together.
        """
        if query_valid.shape != (weights.shape[0], weights.shape[2]):
            raise ValueError(f"weights {tuple(weights.shape)} do not belong to query_valid {tuple(query_valid.shape)}")
        rows = weights.transpose(1, 2)[query_valid].flatten(0, 1).float()
        total = rows.sum(-1)
        # of the row over its sum, so that gates have an entropy too; a row of zeros has none
        entropy = torch.special.entr(rows).sum(-1) / total + total.log()
        self.rows += rows.shape[0]
        self._attended += (rows > 0).sum().item()
        self._entropy += entropy.masked_fill(total == 0, 0.0).cpu().double().sum().item()  # not every device has it

    @property
    def attended(self) -> float | None:
        """Mean number of keys with a weight above 0, which one that underflows has not; None before the first valid
        row."""
        return self._attended / self.rows if self.rows else None

    @property
    def entropy(self) -> float | None:
        """Mean `-sum p log p` in nats of the rows, each divided by its sum; None before the first valid row."""
        return self._entropy / self.rows if self.rows else None


class SiteSparsity:
    """One Sparsity a site, and their numbers under the names that results carry."""

    def __init__(self) -> None:
        self.sites: dict[str, Sparsity] = {}

    def add(self, site: str, weights: Float[Tensor, "B H Q K"], query_valid: Bool[Tensor, "B Q"]) -> None:
        """See Sparsity.add; the layers of a site are added one by one and count alike."""
        self.sites.setdefault(site, Sparsity()).add(weights, query_valid)

    def numbers(self) -> dict[str, float | None]:
        """`attended/<site>` and `entropy/<site>` of every site that was seen."""
        found: dict[str, float | None] = {f"attended/{site}": each.attended for site, each in self.sites.items()}
        return found | {f"entropy/{site}": each.entropy for site, each in self.sites.items()}
