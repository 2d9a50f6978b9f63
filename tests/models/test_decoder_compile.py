"""Which decoders are compiled, and what compiled code reads then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from attnbench.attention.modules.multihead import MultiHead
from attnbench.core.dropout import Dropout
from attnbench.core.packed import pack
from attnbench.models.decoder_compile import compile_decoder
from attnbench.models.decoder_step import CompiledDecoder
from attnbench.models.transformer import DecoderLayer, Transformer

WORDS = 19  # of the fixtures

pytestmark = pytest.mark.usefixtures("compiled_products")


def compiled(model: Transformer) -> CompiledDecoder | None:
    return compile_decoder(model.target_embedding, list(model.decoder), model.decoder_norm, model.output)


class _Other(MultiHead):
    pass


def _another_attention(model: Transformer) -> None:
    model.decoder[1].attention.__class__ = _Other


def _hooked(model: Transformer) -> None:
    model.decoder[0].cross.register_forward_hook(lambda *given: None)


def _in_training(model: Transformer) -> None:
    model.decoder[0].cross_residual.dropout.train()


def _other_norm(model: Transformer) -> None:
    model.decoder[0].cross_residual.norm = nn.LayerNorm(24, bias=False).eval()


def _replaced(model: Transformer) -> None:
    model.decoder[0].feed_forward.forward = lambda states: states


def _one_weight_less(model: Transformer) -> None:
    del model.decoder[1].feed_forward.expand.forward


def _logits_as_they_are(model: Transformer) -> None:
    del model.output.forward


def _bounded_embeddings(model: Transformer) -> None:
    model.target_embedding.table.max_norm = 1.0


class _OtherDropout(Dropout):
    pass


def _other_dropout(model: Transformer) -> None:
    model.decoder[0].feed_forward.dropout.__class__ = _OtherDropout


def _norms_in_two_places(model: Transformer) -> None:
    model.decoder[1].cross_residual.before = True


def _own_step(model: Transformer) -> None:
    model.decoder[0].step = lambda *given: None


def _wrapped_output(model: Transformer) -> None:
    model.output = nn.Sequential(model.output)


def _wrapped_projection(model: Transformer) -> None:
    model.decoder[0].attention.project_query = nn.Sequential(model.decoder[0].attention.project_query)


def _wrapped_block(model: Transformer) -> None:
    model.decoder[0].feed_forward.expand = nn.Sequential(model.decoder[0].feed_forward.expand)


def _a_last_norm(model: Transformer) -> None:
    model.decoder_norm = nn.RMSNorm(24).eval()


@pytest.mark.parametrize(
    "change",
    [
        _another_attention,
        _hooked,
        _in_training,
        _other_norm,
        _replaced,
        _one_weight_less,
        _logits_as_they_are,
        _bounded_embeddings,
        _other_dropout,
        _norms_in_two_places,
        _own_step,
        _wrapped_output,
        _wrapped_projection,
        _wrapped_block,
        _a_last_norm,
    ],
    ids=lambda f: f.__name__,
)
@torch.no_grad()
def test_what_is_out_of_the_ordinary_is_left_to_the_definition(change, built):
    model = built()
    pack(model)
    assert compiled(model) is not None
    change(model)
    assert compiled(model) is None


@torch.no_grad()
def test_hooks_of_all_modules_are_called(built):
    model = built()
    pack(model)
    hook = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        assert compiled(model) is None
    finally:
        hook.remove()
    assert compiled(model) is not None


class _Colder(Transformer):
    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(hidden) / 2


class _OtherLayer(DecoderLayer):
    pass


@torch.no_grad()
def test_a_subclass_decodes_as_it_says(built, source):
    model, other, token = built(), built(), torch.tensor([3, 4, 5])
    model.__class__, other.decoder[1].__class__ = _Colder, _OtherLayer
    found = []
    for each in (model, other):
        pack(each)
        memory = each.encode(source)
        state = each.start(memory, 2)
        assert state.compiled is None
        found.append(each.step(memory, state, token)[0])
    torch.testing.assert_close(found[0], found[1] / 2)


@torch.no_grad()
def test_numbers_live_as_long_as_what_reads_them(built, source):
    """Replaced parts are not freed under compiled code."""
    model = built(norm="pre")
    pack(model)
    memory = model.encode(source)
    state = model.start(memory, 2)
    token = torch.tensor([3, 4, 5])
    assert state.compiled is not None
    first = state.compiled.step(token, 0, memory.cross, state.caches, 1)
    model.target_embedding.table = nn.Embedding(WORDS, 24)
    for layer in model.decoder:
        for each in (layer.attention_residual, layer.cross_residual, layer.feed_forward_residual):
            each.norm.weight = nn.Parameter(torch.zeros(24))
            each.norm.bias = nn.Parameter(torch.zeros(24))
    spoilt = [torch.full((WORDS, 24), torch.nan), *(torch.full((24,), torch.nan) for _ in range(64))]
    again = state.compiled.step(token, 0, memory.cross, state.caches, 1)
    assert first is not None
    assert again is not None
    assert torch.equal(first[0], again[0])
    del spoilt  # till here it lay where freed numbers had lain


@torch.no_grad()
def test_whatever_the_default_type_and_device(built, source):
    model = built()
    pack(model)
    memory = model.encode(source)
    token = torch.tensor([3, 4, 5])
    wanted, _ = model.step(memory, model.start(memory, 2), token)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            made = compiled(model)
    finally:
        torch.set_default_dtype(before)
    assert made is not None
    found = made.step(token, 0, memory.cross, model.start(memory, 2).caches, 1)
    assert found is not None
    assert torch.equal(found[0], wanted)


def test_where_nothing_is_packed_and_with_gradients_the_definition_serves(built, source):
    model = built()
    assert compiled(model) is None
    pack(model)
    assert compiled(model) is None  # gradients may be asked for
    with torch.no_grad():
        memory = model.encode(source)
        state = model.start(memory, 2)
        assert state.compiled is not None
    logits, _ = model.step(memory, state, torch.tensor([3, 4, 5]))
    logits.sum().backward()
    assert model.decoder[0].feed_forward.expand.weight.grad is not None
