"""A step of a ConvS2S's decoder in compiled code (_convs2s_step.cpp), in few calls: with few rows those of torch
operations take longer than what they compute.

The definition is in convs2s.py. An attention that _few.cpp does not know is asked between two calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from attnbench.attention.modules.base import Attention
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.modules.single_head import SingleHead
from attnbench.attention.types import Memory
from attnbench.core import hooks, native, packed
from attnbench.core.dropout import Dropout
from attnbench.core.packed_steps import Window
from attnbench.models import _decoder_layout as layout
from attnbench.models import _decoder_sources as read
from attnbench.models.layers import Stack, require_positions

_SOURCE = Path(__file__).with_name("_convs2s_step.cpp")
_CONVOLVE, _ATTEND, _FINISH = range(3)
"""Stages of a layer."""


class _Layer(ctypes.Structure):
    _fields_ = (
        ("width", ctypes.c_int64), ("embedding", ctypes.c_int64), ("kernel", ctypes.c_int64),
        ("window", layout.Linear), ("query", layout.Linear), ("context", layout.Linear), ("site", layout.Site),
        ("averages", ctypes.c_int), ("half", ctypes.c_float),
    )  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_int64), ("beams", ctypes.c_int64), ("before", ctypes.c_void_p), ("row", ctypes.c_int64),
        ("source", layout.Held), ("scale", ctypes.c_void_p), ("embedded", ctypes.c_void_p),
        ("window", ctypes.c_void_p), ("states", ctypes.c_void_p), ("gated", ctypes.c_void_p),
        ("both", ctypes.c_void_p), ("asked", ctypes.c_void_p), ("queries", ctypes.c_void_p),
        ("context", ctypes.c_void_p), ("told", ctypes.c_void_p), ("scores", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
    )  # fmt: skip


class _Given(NamedTuple):
    """What compiled code reads. dtypes: of packed weights. packings: what layers hold, and what packs their weights
    there. parameters: of convolutions and embeddings, in place of which others may stand for a call
    (torch.func.functional_call): who holds them, and their names. held: what must live as long."""

    embeddings: layout.Embeddings
    layers: ctypes.Array[_Layer]
    expand: layout.Linear
    contract: layout.Linear
    output: layout.Linear
    dtypes: set[torch.dtype]
    packings: list[tuple[dict[str, Any], Any]]
    parameters: list[tuple[Any, str, Tensor | None]]
    held: list[Any]


class Embedded(Protocol):
    """What embeds (PositionedEmbedding of convs2s.py)."""

    table: nn.Embedding
    positions: nn.Embedding
    dropout: Dropout

    def modules(self) -> Iterator[nn.Module]: ...


class Attended(Protocol):
    """The attention of a layer, with its projections (DecoderAttention of convs2s.py)."""

    averages: bool
    project_query: nn.Linear
    attention: Attention
    project_context: nn.Linear


class Decoder(Protocol):
    """What steps are made of (ConvS2S of convs2s.py)."""

    expand: nn.Linear
    decoder: Stack[Any]
    attention: Stack[Any]
    contract: nn.Linear
    dropout: Dropout
    output: nn.Linear

    @property
    def target_embedding(self) -> Embedded: ...

    def attended(self) -> Sequence[Attended]: ...


def compile_convs2s(model: Decoder, half: float) -> CompiledConvS2S | None:
    """The decoder as it is now, for steps until its weights change; None where code compiled here has not packed these,
    and where a part is in training, has hooks, or is not as convs2s.py makes it. Hooks that come later are not called.

    Its layers and attentions are of the classes of convs2s.py. half: what sums of two terms are multiplied by.
    """
    if torch.is_grad_enabled() or hooks.are_global(hooks.FORWARD):
        return None
    embedding, attended = model.target_embedding, model.attended()
    ends = model.expand, model.contract, model.output
    whole = (embedding, *ends, model.dropout, model.decoder, model.attention)
    parts = [each for part in whole for each in part.modules()]
    needed = [*ends, *(each for pair in zip(model.decoder, attended, strict=True) for each in _products(*pair))]
    for each in attended:
        if type(each.attention) is MultiHead:
            needed += [each.attention.project_query, each.attention.project_context]
    weights = {each: found for each in needed if (found := packed.compiled(each)) is not None}
    if len(weights) < len(set(needed)) or not all(map(layout.is_bare, parts)) or native.load(_SOURCE) is None:
        return None
    dropouts = (embedding.dropout, model.dropout, *(each.dropout for each in model.decoder))
    if any(type(each) is not Dropout for each in dropouts):
        return None
    tables = embedding.table, embedding.positions
    if any(type(each) is not nn.Embedding or each.max_norm is not None for each in tables):
        return None
    if not layout.fit(*(each.weight for each in tables)):
        return None
    if not _fits(model, attended, weights):
        return None
    held: list[Any] = [weights]
    sites = {each: layout.site(each, weights, held) for each in {of.attention for of in attended}}
    layers = []
    for convolution, of in zip(model.decoder, attended, strict=True):
        kernel, width = convolution.span
        window, query, context = (layout.linear(weights[each]) for each in _products(convolution, of))
        site, _ = sites[of.attention]
        layers.append(
            _Layer(width, embedding.table.embedding_dim, kernel, window, query, context, site, of.averages, half)
        )
    expand, contract, output = (layout.linear(weights[each]) for each in ends)
    given = _Given(
        layout.embeddings(embedding.table, embedding.positions.weight, 1.0, held), (_Layer * len(layers))(*layers),
        expand, contract, output, {each.weight.dtype for each in weights.values()},
        [(vars(each), vars(each)["forward"]) for each in weights],
        [(each._parameters, name, own) for each in (*model.decoder, *tables) for name, own in each._parameters.items()],
        held,
    )  # fmt: skip
    known = [(of.attention, sites[of.attention][1]) for of in attended]
    return CompiledConvS2S(embedding.positions.num_embeddings, known, given)


def _fits(model: Decoder, attended: Sequence[Attended], weights: layout.Weights) -> bool:
    """Whether all widths are those of embeddings and of the first convolution, as compiled code takes them to be."""
    embedding, (kernel, width) = model.target_embedding.table.embedding_dim, next(iter(model.decoder)).span
    wanted = {model.expand: (width, embedding), model.contract: (embedding, width)}
    wanted[model.output] = (weights[model.output].weight.outputs, embedding)
    for convolution, of in zip(model.decoder, attended, strict=True):
        attention = of.attention
        wanted[convolution] = (2 * width, kernel * width)
        wanted[of.project_query], wanted[of.project_context] = (embedding, width), (width, attention.context_width)
        if type(attention) is MultiHead:
            wanted[attention.project_query] = wanted[attention.project_context] = (embedding, embedding)
        if type(attention) in (MultiHead, SingleHead) and attention.context_width != embedding:
            return False
    if any((weights[each].weight.outputs, weights[each].weight.inputs) != size for each, size in wanted.items()):
        return False
    return model.target_embedding.positions.embedding_dim == embedding


def _products(convolution: Window, of: Attended) -> tuple[nn.Module, nn.Module, nn.Module]:
    """What multiplies in a layer, but for the attention itself."""
    return convolution, of.project_query, of.project_context


class CompiledConvS2S(layout.Addresses):
    """A decoder with the weights that it has packed now: see `compile_convs2s`."""

    def __init__(self, max_length: int, sites: Sequence[tuple[Attention, bool]], given: _Given) -> None:
        """sites: the attention of each layer, and whether compiled code knows it."""
        self._max_length, self._sites, self._given = max_length, sites, given

    def step(
        self,
        token: Int[Tensor, "R"],
        at: int,
        memories: Sequence[Memory],
        scale: Float[Tensor, "B 1 1"],
        inputs: Sequence[Float[Tensor, "R N C"]],
        beams: int,
    ) -> tuple[Float[Tensor, "R V"], tuple[Float[Tensor, "R N C"], ...]] | None:
        """The logits after one more token a row, which stands at position `at`, and the last inputs of each layer with
        it; None where that is left to the definition.

        memories: of each layer, R / `beams` rows, one a source. scale: of contexts that are means. inputs: of each
        layer, the last ones before. Raises IndexError for a token that has no embedding, AttnbenchError past the last
        position.
        """
        if not self._serves(token, memories, scale, inputs, beams):
            return None
        require_positions(at + 1, self._max_length)
        token, rows, given = token.contiguous(), len(token), self._given
        picked = read.of_sources(self._sites, at, memories, beams)
        keys = max(*(each.values.shape[2] for each in memories), read.most_listed(picked))
        kernel, width = given.layers[0].kernel, given.layers[0].width
        windows = torch.empty(len(inputs), rows, kernel, width, dtype=torch.float32, device="cpu")
        room = _Room(rows, given, keys)
        library: Any = native.loaded(_SOURCE)
        if library.attnbench_convs2s_embed(
            ctypes.byref(given.embeddings), ctypes.byref(given.expand), native.at(token), ctypes.c_int64(rows),
            ctypes.c_int64(at), room.at("embedded"), room.at("states"), torch.get_num_threads(),
        ):  # fmt: skip
            raise IndexError(f"a token has no row among the {given.embeddings.count} embeddings")
        steps = (_Step * len(inputs))(*(
            room.step(beams, before, read.held_of_source(memory, own), scale, window)
            for before, memory, own, window in zip(inputs, memories, picked, windows, strict=True)
        ))  # fmt: skip
        if None not in picked:
            _run(given.layers, steps)
        else:
            for place, (attention, _) in enumerate(self._sites):
                layer, step, first, memory = given.layers[place], steps[place], _CONVOLVE, memories[place]
                if picked[place] is None:
                    _run(layer, step, first, _CONVOLVE)
                    _, positions = read.step_positions(at, beams, memory.values.shape[2], token.device)
                    received = read.received(attention, room.part("queries"), beams, memory, positions)
                    if received.shape != (rows // beams, beams, layer.context.weight.inputs):
                        return None
                    step.context, first = received.data_ptr(), _FINISH
                _run(layer, step, first, _FINISH)
        logits = windows.new_empty(rows, given.output.weight.outputs)
        library.attnbench_convs2s_logits(
            ctypes.byref(given.contract), ctypes.byref(given.output), room.at("states"), ctypes.c_int64(rows),
            room.at("asked"), native.at(logits), torch.get_num_threads(),
        )  # fmt: skip
        return logits, tuple(window[:, 1:] for window in windows)

    def _serves(
        self, token: Tensor, memories: Sequence[Memory], scale: Tensor, inputs: Sequence[Tensor], beams: int
    ) -> bool:
        given = self._given
        if torch.is_grad_enabled() or not all(map(packed.serves, given.dtypes)) or native.load(_SOURCE) is None:
            return False
        if any(held.get("forward") is not packing for held, packing in given.packings):  # a block of `packed` has ended
            return False
        if any(held.get(name) is not own for held, name, own in given.parameters) or not read.fits(token, beams):
            return False
        rows, (kernel, width) = len(token), (given.layers[0].kernel, given.layers[0].width)
        if scale.shape != (rows // beams, 1, 1) or not layout.fit(scale) or not scale.is_contiguous():
            return False
        for (attention, known), memory, before in zip(self._sites, memories, inputs, strict=True):
            if before.shape != (rows, kernel - 1, width) or (kernel > 1 and not _side_by_side(before)):
                return False
            if len(memory.values) != rows // beams or (known and not read.holds(memory, attention, rows // beams)):
                return False
        return True


def _side_by_side(inputs: Float[Tensor, "R N C"]) -> bool:
    """Whether compiled code can read them: those of a row, one after the other."""
    return layout.fit(inputs) and (inputs.shape[1] == 1 or inputs.stride(1) == inputs.shape[2])


class _Room:
    """What the layers of one step write to, one after the other."""

    def __init__(self, rows: int, given: _Given, keys: int) -> None:
        """keys: the most that a query attends."""
        layers = given.layers
        width, embedding = layers[0].width, layers[0].embedding
        heads, wide = max(each.site.heads for each in layers), max(each.context.weight.inputs for each in layers)
        sizes = {
            "states": width, "gated": width, "both": 2 * width, "embedded": embedding, "asked": embedding,
            "queries": embedding, "context": wide, "told": wide, "scores": heads * keys, "weights": heads * keys,
        }  # fmt: skip
        buffer = torch.empty(rows * sum(sizes.values()), dtype=torch.float32, device="cpu")
        self.rows = rows
        self.parts = dict(zip(sizes, buffer.split([rows * size for size in sizes.values()]), strict=True))

    def part(self, name: str) -> Float[Tensor, "R N"]:
        return self.parts[name].view(self.rows, -1)

    def at(self, name: str) -> ctypes.c_void_p:
        return native.at(self.parts[name])

    def step(
        self, beams: int, before: Float[Tensor, "R N C"], source: layout.Held, scale: Float[Tensor, "B 1 1"],
        window: Float[Tensor, "R W C"],
    ) -> _Step:  # fmt: skip
        """All must live as long. window: all that the layer sees, which is written."""
        names = "states", "gated", "both", "asked", "queries", "context", "told", "scores", "weights"
        return _Step(
            self.rows, beams, before.data_ptr(), before.stride(0), source, scale.data_ptr(), self.at("embedded"),
            window.data_ptr(), *map(self.at, names),
        )  # fmt: skip


def _run(layers: Any, steps: Any, first: int = _CONVOLVE, last: int = _FINISH) -> None:
    """Stages of layers, or of one."""
    run: Any = native.loaded(_SOURCE).attnbench_convs2s_layers
    count = ctypes.c_int64(len(steps) if isinstance(steps, ctypes.Array) else 1)
    if run(ctypes.byref(layers), ctypes.byref(steps), count, first, last, torch.get_num_threads()):
        raise MemoryError("no memory for a step of the decoder")
