"""Linear layers of a loop: the gradient of their weight is one product over all steps, made behind the last of them.

Autograd makes a whole gradient of the weight at every step and adds them up: with few rows a step, that is memory read
and written for little work. Here a backward step only keeps its input and its gradient; behind all of them
autograd reaches a node that they share, the ticket, which computes the gradient of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attnbench.core.derivatives import once_differentiable

# torch has no public names for these
current_pass: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: 0)
"""A number that the backward pass has which is running."""
goes_to: Callable[[Any], bool] = getattr(torch._C, "_will_engine_execute_node", lambda _: True)
"""Whether that pass will come to a node."""

Notes = dict[int, list[tuple[Float[Tensor, "R I"], Float[Tensor, "R N"]]]]
"""Of each backward pass: inputs of steps, and gradients at what they gave."""


class Deferred:
    """`x W^T + b` for one loop, in the type of the autocast under which it is made; differentiable once.

    weight: [N, I]. bias: [N], or None. Both may be results of other operations.
    """

    def __init__(self, weight: Float[Tensor, "N I"], bias: Float[Tensor, "N"] | None = None) -> None:
        kind = weight.device.type
        lower = torch.is_autocast_enabled(kind) and weight.dtype != torch.float64
        self.dtype = torch.get_autocast_dtype(kind) if lower else weight.dtype
        weight, bias = weight.to(self.dtype), None if bias is None else bias.to(self.dtype)
        self._notes: Notes = {}
        self._ticket = _Weight.apply(self._notes, weight, bias)
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()

    def __call__(self, inputs: Float[Tensor, "R I"], plus: Float[Tensor, "R N"] | None = None) -> Float[Tensor, "R N"]:
        """plus: what is added to it."""
        if plus is not None:
            plus = plus.to(self.dtype)
        given = self._ticket, self._notes, self._weight, self._bias
        return _Step.apply(inputs.to(self.dtype), plus, *given)  # pyright: ignore[reportReturnType]


class _Weight(torch.autograd.Function):
    """Gives a ticket, which all steps take: autograd comes back here when it has been through each of them."""

    @staticmethod
    def forward(ctx: Any, notes: Notes, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.notes = notes
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Any) -> tuple[None, Tensor | None, Tensor | None]:
        noted = ctx.notes.pop(current_pass(), [])
        if not noted:
            return None, None, None
        inputs, grads = (torch.cat(each) for each in zip(*noted, strict=True))
        to_weight = grads.t() @ inputs if ctx.needs_input_grad[1] else None
        return None, to_weight, grads.sum(0) if ctx.needs_input_grad[2] else None


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, plus: Tensor | None, ticket: Tensor, notes: Notes, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.notes, ctx.ticket = notes, ticket.grad_fn
        ctx.save_for_backward(inputs, weight)
        if bias is not None and plus is not None:
            plus = plus + bias
        added = bias if plus is None else plus
        with torch.autocast(inputs.device.type, enabled=False):
            return inputs @ weight.t() if added is None else torch.addmm(added, inputs, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        (grad,) = grads
        if ctx.needs_input_grad[2] and goes_to(ctx.ticket):  # where no pass of it goes nobody would take the notes
            noted = ctx.notes.setdefault(current_pass(), [])
            noted.append((inputs.detach(), grad))  # with its graph it would hold itself
        to_inputs = grad @ weight if ctx.needs_input_grad[0] else None
        return to_inputs, grad if ctx.needs_input_grad[1] else None, None, None, None, None
