"""What all steps of a loop read, as keys and values of attention are: its gradient is made behind the last of them.

Autograd makes a gradient of the whole tensor at every step and adds them up, which is memory read and written for
little work. Of a tensor that is `gathered`, a backward step only keeps what its part is made of, or adds to one sum;
behind all of them autograd reaches the node that made the tensor, where one product gives the rest. Operations that
know nothing of it are differentiated as ever.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attnbench.core.deferred import current_pass, goes_to
from attnbench.core.derivatives import once_differentiable


class _Parts(NamedTuple):
    """Of one backward pass. factors: pairs whose products are parts of the gradient. sums: at most one tensor, to which
    others were added."""

    factors: list[tuple[Float[Tensor, "B H Q N"], Float[Tensor, "B H Q E"]]]
    sums: list[Tensor]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, held: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gathered_parts = {}
        return held.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        parts = ctx.gathered_parts.pop(current_pass(), _Parts([], []))
        found = [*parts.sums, *(grad for grad in grads if grad is not None)]
        if parts.factors:
            first, second = (torch.cat(each, 2) for each in zip(*parts.factors, strict=True))
            found.append(first.mT @ second)
        return sum(found[1:], found[0]) if found else None


def gathered(held: Float[Tensor, "B H N E"]) -> Float[Tensor, "B H N E"]:
    """The same numbers, for the steps of one loop; differentiable once. What is asked for as the gradient of the result
    itself lacks the parts that are made behind the steps: ask for that of `held`."""
    return _Gathered.apply(held)  # pyright: ignore[reportReturnType]


def gatherer(held: Tensor) -> Any | None:
    """For the forward pass of an operation that `add_product` or `sum_of` will be called for; None where `held` is not
    what `gathered` gave."""
    node = held.grad_fn
    return node if hasattr(node, "gathered_parts") else None


def add_product(
    node: Any | None, first: Float[Tensor, "B H Q N"], second: Float[Tensor, "B H Q E"]
) -> Float[Tensor, "B H N E"] | None:
    """What an operation returns as the gradient of what it read, where that is `first^T second`."""
    if node is None:
        return first.mT @ second
    if goes_to(node):  # else nobody wants it, nor would take it away
        _parts(node).factors.append((first.detach(), second.detach()))
    return None


def sum_of(node: Any | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Zeros, or what steps before have made of them, to which an operation adds the gradient of what it read, `like`;
    and what it then returns as that gradient."""
    if node is None or not goes_to(node):
        made = torch.zeros_like(like)
        return made, made if node is None else None
    sums = _parts(node).sums
    if not sums:
        sums.append(torch.zeros_like(like))
    return sums[0], None


def _parts(node: Any) -> _Parts:
    return node.gathered_parts.setdefault(current_pass(), _Parts([], []))
