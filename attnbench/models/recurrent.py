"""Encoder-decoders of recurrent layers, with or without attention over the source.

The LSTM (Sutskever et al. 2014; Luong et al. 2015) and the GRU (Bahdanau et al. 2015) differ in their cells alone.
A decoder step, with s the decoder state, c the context, e the embedded input token and r what is read out:

- query `current` (Luong): `s_t = cell([e_t; fed], s_{t-1})`, `c_t = attend(s_t)`;
- query `previous` (Bahdanau): `c_t = attend(s_{t-1})`, `s_t = cell([e_t; c_t], s_{t-1})`;
- readout `state`: `r = s_t`; `attentional`: `r = tanh(W [c_t; s_t] + b)`; `concat`: `r = [s_t; c_t; e_t]`;
- logits `W_o r + b_o`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attnbench.attention.history import endow
from attnbench.attention.spec import CrossSpec
from attnbench.attention.types import Dims, History, Memory, Positions
from attnbench.core import hooks, native, waiting
from attnbench.core.dropout import Dropout
from attnbench.core.gates import State
from attnbench.core.gathered import gathered
from attnbench.models import _cells
from attnbench.models._reading import read
from attnbench.models.base import Decoded, ModelSpec, Seq2SeqModel, Sizes, Source, Wanted, receive, require_same_shape
from attnbench.models.fertility.base import Fertility, FertilityField

Cells = tuple[State, ...]
"""What each layer carries from step to step."""
Run = Callable[[Float[Tensor, "R 1 E"], Float[Tensor, "R F"] | None, Cells], tuple[Float[Tensor, "R 1 W"], Cells]]
"""A step of the layers: of the embedded token, of what joins it, and of what they carry."""


class RecurrentSpec(ModelSpec):
    """What the recurrent models have in common."""

    sequential: ClassVar[bool] = True
    cell: ClassVar[type[nn.RNNBase]]

    layers: int = Field(default=2, ge=1)
    """Layers of the encoder and of the decoder."""
    width: int = Field(default=512, ge=1)
    """Units of a layer, in each direction."""
    embedding: int | None = Field(default=None, ge=1)
    """Width of the embeddings; null: that of the layers."""
    bidirectional: bool = False
    """The encoder reads both ways; `tanh(W [forward; backward] + b)` of its last states starts each decoder layer."""
    query: Literal["current", "previous"] = "current"
    """What attends: the state after the step (Luong) or before it, so that the context is an input (Bahdanau)."""
    input_feeding: Literal["none", "attentional", "context"] = "none"
    """What joins the next input: nothing, the attentional vector (Luong et al. 2015, section 3.3), or the context."""
    readout: Literal["state", "attentional", "concat"] = "attentional"
    """What the output layer reads: the state, tanh of a layer over context and state, or state, context and input."""
    dropout: float = Field(default=0.2, ge=0, lt=1)
    """On embeddings, between layers, and on the attentional vector."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """On attention weights."""
    attention: CrossSpec = Field(default_factory=CrossSpec)
    """What stands between decoder and source."""
    fertility: FertilityField | None = None
    """How much attention a source word may receive in all; the last token of the source, EOS, is the sink, which has no
    end. For transforms and biases that spend it."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        attends = self.attends
        if self.query == "previous" and self.input_feeding != "none":
            raise ValueError(
                f"input_feeding '{self.input_feeding}' belongs to the query 'current'; with 'previous' the context is "
                "an input already, so drop input_feeding"
            )
        if self.input_feeding == "attentional" and self.readout != "attentional":
            raise ValueError(
                f"input_feeding 'attentional' feeds what the readout 'attentional' makes, and the readout is "
                f"'{self.readout}'; take `input_feeding: context` or `readout: attentional`"
            )
        if attends and self.readout == "state" and self.query == "current" and self.input_feeding == "none":
            raise ValueError(
                "with the readout 'state' the context would go nowhere; take `readout: attentional` or "
                "`query: previous`, or `attention: {cross: {module: none}}`"
            )
        if not attends and (self.query == "previous" or self.input_feeding == "context"):
            raise ValueError(
                f"the module '{self.attention.cross.module.kind}' gives no context to put into the input; "
                "drop query and input_feeding"
            )
        self.attention.cross.check("cross", self.width, self.encoder_width)
        if self.attention.cross.spends and self.fertility is None:
            raise ValueError(
                f"{self.attention.cross.looks_back} of attention.cross bounds what each source word receives; say how "
                "much that may be, as in `fertility: {kind: constant, value: 3}`"
            )
        pattern, transform = self.attention.cross.pattern, self.attention.cross.transform
        if pattern.drawn and transform.may_fail:
            raise ValueError(
                f"the pattern '{pattern.kind}' may leave out EOS, which takes what no word may, and then the transform "
                f"'{transform.kind}' has no solution; take `pattern: full`, or `on_infeasible: saturate`"
            )
        if self.fertility is not None and not self.attention.cross.spends:
            raise ValueError(
                f"nothing spends the fertility '{self.fertility.kind}'; drop it, or take a transform that does, like "
                "`attention: {cross: {transform: csparsemax}}`"
            )
        return self

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.attention_dropout and not self.attends:
            yield "attention_dropout", f"the module '{self.attention.cross.module.kind}' has no weights"

    @property
    def attends(self) -> bool:
        return bool(self.attention.cross.module.stages)

    @property
    def encoder_width(self) -> int:
        """Width of the encoder's states."""
        return self.width * (2 if self.bidirectional else 1)

    @property
    def embedding_width(self) -> int:
        return self.embedding or self.width

    @property
    def state_width(self) -> int:
        return self.width

    def check(self, sizes: Sizes) -> None:
        self.attention.require(sizes.longest_source)

    def build(self, sizes: Sizes) -> Recurrent:
        return Recurrent(self, sizes)


class RecurrentMemory(NamedTuple):
    """initial: what the decoder starts from. cross: what it attends to."""

    initial: Cells
    cross: Memory


class RecurrentState(NamedTuple):
    """length: tokens read so far. fed: what joins the next input. beams: rows a source. received: if it is tracked."""

    length: int
    cells: Cells
    fed: Float[Tensor, "R F"] | None
    history: History | None
    beams: int
    received: Float[Tensor, "R S"] | None = None


class Encoder(nn.Module):
    """Embeds and reads the sources; padding is not read."""

    def __init__(self, spec: RecurrentSpec, sizes: Sizes) -> None:
        super().__init__()
        self.table = _table(sizes.source_vocab, spec.embedding_width, sizes.pad)
        self.dropout = Dropout(spec.dropout)
        self.layers = _layers(spec, spec.embedding_width, spec.bidirectional)
        self.between = Dropout(self.layers.dropout)
        states = 2 if issubclass(spec.cell, nn.LSTM) else 1
        bridges = states * spec.layers if spec.bidirectional else 0
        self.bridges = nn.ModuleList(nn.Linear(2 * spec.width, spec.width) for _ in range(bridges))

    def forward(self, source: Source) -> tuple[Float[Tensor, "B S D"], Cells]:
        """The states of the last layer, 0 at padding, and what each decoder layer starts from."""
        embedded = self.dropout(self.table(source.data))
        lengths = source.valid.sum(1)
        if waiting.forbidden():
            with torch.autocast("cuda", enabled=False):  # see _run
                states, last = read(self.layers, embedded, source.valid)
        else:
            states, last = self._read(embedded, lengths)
        empty = (lengths == 0)[:, None]
        cells = tuple(tuple(each.masked_fill(empty, 0.0) for each in state) for state in self._join(last))
        return states.masked_fill(empty[:, None], 0.0), cells

    def _read(self, embedded: Float[Tensor, "B S E"], lengths: Int[Tensor, "B"]) -> tuple[Float[Tensor, "B S D"], Any]:
        """Of packed rows, which waits for the lengths."""
        some = lengths.clamp(min=1).cpu()  # torch packs no empty row: it reads one token, which is forgotten
        packed = pack_padded_sequence(embedded, some, batch_first=True, enforce_sorted=False)
        mixed = int(packed.batch_sizes[0]) > int(packed.batch_sizes[-1])
        if mixed and _cells.serves(self.layers, packed.data):  # for rows of one length torch has one operation
            states, last = _cells.read(self.layers, packed, self.between)
        else:
            with torch.autocast("cuda", enabled=False):
                states, last = self.layers(packed)
        return pad_packed_sequence(states, batch_first=True, total_length=embedded.shape[1])[0], last

    def _join(self, last: Any) -> Cells:
        """One state a decoder layer; of two directions, a layer of tanh units. last: as torch gives it."""
        parts = last if isinstance(last, tuple) else (last,)
        if self.bridges:  # first those of every layer's h, then those of every layer's c
            bridges = iter(self.bridges)
            pairs = [part.unflatten(0, (-1, 2)).transpose(1, 2).flatten(2) for part in parts]  # of adjacent directions
            parts = [[torch.tanh(next(bridges)(layer)) for layer in pair] for pair in pairs]
        return tuple(zip(*parts, strict=True))


class Recurrent(Seq2SeqModel):
    """See RecurrentSpec."""

    def __init__(self, spec: RecurrentSpec, sizes: Sizes) -> None:
        super().__init__()
        self.target_vocab = sizes.target_vocab
        site = spec.attention.cross
        dims = Dims(query_width=spec.width, key_width=spec.encoder_width, longest_source=sizes.longest_source)
        self.encoder = Encoder(spec, sizes)
        self.table = _table(sizes.target_vocab, spec.embedding_width, sizes.pad)
        self.dropout = Dropout(spec.dropout)
        self.attention = site.build("cross", spec.width, dims, spec.attention_dropout)
        context = self.attention.context_width
        fed = {"none": 0, "attentional": spec.width, "context": context}[spec.input_feeding]
        self.fed_width = context if spec.query == "previous" else fed
        self.decoder = _layers(spec, spec.embedding_width + self.fed_width, bidirectional=False)
        self.between = Dropout(self.decoder.dropout)
        self.attentional = nn.Linear(context + spec.width, spec.width) if spec.readout == "attentional" else None
        read = spec.width + context + spec.embedding_width if spec.readout == "concat" else spec.width
        self.output = nn.Linear(read, sizes.target_vocab)
        self.spec = spec
        self.fertility = None if spec.fertility is None else spec.fertility.build(sizes)
        self.at_once = spec.query == "current" and spec.input_feeding == "none" and not self.attention.keeps_history
        """Whether no step depends on what was attended before, so that all steps of a target can be taken together."""

    @property
    def source_fertility(self) -> Fertility | None:
        return self.fertility

    def encode(self, source: Source, *, need_weights: Wanted = False) -> RecurrentMemory:
        states, initial = self.encoder(source)
        cross = self.attention.memorize(states, source.valid, need_weights=bool(need_weights))
        if self.fertility is not None:
            cross = cross._replace(fertility=endow(self.fertility(source), source.valid))
        return RecurrentMemory(initial, cross)

    def decode(
        self,
        memory: RecurrentMemory,
        target_in: Int[Tensor, "B T"],
        *,
        valid: Bool[Tensor, "B T"] | None = None,
        need_weights: bool = False,
    ) -> Decoded:
        require_same_shape(valid, target_in)
        embedded = self.dropout(self.table(target_in))
        if self.at_once:
            states, _ = self._run(embedded, None, memory.initial)
            positions = _positions(torch.arange(target_in.shape[1], device=embedded.device), memory.cross)
            output = self.attention(states, memory.cross, positions, need_weights=need_weights)
            hidden, weights = self._read(states, output.context, embedded), output.weights
        else:
            state, run = self._start(memory), self._choose_run(embedded)
            cross = self._gather(memory.cross)
            parts, maps = [], []
            for word in embedded.split(1, dim=1):  # slices would each have a gradient as large as the whole
                part, state, each = self._advance(cross, state, word, need_weights, run)
                parts.append(part)
                maps.append(each)
            hidden = torch.cat(parts, 1)
            weights = None if not maps or maps[0] is None else torch.cat(maps, 2)
        if not need_weights:
            return Decoded(hidden)
        return Decoded(hidden, {"cross": [] if weights is None else [weights]})

    def logits(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        return self.output(hidden)

    def start(self, memory: RecurrentMemory, capacity: int, *, track: bool = False) -> RecurrentState:
        state = self._start(memory)
        like = state.cells[0][0]
        return state._replace(received=like.new_zeros(len(like), 1)) if track else state

    def step(
        self, memory: RecurrentMemory, state: RecurrentState, token: Int[Tensor, "R"]
    ) -> tuple[Float[Tensor, "R V"], RecurrentState]:
        embedded = self.dropout(self.table(token[:, None]))
        before = state.received
        hidden, state, weights = self._advance(memory.cross, state, embedded, before is not None, self._run)
        return self.logits(hidden[:, 0]), state._replace(received=receive(before, [] if weights is None else [weights]))

    def _start(self, memory: RecurrentMemory) -> RecurrentState:
        cells, feeds = memory.initial, self.spec.input_feeding != "none"
        like = cells[0][0]
        fed = like.new_zeros(len(like), self.fed_width) if feeds else None
        return RecurrentState(0, cells, fed, None, beams=1)

    def _advance(
        self, cross: Memory, state: RecurrentState, embedded: Float[Tensor, "R 1 E"], need_weights: bool, run: Run
    ) -> tuple[Float[Tensor, "R 1 D"], RecurrentState, Tensor | None]:
        """One token more: what is read out, the next state, and the weights if they are wanted."""
        at = torch.full((state.beams,), state.length, device=embedded.device)
        positions = _positions(at, cross)

        def attend(query: Float[Tensor, "R W"]) -> tuple[Float[Tensor, "R 1 C"], Any]:
            folded = query.view(-1, state.beams, query.shape[-1])
            output = self.attention(folded, cross, positions, history=state.history, need_weights=need_weights)
            return output.context.reshape(query.shape[0], 1, output.context.shape[-1]), output

        if self.spec.query == "previous":
            context, output = attend(state.cells[-1][0])
            states, cells = run(embedded, context[:, 0], state.cells)
        else:
            states, cells = run(embedded, state.fed, state.cells)
            context, output = attend(states[:, 0])
        hidden = self._read(states, context, embedded)
        fed = {"none": None, "attentional": hidden, "context": context}[self.spec.input_feeding]
        fed = None if fed is None else fed[:, 0]
        return hidden, RecurrentState(state.length + 1, cells, fed, output.history, state.beams), output.weights

    def _run(
        self, embedded: Float[Tensor, "R T E"], fed: Float[Tensor, "R F"] | None, cells: Cells
    ) -> tuple[Float[Tensor, "R T W"], Cells]:
        """Steps of torch's layers, of which only one can be fed. On a GPU in float32 under autocast, too: that gives
        cuDNN float16 whatever it is asked for, and small gradients vanish."""
        inputs = embedded if fed is None else torch.cat([embedded, fed[:, None].to(embedded.dtype)], -1)
        before = tuple(torch.stack(parts).to(inputs.dtype) for parts in zip(*cells, strict=True))
        with torch.autocast("cuda", enabled=False):
            states, after = self.decoder(inputs, before[0] if len(before) == 1 else before)
        return states, tuple(zip(*(after if len(before) > 1 else (after,)), strict=True))

    def _gather(self, cross: Memory) -> Memory:
        """The same for the steps of one target: no step makes gradients as large as keys and values, unless somebody
        looks at what attention takes. In float32 at least, as scores want keys, once."""
        if native.is_off_here() or cross.values.device.type != "cpu":
            return cross
        if any(map(hooks.are_on, self.attention.modules())):
            return cross

        def once(held: Tensor) -> Tensor:
            if not torch.is_grad_enabled() or not held.requires_grad or not native.readable(held):
                return held
            return gathered(held.float() if held.dtype.itemsize < 4 else held)

        return cross._replace(keys=None if cross.keys is None else once(cross.keys), values=once(cross.values))

    def _choose_run(self, embedded: Float[Tensor, "R T E"]) -> Run:
        """What makes the steps of one target, in turn."""
        if not _cells.serves(self.decoder, embedded):
            return self._run
        steps = _cells.Steps(self.decoder, embedded, self.between)

        def run(_: Tensor, fed: Float[Tensor, "R F"] | None, cells: Cells) -> tuple[Float[Tensor, "R 1 W"], Cells]:
            after = steps(fed, cells)
            return after[-1][0][:, None], after

        return run

    def _read(self, states: Tensor, context: Tensor, embedded: Tensor) -> Float[Tensor, "R T D"]:
        if self.attentional is not None:
            return self.dropout(torch.tanh(self.attentional(torch.cat([context.to(states.dtype), states], -1))))
        if self.spec.readout == "concat":
            return torch.cat([states, context.to(states.dtype), embedded.to(states.dtype)], -1)
        return states


def _table(rows: int, width: int, pad: int) -> nn.Embedding:
    """Uniform in [-0.1, 0.1] (Luong et al. 2015, section 4.1); PAD is zero."""
    table = nn.Embedding(rows, width, padding_idx=pad)
    nn.init.uniform_(table.weight, -0.1, 0.1)
    with torch.no_grad():
        table.weight[pad].zero_()
    return table


def _layers(spec: RecurrentSpec, inputs: int, bidirectional: bool) -> nn.RNNBase:
    dropout = spec.dropout if spec.layers > 1 else 0.0
    build: Any = spec.cell  # LSTM and GRU take the same arguments; their base declares none
    return build(inputs, spec.width, spec.layers, batch_first=True, dropout=dropout, bidirectional=bidirectional)


def _positions(queries: Int[Tensor, "Q"], memory: Memory) -> Positions:
    return Positions(queries, torch.arange(memory.values.shape[2], device=queries.device))
