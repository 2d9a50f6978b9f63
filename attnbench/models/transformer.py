"""The Transformer encoder-decoder (Vaswani et al. 2017), with any attention at each of its three sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn

from attnbench.attention.modules.base import SelfAttention
from attnbench.attention.spec import AttentionSpec
from attnbench.attention.types import ROLES, Dims, Memory, Positions
from attnbench.core.inherit import is_outdated
from attnbench.core.ragged import Ragged
from attnbench.core.relocate import narrowed, relocate
from attnbench.core.tree import map_batch, select_batch
from attnbench.models._decoder_sources import step_positions
from attnbench.models._parallel import require_parallel
from attnbench.models.base import (
    Decoded,
    Maps,
    ModelSpec,
    Seq2SeqModel,
    Sizes,
    Source,
    Wanted,
    models,
    receive,
    require_same_shape,
)
from attnbench.models.decoder_compile import compile_decoder
from attnbench.models.decoder_step import CompiledDecoder
from attnbench.models.layers import (
    Embedding,
    FeedForward,
    NormKind,
    PositionKind,
    Residual,
    Stack,
    TieKind,
    embedding_tables,
    require_joint,
)

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "width": 128, "heads": 4, "ffn": 256},
    "mini": {"layers": 3, "width": 256, "heads": 4, "ffn": 1024},
    "iwslt": {"layers": 6, "width": 512, "heads": 4, "ffn": 1024},
    "base": {"layers": 6, "width": 512, "heads": 8, "ffn": 2048},
    "big": {"layers": 6, "width": 1024, "heads": 16, "ffn": 4096},
}


@models.register
class TransformerSpec(ModelSpec):
    """Transformer encoder-decoder; a preset gives the sizes, and each size given beside it wins."""

    kind: Literal["transformer"] = "transformer"
    preset: Literal["tiny", "mini", "iwslt", "base", "big"] = Field(default="base", exclude=True)
    """Sizes, spent when the spec is read: tiny 2x128, mini 3x256, iwslt 6x512 with ffn 1024, base 6x512, big 6x1024."""
    layers: int = Field(default=6, ge=1)
    """Layers of the encoder and of the decoder."""
    decoder_layers: int | None = Field(default=None, ge=1)
    """Layers of the decoder where they differ from the encoder's."""
    width: int = Field(default=512, ge=1)
    """Model width D."""
    heads: int = Field(default=8, ge=1)
    """Attention heads H; D must be a multiple."""
    ffn: int = Field(default=2048, ge=1)
    """Inner width of the feed-forward blocks."""
    norm: NormKind = "post"
    """Layer norm before each sublayer (a last one ends each stack) or after it."""
    positions: PositionKind = "sinusoid"
    """Position encodings."""
    shared_norm: bool = False
    """One layer norm a layer, shared by its sublayers (the Transformer of Copy This Sentence)."""
    tie: TieKind = "all"
    """all: one table for source, target and output (needs a joint vocabulary); decoder: target and output share."""
    output_bias: bool = False
    """A bias a word at the output."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """On embeddings and on each sublayer's output."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """On attention weights."""
    activation_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Inside the feed-forward blocks."""
    max_length: int = Field(default=1024, ge=2)
    """Longest sequence, in tokens."""
    attention: AttentionSpec = Field(default_factory=AttentionSpec)
    """What stands at each attention site."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and isinstance(raw.get("preset"), str) and raw["preset"] in PRESETS:
            return {**PRESETS[raw["preset"]], **raw}
        return raw

    @model_validator(mode="after")
    def _forget_preset(self) -> Self:
        # the sizes say all: two ways to write the same sizes are one spec
        object.__setattr__(self, "preset", "base")
        self.__pydantic_fields_set__.discard("preset")
        return self

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} cannot be split over {self.heads} heads; make it a multiple")
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require_parallel(self.attention, "Transformer")
        for role in ROLES:
            self.attention.site(role).check(role, self.width, self.width, self.heads)
        return self

    @property
    def state_width(self) -> int:
        return self.width

    @property
    def most(self) -> int:
        return self.max_length

    def check(self, sizes: Sizes) -> None:
        require_joint(self.tie, sizes)
        self.attention.require(sizes.longest_source)

    def build(self, sizes: Sizes) -> Transformer:
        return Transformer(self, sizes)


class TransformerMemory(NamedTuple):
    """cross: projected source states, one Memory a decoder layer. maps: the encoder's weights, if asked for."""

    cross: tuple[Memory, ...]
    maps: list[Tensor] | None = None


class TransformerState(NamedTuple):
    """length: tokens read so far. caches: keys and values of each decoder layer. beams: rows a source. received: if it
    is tracked. compiled: the decoder, where that makes steps faster."""

    length: int
    caches: tuple[Memory, ...]
    beams: int
    received: Float[Tensor, "R S"] | None = None
    compiled: CompiledDecoder | None = None


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, spec: TransformerSpec, layer: int) -> None:
        super().__init__()
        dims = _dims(spec, layer, None)
        site = spec.attention.site("encoder_self")
        self.attention = site.build("encoder_self", spec.width, dims, spec.attention_dropout)
        self.attention_residual = _residual(spec)
        self.feed_forward = FeedForward(spec.width, spec.ffn, spec.activation_dropout)
        self.feed_forward_residual = _residual(spec, self.attention_residual)

    def forward(
        self,
        states: Float[Tensor, "... D"],
        source: Source,
        positions: Positions,
        ragged: Ragged | None,
        maps: list[Tensor] | None,
    ) -> Float[Tensor, "... D"]:
        """ragged: where `states` are tokens without padding, [N, D]; then no weights are told."""

        def attend(query: Tensor) -> Tensor:
            if ragged is not None:
                memory = self.attention.memorize_ragged(query, ragged, source.valid)
                return self.attention.answer_ragged(query, ragged, memory, positions)
            memory = self.attention.memorize(query, source.valid, need_weights=maps is not None)
            memory = memory._replace(right_padded=True)  # as a Source is
            return _note(self.attention(query, memory, positions, need_weights=maps is not None), maps)

        states = self.attention_residual(states, attend)
        return self.feed_forward_residual(states, self.feed_forward)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the source, then feed-forward."""

    def __init__(self, spec: TransformerSpec, layer: int, longest_source: int | None) -> None:
        super().__init__()
        dims = _dims(spec, layer, longest_source)
        site, cross = spec.attention.site("decoder_self"), spec.attention.site("cross")
        attention = site.build("decoder_self", spec.width, dims, spec.attention_dropout)
        assert isinstance(attention, SelfAttention)  # as every module is that may stand there
        self.attention = attention
        self.attention_residual = _residual(spec)
        self.cross = cross.build("cross", spec.width, dims, spec.attention_dropout)
        self.cross_residual = _residual(spec, self.attention_residual)
        self.feed_forward = FeedForward(spec.width, spec.ffn, spec.activation_dropout)
        self.feed_forward_residual = _residual(spec, self.attention_residual)

    def forward(
        self,
        states: Float[Tensor, "... D"],
        memory: Memory,
        positions: Positions,
        source_positions: Positions,
        ragged: Ragged | None,
        maps: Maps | None,
    ) -> Float[Tensor, "... D"]:
        """ragged: where `states` are tokens without padding, [N, D]; then no weights are told."""

        def attend(query: Tensor) -> Tensor:
            if ragged is not None:
                own = self.attention.memorize_ragged(query, ragged, None)
                return self.attention.answer_ragged(query, ragged, own, positions)
            own = self.attention.memorize(query, None)  # causality hides the padding on the right from real tokens
            output = self.attention(query, own, positions, need_weights=maps is not None)
            return _note(output, None if maps is None else maps["decoder_self"])

        def attend_source(query: Tensor) -> Tensor:
            if ragged is not None:
                return self.cross.answer_ragged(query, ragged, memory, source_positions)
            output = self.cross(query, memory, source_positions, need_weights=maps is not None)
            return _note(output, None if maps is None else maps["cross"])

        states = self.attention_residual(states, attend)
        states = self.cross_residual(states, attend_source)
        return self.feed_forward_residual(states, self.feed_forward)

    def step(
        self,
        state: Float[Tensor, "R 1 D"],
        memory: Memory,
        cache: Memory,
        positions: Positions,
        source_positions: Positions,
        maps: list[Tensor] | None,
    ) -> tuple[Float[Tensor, "R 1 D"], Memory]:
        """One position of every row; the beams of a source share its memory as queries side by side, each of which
        `source_positions` names.

        maps: where the weights over the source go.
        """
        grown, beams = cache, len(source_positions.q)

        def attend(query: Tensor) -> Tensor:
            nonlocal grown
            grown = self.attention.append(cache, query)
            return self.attention(query, grown, positions).context

        def attend_source(query: Tensor) -> Tensor:
            folded = query.view(-1, beams, query.shape[-1])
            output = self.cross(folded, memory, source_positions, need_weights=maps is not None)
            return _note(output, maps).reshape(query.shape)

        state = self.attention_residual(state, attend)
        state = self.cross_residual(state, attend_source)
        return self.feed_forward_residual(state, self.feed_forward), grown


class Transformer(Seq2SeqModel):
    """See TransformerSpec."""

    def __init__(self, spec: TransformerSpec, sizes: Sizes) -> None:
        super().__init__()
        self.target_vocab, self.max_length = sizes.target_vocab, spec.max_length
        source, target = embedding_tables(sizes, spec.width, spec.tie)
        self.source_embedding = Embedding(source, spec.positions, spec.max_length, spec.dropout)
        self.target_embedding = Embedding(target, spec.positions, spec.max_length, spec.dropout)
        self.encoder = Stack[EncoderLayer](EncoderLayer(spec, layer) for layer in range(spec.layers))
        self.decoder = Stack[DecoderLayer](
            DecoderLayer(spec, layer, sizes.longest_source) for layer in range(spec.decoder_layers or spec.layers)
        )
        last_norm = nn.LayerNorm if spec.norm == "pre" else nn.Identity
        self.encoder_norm = last_norm(spec.width)
        self.decoder_norm = last_norm(spec.width)
        self.output = nn.Linear(spec.width, sizes.target_vocab, bias=spec.output_bias)
        if spec.output_bias:
            nn.init.zeros_(self.output.bias)
        if spec.tie == "none":
            nn.init.normal_(self.output.weight, std=spec.width**-0.5)
        else:
            self.output.weight = target.weight

    def encode(self, source: Source, *, need_weights: Wanted = False) -> TransformerMemory:
        states = self.source_embedding(source.data)
        ragged = None if need_weights else Ragged.of(source.valid)
        if ragged is not None:
            states = ragged.take(states.unsqueeze(1))
        positions = _positions(source.data.shape[1], source.data.shape[1], source.data.device)
        maps: list[Tensor] | None = [] if need_weights is True else None
        for layer in self.encoder:
            states = layer(states, source, positions, ragged, maps)
        states = self.encoder_norm(states)
        cross = (
            layer.cross.memorize(states, source.valid, need_weights=bool(need_weights))
            if ragged is None
            else layer.cross.memorize_ragged(states, ragged, source.valid)
            for layer in self.decoder
        )
        return TransformerMemory(tuple(cross), maps)

    def decode(
        self,
        memory: TransformerMemory,
        target_in: Int[Tensor, "B T"],
        *,
        valid: Bool[Tensor, "B T"] | None = None,
        need_weights: bool = False,
    ) -> Decoded:
        states = self.target_embedding(target_in)
        require_same_shape(valid, target_in)
        ragged = None if need_weights or valid is None else Ragged.of(valid)
        if ragged is not None:
            states = ragged.take(states.unsqueeze(1))
        length, device = target_in.shape[1], target_in.device
        positions = _positions(length, length, device)
        sources = _positions(length, memory.cross[0].values.shape[2], device)
        maps: Maps | None = {role: [] for role in ROLES} if need_weights else None
        if maps is not None:
            maps["encoder_self"] = memory.maps or []
        for layer, cross in zip(self.decoder, memory.cross, strict=True):
            states = layer(states, cross, positions, sources, ragged, maps)
        states = self.decoder_norm(states)
        return Decoded(states if ragged is None else ragged.pad(states).squeeze(1), maps)

    def logits(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        return self.output(hidden)

    def start(self, memory: TransformerMemory, capacity: int, *, track: bool = False) -> TransformerState:
        like = memory.cross[0].values
        rows = like.shape[0]
        caches = tuple(layer.attention.allocate(rows, capacity, like) for layer in self.decoder)
        if track:
            return TransformerState(0, caches, 1, like.new_zeros(rows, 1))
        return TransformerState(0, caches, 1, None, self._compiled())

    def _compiled(self) -> CompiledDecoder | None:
        """The decoder in compiled code, unless something else decodes."""
        otherwise = type(self).logits is not Transformer.logits or "logits" in vars(self)
        if otherwise or any(type(each) is not DecoderLayer for each in self.decoder):
            return None
        return compile_decoder(self.target_embedding, list(self.decoder), self.decoder_norm, self.output)

    def step(
        self, memory: TransformerMemory, state: TransformerState, token: Int[Tensor, "R"]
    ) -> tuple[Float[Tensor, "R V"], TransformerState]:
        if state.compiled is not None:
            stepped = state.compiled.step(token, state.length, memory.cross, state.caches, state.beams)
            if stepped is not None:
                logits, caches = stepped
                return logits, state._replace(length=state.length + 1, caches=caches)
        states = self.target_embedding(token[:, None], state.length)
        keys = memory.cross[0].values.shape[2]
        positions, sources = step_positions(state.length, state.beams, keys, token.device)
        grown: list[Memory] = []
        maps: list[Tensor] | None = None if state.received is None else []
        for layer, cross, cache in zip(self.decoder, memory.cross, state.caches, strict=True):
            states, more = layer.step(states, cross, cache, positions, sources, maps)
            grown.append(more)
        hidden = self.decoder_norm(states)[:, 0]
        received = receive(state.received, maps or [])
        return self.logits(hidden), state._replace(length=state.length + 1, caches=tuple(grown), received=received)

    def reorder(self, state: TransformerState, rows: Int[Tensor, "R"], shared: int) -> TransformerState:
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
        relocate(self._held(state, shared), moved, rows[moved])  # the first `shared` positions stay, and so do rows
        received = None if state.received is None else state.received.index_select(0, rows)  # that stand
        return state._replace(received=received)

    def keep(
        self,
        memory: TransformerMemory,
        state: TransformerState,
        sources: Int[Tensor, "n"],
        rows: Int[Tensor, "R"],
        shared: int = 0,
    ) -> tuple[TransformerMemory, TransformerState]:
        """In place: what is copied is what moves."""
        if is_outdated(type(self), "keep", "reorder"):
            return super().keep(memory, state, sources, rows, shared)
        place, beams = torch.arange(len(rows), device=rows.device), state.beams
        elsewhere = rows // beams != place // beams
        for moves, known in ((elsewhere, 0), ((rows != place) & ~elsewhere, shared)):
            into = moves.nonzero().squeeze(1)
            relocate(self._held(state, known), into, rows[into])
        caches = map_batch(lambda held: held[: len(rows)], state.caches)
        cross = _kept(memory.cross, sources)
        memory, state = select_batch(memory._replace(cross=()), sources), select_batch(state._replace(caches=()), rows)
        return memory._replace(cross=cross), state._replace(caches=caches)

    def _held(self, state: TransformerState, shared: int) -> list[Tensor]:
        """What the caches know of each row, but for the first positions."""
        layers = zip(self.decoder, state.caches, strict=True)
        return [each for layer, cache in layers for each in layer.attention.held(cache, shared)]


def _kept(memories: Sequence[Memory], sources: Int[Tensor, "n"]) -> tuple[Memory, ...]:
    """Row `sources[i]` of each in row i. Keys and values move in place: what is passed in is spent."""
    held = [each for memory in memories for each in (memory.keys, memory.values) if each is not None]
    moved = iter(narrowed(held, sources))
    found: list[Memory] = []
    for memory in memories:
        keys, values = None if memory.keys is None else next(moved), next(moved)
        others = select_batch(memory._replace(keys=None, values=memory.values[:, :, :0]), sources)
        found.append(others._replace(keys=keys, values=values))
    return tuple(found)


def _dims(spec: TransformerSpec, layer: int, longest_source: int | None) -> Dims:
    return Dims(layer, spec.heads, spec.width, spec.width, longest_source)


def _residual(spec: TransformerSpec, first: Residual | None = None) -> Residual:
    """The residual connection of one sublayer: that of the layer's first one where they share their norm."""
    return first if first is not None and spec.shared_norm else Residual(spec.width, spec.norm, spec.dropout)


def _positions(queries: int, keys: int, device: torch.device) -> Positions:
    return Positions(torch.arange(queries, device=device), torch.arange(keys, device=device))


def _note(output: Any, maps: list[Tensor] | None) -> Tensor:
    """The context; its weights go into `maps` where they are collected."""
    if maps is not None and output.weights is not None:
        maps.append(output.weights)
    return output.context
