"""ConvS2S (Gehring et al. 2017): gated convolutions on both sides, attention in every decoder layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn

from attnbench.attention.scores.base import ScoreField
from attnbench.attention.scores.dot import DotSpec
from attnbench.attention.spec import CrossSiteSpec, CrossSpec
from attnbench.attention.types import AttentionOutput, Dims, Memory, Positions
from attnbench.core import hooks
from attnbench.core.dropout import Dropout
from attnbench.core.packed_steps import Window
from attnbench.models import _windows
from attnbench.models._parallel import require_parallel
from attnbench.models._windows import Sentences
from attnbench.models.base import (
    Decoded,
    ModelSpec,
    Seq2SeqModel,
    Sizes,
    Source,
    Wanted,
    models,
    receive,
    require_same_shape,
)
from attnbench.models.convs2s_step import CompiledConvS2S, compile_convs2s
from attnbench.models.layers import Stack, TieKind, embedding_tables, require_joint, require_positions

HALF = 0.5**0.5
"""What a sum of two terms of equal variance is multiplied by, so that it has theirs."""
EMBEDDING_STD = 0.1


class ConvSiteSpec(CrossSiteSpec):
    """The attention of a convolutional decoder over the source."""

    score: ScoreField = Field(default_factory=DotSpec)
    """How alike query and key are."""


class ConvAttentionSpec(CrossSpec):
    """The one site of a ConvS2S; `default` and `cross` say the same."""

    site_class = ConvSiteSpec

    default: ConvSiteSpec = Field(default_factory=ConvSiteSpec, exclude=True)
    """What `cross` is laid over; spent when the spec is read."""
    cross: ConvSiteSpec = Field(default_factory=ConvSiteSpec)
    """Decoder attention over the source."""


@models.register
class ConvS2SSpec(ModelSpec):
    """Convolutional encoder-decoder with gated linear units and attention in every decoder layer."""

    kind: Literal["convs2s"] = "convs2s"
    layers: int = Field(default=10, ge=1)
    """Convolutions of the encoder and of the decoder."""
    decoder_layers: int | None = Field(default=None, ge=1)
    """Convolutions of the decoder where they differ from the encoder's."""
    embedding: int = Field(default=256, ge=1)
    """Width E of embeddings, of queries and keys, and of what enters the output projection."""
    width: int = Field(default=512, ge=1)
    """Width C of the convolutions."""
    kernel: int = Field(default=3, ge=1)
    """Tokens that a convolution sees: around its own in the encoder, its own and those before it in the decoder."""
    share_attention: bool = False
    """One attention, with its projections, for all decoder layers (Copy This Sentence); false: one a layer."""
    heads: int = Field(default=1, ge=1)
    """Heads of the attention module `multihead`; E must be a multiple."""
    tie: TieKind = "none"
    """all: one table for source, target and output (needs a joint vocabulary); decoder: target and output share."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """On embeddings, on the input of each convolution and of the output projection."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """On attention weights."""
    max_length: int = Field(default=1024, ge=2)
    """Longest sequence, in tokens; each position has a learned embedding."""
    attention: ConvAttentionSpec = Field(default_factory=ConvAttentionSpec)
    """What stands between decoder and source."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.embedding % self.heads:
            raise ValueError(f"embedding {self.embedding} cannot be split over {self.heads} heads; make it a multiple")
        require_parallel(self.attention, "ConvS2S")
        self.attention.cross.check("cross", self.embedding, self.embedding, self.heads)
        return self

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.heads > 1 and self.attention.cross.module.headed is False:
            yield "heads", f"the module '{self.attention.cross.module.kind}' has none; 'multihead' does"
        if self.share_attention and (self.decoder_layers or self.layers) == 1:
            yield "share_attention", "one decoder layer has nobody to share with"

    @property
    def state_width(self) -> int:
        return self.width

    @property
    def most(self) -> int:
        return self.max_length

    def check(self, sizes: Sizes) -> None:
        require_joint(self.tie, sizes)
        self.attention.require(sizes.longest_source)

    def build(self, sizes: Sizes) -> ConvS2S:
        return ConvS2S(self, sizes)


class ConvS2SMemory(NamedTuple):
    """cross: one Memory for each attention module. scale: sqrt of the number of source tokens."""

    cross: tuple[Memory, ...]
    scale: Float[Tensor, "B 1 1"]


class ConvS2SState(NamedTuple):
    """length: tokens read so far. inputs: the last kernel - 1 inputs of each decoder layer. beams: rows a source.
    received: if it is tracked. compiled: the decoder, where that makes steps faster."""

    length: int
    inputs: tuple[Float[Tensor, "R N C"], ...]
    beams: int
    received: Float[Tensor, "R S"] | None = None
    compiled: CompiledConvS2S | None = None


class PositionedEmbedding(nn.Module):
    """Token embeddings plus learned positions, then dropout. The table may be shared between sides."""

    def __init__(self, table: nn.Embedding, max_length: int, dropout: float) -> None:
        super().__init__()
        self.table = table
        self.positions = nn.Embedding(max_length, table.embedding_dim)
        nn.init.normal_(self.positions.weight, std=EMBEDDING_STD)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Int[Tensor, "B N"], start: int = 0) -> Float[Tensor, "B N E"]:
        """start: the position of the first token. Raises AttnbenchError past the last position."""
        end = start + tokens.shape[1]
        require_positions(end, self.positions.num_embeddings)
        return self.dropout(self.table(tokens) + self.positions.weight[start:end])


class GatedConvolution(Window):
    """`a * sigmoid(b)`, a and b the halves of a convolution with 2C outputs (section 3.2); pads nothing."""

    def __init__(self, width: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.span = kernel, width
        self.dropout = Dropout(dropout)
        self.weight = nn.Parameter(torch.empty(2 * width, width, kernel))
        self.bias = nn.Parameter(torch.zeros(2 * width))
        # 4: gates about one half leave a quarter of the variance
        nn.init.normal_(self.weight, std=(4 * (1 - dropout) / (kernel * width)) ** 0.5)

    def forward(
        self, inputs: Float[Tensor, "B N C"], outside: Int[Tensor, "X"] | None = None
    ) -> Float[Tensor, "B N2 C"]:
        """N2 = N - (kernel - 1). outside: as `_windows.convolve` has it, where that serves."""
        inputs = self.dropout(inputs)
        positions = len(inputs) * inputs.shape[1]
        if outside is not None or _windows.serves(positions, inputs, self.weight, self.bias):
            return self.finish(_windows.convolve(inputs, self.weight, self.bias, outside))
        both = nn.functional.conv1d(inputs.transpose(1, 2), self.weight, self.bias)
        return nn.functional.glu(both, dim=1).transpose(1, 2)

    def along(self, tokens: Float[Tensor, "N C"], sentences: Sentences) -> Float[Tensor, "N C"]:
        """The same of sentences end to end; of padded rows where a subclass has a `forward` of its own, or a hook wants
        to see what that takes and gives."""
        if type(self).forward is not GatedConvolution.forward or hooks.are_on(self):
            return sentences.take(self(nn.functional.pad(sentences.pad(tokens), (0, 0, *sentences.around))))
        padded = nn.functional.pad(tokens, (0, 0, *sentences.around))
        return self(padded[None], sentences.outside)[0]

    def flat(self) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N"]]:
        return _windows.flat(self.weight), self.bias

    def finish(self, product: Float[Tensor, "B N2 D"]) -> Float[Tensor, "B N2 C"]:
        return nn.functional.glu(product, dim=-1)


class Encoder(nn.Module):
    """From source embeddings to keys."""

    def __init__(self, spec: ConvS2SSpec) -> None:
        super().__init__()
        self.expand = _linear(spec.embedding, spec.width, spec.dropout)
        self.layers = Stack[GatedConvolution](
            GatedConvolution(spec.width, spec.kernel, spec.dropout) for _ in range(spec.layers)
        )
        self.contract = _linear(spec.width, spec.embedding)
        self.around = (spec.kernel - 1) // 2, spec.kernel // 2

    def forward(
        self, embedded: Float[Tensor, "... E"], source: Source, sentences: Sentences | None = None
    ) -> Float[Tensor, "... E"]:
        """sentences: where `embedded` are tokens of sources end to end, [N, E]."""
        states = self.expand(embedded)
        padding = ~source.valid.unsqueeze(-1)
        for layer in self.layers:
            if sentences is None:
                seen = states.masked_fill(padding, 0.0)
                gated = layer(nn.functional.pad(seen, (0, 0, *self.around)))
            else:
                gated = layer.along(states, sentences)
            states = (gated + states) * HALF
        return self.contract(states)


class DecoderAttention(nn.Module):
    """Multi-step attention (section 3.3) with its projections: width C outside, E inside."""

    def __init__(self, spec: ConvS2SSpec, layer: int, longest_source: int | None) -> None:
        super().__init__()
        dims = Dims(layer, spec.heads, spec.embedding, spec.embedding, longest_source)
        cross = spec.attention.cross
        self.averages = cross.module.averages and cross.transform.rows == "simplex"
        self.project_query = _linear(spec.width, spec.embedding)
        self.attention = spec.attention.cross.build("cross", spec.embedding, dims, spec.attention_dropout)
        self.project_context = _linear(self.attention.context_width, spec.width)

    def forward(
        self,
        states: Float[Tensor, "... C"],
        embedded: Float[Tensor, "... E"],
        memory: Memory,
        scale: Float[Tensor, "... 1"],
        positions: Int[Tensor, "Q"],
        *,
        sentences: Sentences | None = None,
        need_weights: bool = False,
    ) -> AttentionOutput:
        """embedded: of the target tokens. scale: of a context that is a mean, about as many terms as the source has.
        sentences: where targets lie end to end, [N, C] and [N, E], with a scale each; then no weights are told."""
        query = (self.project_query(states) + embedded) * HALF
        at = Positions(positions, torch.arange(memory.values.shape[2], device=positions.device))
        if sentences is None:
            output = self.attention(query, memory, at, need_weights=need_weights)
        else:
            output = AttentionOutput(self.attention.answer_ragged(query, sentences.ragged, memory, at))
        context = output.context * scale if self.averages else output.context  # a sum grows by itself
        context = (self.project_context(context) + states) * HALF
        return output._replace(context=context)


class ConvS2S(Seq2SeqModel):
    """See ConvS2SSpec. Without weight normalisation, and without the paper's scaling of the encoder's gradient."""

    def __init__(self, spec: ConvS2SSpec, sizes: Sizes) -> None:
        super().__init__()
        self.target_vocab, self.max_length = sizes.target_vocab, spec.max_length
        source, target = embedding_tables(sizes, spec.embedding, spec.tie, EMBEDDING_STD)
        self.source_embedding = PositionedEmbedding(source, spec.max_length, spec.dropout)
        self.target_embedding = PositionedEmbedding(target, spec.max_length, spec.dropout)
        self.encoder = Encoder(spec)
        layers = spec.decoder_layers or spec.layers
        self.seen = spec.kernel - 1
        self.expand = _linear(spec.embedding, spec.width, spec.dropout)
        self.decoder = Stack[GatedConvolution](
            GatedConvolution(spec.width, spec.kernel, spec.dropout) for _ in range(layers)
        )
        self.attention = Stack[DecoderAttention](
            DecoderAttention(spec, layer, sizes.longest_source)
            for layer in range(1 if spec.share_attention else layers)
        )
        self.contract = _linear(spec.width, spec.embedding)
        self.dropout = Dropout(spec.dropout)
        self.output = _linear(spec.embedding, sizes.target_vocab, spec.dropout)
        if spec.tie != "none":
            self.output.weight = target.weight

    def encode(self, source: Source, *, need_weights: Wanted = False) -> ConvS2SMemory:
        embedded = self.source_embedding(source.data)
        sentences = self._sentences(source.valid, self.encoder.around, embedded)
        if sentences is None:
            keys = self.encoder(embedded, source)
        else:
            keys = sentences.pad(self.encoder(sentences.take(embedded), source, sentences))
        values = (keys + embedded) * HALF
        cross = (
            each.attention.memorize(keys, source.valid, values, need_weights=bool(need_weights))
            for each in self.attention
        )
        return ConvS2SMemory(tuple(cross), source.valid.sum(1).to(embedded.dtype).sqrt()[:, None, None])

    def _sentences(
        self, valid: Bool[Tensor, "B N"] | None, around: tuple[int, int], embedded: Tensor
    ) -> Sentences | None:
        """How they lie end to end; None where all is left in its rows."""
        if valid is None or not _windows.serves(valid.numel(), embedded, *self.parameters()):
            return None
        return Sentences.of(valid, around)

    def _layers(self, memory: ConvS2SMemory) -> list[tuple[GatedConvolution, DecoderAttention, Memory]]:
        return list(zip(self.decoder, self.attended(), self._memories(memory), strict=True))

    def attended(self) -> list[DecoderAttention]:
        """The attention of each layer."""
        return [*self.attention] * self._sharing()

    def _memories(self, memory: ConvS2SMemory) -> tuple[Memory, ...]:
        """Of each layer."""
        return memory.cross * self._sharing()

    def _sharing(self) -> int:
        """All the layers when they share one attention, else 1."""
        return len(self.decoder) // len(self.attention)

    def decode(
        self,
        memory: ConvS2SMemory,
        target_in: Int[Tensor, "B T"],
        *,
        valid: Bool[Tensor, "B T"] | None = None,
        need_weights: bool = False,
    ) -> Decoded:
        require_same_shape(valid, target_in)
        embedded, around, scale = self.target_embedding(target_in), (self.seen, 0), memory.scale
        padded = need_weights or len(scale) != len(target_in)
        sentences = self._sentences(None if padded else valid, around, embedded)
        if sentences is not None:
            embedded, scale = sentences.take(embedded), scale[sentences.rows(), 0]
        positions = torch.arange(target_in.shape[1], device=target_in.device)
        states, maps = self.expand(embedded), []
        for convolution, attention, cross in self._layers(memory):
            if sentences is None:
                gated = convolution(nn.functional.pad(states, (0, 0, *around)))
            else:
                gated = convolution.along(states, sentences)
            output = attention(gated, embedded, cross, scale, positions, sentences=sentences, need_weights=need_weights)
            states = (output.context + states) * HALF
            if output.weights is not None:
                maps.append(output.weights)
        hidden = self.dropout(self.contract(states))
        hidden = hidden if sentences is None else sentences.pad(hidden)
        return Decoded(hidden, {"cross": maps} if need_weights else None)

    def logits(self, hidden: Float[Tensor, "... E"]) -> Float[Tensor, "... V"]:
        return self.output(hidden)

    def start(self, memory: ConvS2SMemory, capacity: int, *, track: bool = False) -> ConvS2SState:
        rows = memory.scale.shape[0]
        blank = memory.scale.new_zeros(rows, self.seen, self.expand.out_features)
        inputs = (blank,) * len(self.decoder)
        if track:
            return ConvS2SState(0, inputs, 1, memory.scale.new_zeros(rows, 1))
        return ConvS2SState(0, inputs, 1, None, self._compiled())

    def _compiled(self) -> CompiledConvS2S | None:
        """The decoder in compiled code, unless something else decodes."""
        if type(self).logits is not ConvS2S.logits or "logits" in vars(self):
            return None
        kinds = (PositionedEmbedding, [self.target_embedding]), (GatedConvolution, self.decoder)
        for kind, parts in (*kinds, (DecoderAttention, self.attention)):
            if any(type(each) is not kind for each in parts):
                return None
        return compile_convs2s(self, HALF)

    def step(
        self, memory: ConvS2SMemory, state: ConvS2SState, token: Int[Tensor, "R"]
    ) -> tuple[Float[Tensor, "R V"], ConvS2SState]:
        if state.compiled is not None:
            memories = self._memories(memory)
            stepped = state.compiled.step(token, state.length, memories, memory.scale, state.inputs, state.beams)
            if stepped is not None:
                logits, inputs = stepped
                return logits, state._replace(length=state.length + 1, inputs=inputs)
        embedded = self.target_embedding(token[:, None], state.length)
        positions = torch.full((state.beams,), state.length, device=token.device)
        states, inputs, maps = self.expand(embedded), [], []
        for (convolution, attention, cross), before in zip(self._layers(memory), state.inputs, strict=True):
            window = torch.cat([before, states], dim=1)
            inputs.append(window[:, 1:])
            # the beams of a source share its memory as queries side by side
            gated, known = (part.view(-1, state.beams, part.shape[-1]) for part in (convolution(window), embedded))
            output = attention(gated, known, cross, memory.scale, positions, need_weights=state.received is not None)
            states = (output.context.view_as(states) + states) * HALF
            if output.weights is not None:
                maps.append(output.weights)
        hidden = self.dropout(self.contract(states))[:, 0]
        received = receive(state.received, maps)
        return self.logits(hidden), state._replace(length=state.length + 1, inputs=tuple(inputs), received=received)


def _linear(inputs: int, outputs: int, dropout: float = 0.0) -> nn.Linear:
    """Keeps the variance of inputs on which there was dropout (section 3.5)."""
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=((1 - dropout) / inputs) ** 0.5)
    nn.init.zeros_(linear.bias)
    return linear
