"""Whether a Transformer's decoder can be compiled, and what its steps in compiled code (decoder_step.py) read then."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from attnbench.attention.modules.base import Attention, SelfAttention
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.modules.single_head import SingleHead
from attnbench.attention.scores.base import Score
from attnbench.core import hooks, native, packed
from attnbench.core.dropout import Dropout
from attnbench.models import _decoder_layout as layout
from attnbench.models import decoder_step
from attnbench.models.decoder_step import CompiledDecoder
from attnbench.models.layers import Embedding, FeedForward, Residual


class Sublayers(Protocol):
    """A layer of the decoder (DecoderLayer of transformer.py)."""

    attention: SelfAttention
    attention_residual: Residual
    cross: Attention
    cross_residual: Residual
    feed_forward: FeedForward
    feed_forward_residual: Residual

    def modules(self) -> Iterator[nn.Module]: ...


def compile_decoder(
    embedding: Embedding, layers: Sequence[Sublayers], norm: nn.Module, output: nn.Linear
) -> CompiledDecoder | None:
    """The decoder as it is now, for steps until its weights change; None where code compiled here has not packed these,
    and where a part is not as transformer.py makes it, is in training or has hooks. Hooks that come later are not
    called."""
    if torch.is_grad_enabled() or hooks.are_global(hooks.FORWARD):
        return None
    parts = [each for part in (embedding, *layers, norm, output) for each in part.modules()]
    linears = [each for each in parts if isinstance(each, nn.Linear)]
    weights: dict[nn.Module, packed.Compiled] = {
        each: found for each in linears if (found := packed.compiled(each)) is not None
    }
    dtypes = {each.weight.dtype for each in weights.values()}
    if len(weights) < len(set(linears)) or len(dtypes) != 1 or not all(map(layout.is_bare, parts)):
        return None
    if output not in weights or native.load(decoder_step.SOURCE) is None:
        return None
    table, places = embedding.table, embedding.positions
    known = type(embedding) is Embedding and type(table) is nn.Embedding and table.max_norm is None
    if not known or type(embedding.dropout) is not Dropout or not layout.fit(table.weight, places):
        return None
    if not (type(norm) is nn.Identity or _is_known_norm(norm)):
        return None
    held: list[Any] = [weights]
    sites, given = [], []
    for layer in layers:
        own = layer.attention
        if type(own) is not MultiHead or own.context_width != embedding.width or not _is_known(layer, own, weights):
            return None
        site, compiled = _compiled(layer, own, weights, held)
        sites.append(site)
        given.append(compiled)
    embeddings = layout.embeddings(table, places, embedding.width**0.5, held)
    last = ctypes.pointer(_norm(norm, held)) if isinstance(norm, nn.LayerNorm) else None
    inner = max(2 * embedding.width, *(each.expand.weight.outputs for each in given))
    ending = decoder_step.Output(last, layout.linear(weights[output]))
    return CompiledDecoder(embedding, sites, decoder_step.Given(
        embeddings, (decoder_step.Layer * len(given))(*given), ending, inner, dtypes.pop(),
        [(vars(each), vars(each)["forward"]) for each in weights], held,
    ))  # fmt: skip


def _is_known(layer: Sublayers, own: MultiHead, weights: layout.Weights) -> bool:
    """Whether the definition does what compiled code would do."""
    forward, residuals, cross = layer.feed_forward, _residuals(layer), layer.cross
    linears = [own.project_query, own.project_memory, own.project_context]
    if type(own.score).keys is not Score.keys or type(forward) is not FeedForward or "step" in vars(layer):
        return False
    if type(cross) is MultiHead:
        linears += [cross.project_query, cross.project_context]
    if type(cross) in (MultiHead, SingleHead) and cross.context_width != own.context_width:
        return False
    if any(each not in weights for each in (*linears, forward.expand, forward.contract)):
        return False
    if any(type(each) is not Residual or not _is_known_norm(each.norm) for each in residuals):
        return False
    dropouts = (forward.dropout, *(each.dropout for each in residuals))
    return all(type(each) is Dropout for each in dropouts) and len({each.before for each in residuals}) == 1


def _is_known_norm(norm: nn.Module) -> bool:
    return type(norm) is nn.LayerNorm and layout.fit(norm.weight, norm.bias)


def _compiled(
    layer: Sublayers, own: MultiHead, weights: layout.Weights, held: list[Any]
) -> tuple[decoder_step.Sites, decoder_step.Layer]:
    """held: takes up what must live as long."""
    forward, residuals = layer.feed_forward, _residuals(layer)
    own_site, own_compiled = layout.site(own, weights, held)
    source_site, source_compiled = layout.site(layer.cross, weights, held)
    norms = (decoder_step.Norm * 3)(*(_norm(each.norm, held) for each in residuals))
    return decoder_step.Sites(own, own_compiled, layer.cross, source_compiled), decoder_step.Layer(
        own.context_width, residuals[0].before, norms, own_site, source_site,
        *(layout.linear(weights[each]) for each in (own.project_memory, forward.expand, forward.contract)),
    )  # fmt: skip


def _norm(of: nn.LayerNorm, held: list[Any]) -> decoder_step.Norm:
    held.append((of.weight.detach(), of.bias.detach()))  # the same numbers, whatever becomes of the layer
    return decoder_step.Norm(of.weight.data_ptr(), of.bias.data_ptr(), of.eps)


def _residuals(layer: Sublayers) -> tuple[Residual, Residual, Residual]:
    return layer.attention_residual, layer.cross_residual, layer.feed_forward_residual
