"""Compiled steps of a decoder are the steps of its definition; tests/conformance steps every mechanism through them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.attention.backends import few
from attnbench.attention.modules.multihead import MultiHead
from attnbench.core import native, packed
from attnbench.core.dropout import Dropout
from attnbench.core.errors import AttnbenchError
from attnbench.core.packed import pack
from attnbench.core.quantization import Quantized
from attnbench.core.tree import select_batch
from attnbench.models import decoder_step
from attnbench.models.base import Sizes, Source
from attnbench.models.transformer import DecoderLayer, Transformer, TransformerSpec

WORDS, LENGTHS = 19, (6, 1, 4)

pytestmark = pytest.mark.skipif(
    native.engine() is None or not packed._own_packs(torch.float32),
    reason="no C++ compiler, or its products are not exact: the definition serves",
)


def built(**raw: Any) -> Transformer:
    torch.manual_seed(2)
    small = {"layers": 2, "width": 24, "heads": 3, "ffn": 40, "dropout": 0.1, "tie": "none"}
    model = TransformerSpec.model_validate({**small, **raw}).build(Sizes(WORDS, WORDS, False, longest_source=9))
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(autouse=True)
def _own(monkeypatch):
    """Whatever is faster on this machine."""
    monkeypatch.setattr(packed, "_way", lambda dtype: packed._Own)


def compiled(model: Transformer) -> decoder_step.CompiledDecoder | None:
    return decoder_step.compile_decoder(model.target_embedding, list(model.decoder), model.decoder_norm, model.output)


def source() -> Source:
    valid = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return Source(torch.randint(3, WORDS, valid.shape, generator=torch.Generator().manual_seed(5)) * valid, valid)


def stepped(model: Transformer, beams: int, *, compiled: bool, steps: int = 6, rows: Tensor | None = None) -> Tensor:
    """Logits of all steps, each by compiled code or none; halfway rows change places."""
    prefixes = torch.randint(3, WORDS, (len(LENGTHS) * beams, steps), generator=torch.Generator().manual_seed(6))
    found = []
    with torch.no_grad(), nullcontext() if compiled else native.off():
        memory = model.encode(source())
        state = model.widen(model.start(memory, steps), beams)
        assert (state.compiled is not None) == compiled
        for at in range(steps):
            made, before = state.compiled, state.caches
            logits, state = model.step(memory, state, prefixes[:, at])
            found.append(logits)
            if made is not None:  # the same step again, without a way out
                again = made.step(prefixes[:, at], at, memory.cross, before, beams)
                assert again is not None
                assert torch.equal(again[0], logits)
            if at == 2 and rows is not None:
                state = model.reorder(state, rows, 0)
    return torch.stack(found)


SITES: dict[str, Any] = {
    "softmax": {},
    "top-k": {"default": {"transform": {"kind": "topk", "k": 2}}},
    "top-k of more than there are": {"default": {"transform": {"kind": "topk", "k": 100}}},
    "sparse in training": {"default": {"transform": "sparsemax", "sparsify": "train"}},
    "learned alpha": {"default": {"transform": {"kind": "entmax", "alpha": "learned"}}},
    "window": {"decoder_self": {"pattern": "window", "budget": 3}},
    "dilated": {"decoder_self": {"pattern": "dilated", "budget": 3}},
    "listed keys": {"decoder_self": {"pattern": "bigbird", "budget": 4}},
    "drawn keys": {"default": {"pattern": "random", "budget": 3}},
    "more drawn than there are": {"default": {"pattern": "random", "budget": 40, "transform": "sparsemax"}},
    "gates": {"cross": {"transform": "sigmoid"}},
    "additive over the source": {"cross": {"score": "additive"}},
    "no projections": {"cross": {"module": "single_head"}},
    "slots": {"cross": {"module": {"kind": "fixed_memory", "slots": 3}}},
    "dense": {"default": {"backend": "dense"}},
}


@pytest.mark.parametrize("shape", [{}, {"norm": "pre"}, {"shared_norm": True, "decoder_layers": 3}], ids=str)
@pytest.mark.parametrize("name", SITES)
def test_the_definition(name, shape):
    model = built(attention=SITES[name], **shape)
    wanted = stepped(model, 1, compiled=False)
    pack(model)
    torch.testing.assert_close(stepped(model, 1, compiled=True), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beams", [2, few.MOST, few.MOST + 1])
@pytest.mark.parametrize("name", ["softmax", "learned alpha", "listed keys", "drawn keys", "slots"])
def test_beams(name, beams):
    model = built(attention=SITES[name])
    rows = torch.randint(0, beams, (len(LENGTHS), beams)) + beams * torch.arange(len(LENGTHS))[:, None]
    wanted = stepped(model, beams, compiled=False, rows=rows.flatten())
    pack(model)
    torch.testing.assert_close(stepped(model, beams, compiled=True, rows=rows.flatten()), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not packed._own_packs(torch.int8), reason="this processor has no products of 8 bits here")
def test_whole_numbers_of_8_bits(monkeypatch):
    """Beside the definition, which rounds the same numbers but where a last digit of float32 decides."""
    model, other = built(), built()
    pack(model, "int8")
    monkeypatch.setattr(packed, "_way", lambda dtype: packed._Defined)
    pack(other, "int8")
    assert isinstance(other.output.forward.product.weight, Quantized)
    found, wanted = stepped(model, 2, compiled=True), stepped(other, 2, compiled=False)
    assert (found - wanted).norm() < 1e-2 * wanted.norm()


@pytest.mark.parametrize("shape", [(48, 3, 96), (36, 3, 52), (20, 2, 28)], ids=str)
@pytest.mark.parametrize("beams", [1, 2])
def test_a_row_is_the_same_whatever_stands_beside_it(beams, shape):
    width, heads, inner = shape
    model = built(width=width, heads=heads, ffn=inner)
    pack(model)
    with torch.no_grad():
        memory = model.encode(source())
        together = model.widen(model.start(memory, 3), beams)
        row = torch.arange(beams) + beams  # of the second source
        alone_memory, alone = select_batch(memory, torch.tensor([1])), select_batch(together, row)
        for token in (1, 5, 7):
            logits, together = model.step(memory, together, torch.full((len(LENGTHS) * beams,), token))
            found, alone = model.step(alone_memory, alone, torch.full((beams,), token))
            assert torch.equal(found, logits[row])


def test_what_is_no_number_spoils_its_own_row():
    model = built()
    pack(model)
    with torch.no_grad():
        memory = model.encode(source())
        for each in memory.cross:
            each.values[1] = torch.nan
        logits, _ = model.step(memory, model.start(memory, 2), torch.tensor([3, 4, 5]))
    assert logits.isnan().any(1).tolist() == [False, True, False]


def test_a_full_cache_is_an_error():
    model = built()
    pack(model)
    with torch.no_grad():
        memory = model.encode(source())
        state = model.start(memory, 1)
        _, state = model.step(memory, state, torch.tensor([3, 4, 5]))
        assert state.compiled is not None
        with pytest.raises(ValueError, match="holds 1 positions; 2"):
            model.step(memory, state, torch.tensor([3, 4, 5]))


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


def _heads_of_another_width(model: Transformer) -> None:
    model.decoder[0].cross.heads = 6


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
        _heads_of_another_width,
        _own_step,
        _wrapped_output,
        _wrapped_projection,
        _wrapped_block,
        _a_last_norm,
    ],
    ids=lambda f: f.__name__,
)
@torch.no_grad()
def test_what_is_out_of_the_ordinary_is_left_to_the_definition(change):
    model = built()
    pack(model)
    assert compiled(model) is not None
    change(model)
    assert compiled(model) is None


@torch.no_grad()
def test_hooks_of_all_modules_are_called():
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
def test_a_subclass_decodes_as_it_says():
    model, other, token = built(), built(), torch.tensor([3, 4, 5])
    model.__class__, other.decoder[1].__class__ = _Colder, _OtherLayer
    found = []
    for each in (model, other):
        pack(each)
        memory = each.encode(source())
        state = each.start(memory, 2)
        assert state.compiled is None
        found.append(each.step(memory, state, token)[0])
    torch.testing.assert_close(found[0], found[1] / 2)


@torch.no_grad()
def test_a_state_outlives_the_block_in_which_weights_are_packed():
    model = built()
    with packed.packed(model):
        memory = model.encode(source())
        state = model.start(memory, 2)
        assert state.compiled is not None
    model.output.weight.data.zero_()
    logits, _ = model.step(memory, state, torch.tensor([3, 4, 5]))
    assert not logits.any()


@torch.no_grad()
def test_a_block_within_a_block_ends():
    """The output is packed still, other layers are not."""
    model = built()
    with packed.packed(model.output):
        with packed.packed(model):
            memory = model.encode(source())
            state = model.start(memory, 2)
            assert state.compiled is not None
        assert state.compiled.step(torch.tensor([3, 4, 5]), 0, memory.cross, state.caches, 1) is None


@torch.no_grad()
def test_keys_drawn_of_a_source_with_holes():
    model = built(attention=SITES["drawn keys"])
    pack(model)
    given, found = source(), []
    holes = Source(given.data, given.valid.roll(1, 1))
    for compiled in (True, False):
        with nullcontext() if compiled else native.off():
            memory = model.encode(holes)
            state = model.start(memory, 2)
            assert (state.compiled is not None) == compiled
            found.append(model.step(memory, state, torch.tensor([3, 4, 5]))[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_numbers_live_as_long_as_what_reads_them():
    """Replaced parts are not freed under compiled code."""
    model = built(norm="pre")
    pack(model)
    memory = model.encode(source())
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


@pytest.mark.parametrize(
    "what", ["tokens", "tokens of two columns", "caches", "position", "sources", "mask", "mask of numbers"]
)
@torch.no_grad()
def test_rows_that_do_not_fit_are_left_to_the_definition(what):
    """Which says so, where compiled code would read what is not there."""
    model = built()
    pack(model)
    memory = model.encode(source())
    state = model.start(memory, 2)
    assert state.compiled is not None
    token, cross, caches = torch.tensor([3, 4, 5]), memory.cross, state.caches
    valid = cross[0].valid
    assert valid is not None
    if what == "tokens":
        token = torch.tensor([3, 4, 5, 6, 7])
    elif what == "tokens of two columns":
        token = torch.tensor([[3, 4], [4, 5], [5, 6]])
    elif what == "position":
        state = state._replace(length=1)
    elif what == "caches":
        caches = select_batch(caches, torch.tensor([0, 1]))
    elif what == "sources":
        cross = select_batch(cross, torch.tensor([0, 1]))
    elif what == "mask":
        cross = tuple(each._replace(valid=valid[:, :-1]) for each in cross)
    else:
        cross = tuple(each._replace(valid=valid.long()) for each in cross)
    assert state.compiled is not None
    assert state.compiled.step(token, state.length, cross, caches, 1) is None
    if what != "position":  # the definition attends what there is
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            model.step(memory._replace(cross=cross), state._replace(caches=caches), token)


@torch.no_grad()
def test_whatever_the_default_type_and_device():
    model = built()
    pack(model)
    memory = model.encode(source())
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


@pytest.mark.parametrize("threads", [1, 3])
@torch.no_grad()
def test_threads_change_nothing(threads):
    """Wide enough that each loop is shared out."""
    model = built(width=264, heads=3, ffn=520)
    pack(model)
    found, before = [], torch.get_num_threads()
    many = Source(*(each.repeat(8, 1) for each in (source().data, source().valid)))
    token = torch.randint(3, WORDS, (240,), generator=torch.Generator().manual_seed(1))
    memory = model.encode(many)
    try:
        for count in (2, threads):
            torch.set_num_threads(count)
            state = model.widen(model.start(memory, 2), 10)
            _, state = model.step(memory, state, token)
            assert state.compiled is not None
            found.append(model.step(memory, state, token)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.skipif(not packed._own_packs(torch.bfloat16), reason="this processor does not multiply bfloat16")
def test_bfloat16():
    model = built()
    wanted = stepped(model, 2, compiled=False)
    with torch.autocast("cpu", torch.bfloat16):
        pack(model)
        found = stepped(model, 2, compiled=True)
    assert (found - wanted).norm() < 3e-2 * wanted.norm()


def test_where_nothing_is_packed_and_with_gradients_the_definition_serves():
    model = built()
    assert compiled(model) is None
    pack(model)
    assert compiled(model) is None  # gradients may be asked for
    with torch.no_grad():
        memory = model.encode(source())
        state = model.start(memory, 2)
        assert state.compiled is not None
    logits, _ = model.step(memory, state, torch.tensor([3, 4, 5]))
    logits.sum().backward()
    assert model.decoder[0].feed_forward.expand.weight.grad is not None


@torch.no_grad()
def test_another_type_under_autocast_is_left_to_the_definition(monkeypatch):
    model = built()
    pack(model)
    memory = model.encode(source())
    state = model.start(memory, 2)
    ran = []
    monkeypatch.setattr(decoder_step, "_run", lambda *given: ran.append(given))
    with torch.autocast("cpu", torch.bfloat16):
        model.step(memory, state, torch.tensor([3, 4, 5]))
    with native.off():
        model.step(memory, model.start(memory, 2)._replace(compiled=state.compiled), torch.tensor([3, 4, 5]))
    assert not ran
    model.step(memory, state, torch.tensor([3, 4, 5]))
    assert len(ran) == 1


@torch.no_grad()
def test_a_mask_that_lies_otherwise_in_memory():
    model = built()
    pack(model)
    given = source()
    turned = Source(given.data, given.valid.t().contiguous().t())
    token = torch.tensor([3, 4, 5])
    logits = [model.step(memory := model.encode(each), model.start(memory, 2), token)[0] for each in (given, turned)]
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize(
    ("name", "calls"),
    [("softmax", 1), ("window", 1), ("listed keys", 1), ("drawn keys", 1), ("slots", 2 * 2), ("dense", 2 * 3)],
)
@torch.no_grad()
def test_calls_of_the_last_step(name, calls, monkeypatch):
    """One, or for each of two layers one more than it has attentions that are not compiled."""
    model = built(attention=SITES[name])
    pack(model)
    ran, run = [], decoder_step._run
    monkeypatch.setattr(decoder_step, "_run", lambda *given: (ran.append(given), run(*given)))
    memory = model.encode(source())
    state = model.start(memory, 8)
    for _ in range(8):
        ran.clear()
        _, state = model.step(memory, state, torch.tensor([3, 4, 5]))
    assert len(ran) == calls


@pytest.mark.parametrize("token", [-1, WORDS])
@torch.no_grad()
def test_a_token_without_an_embedding_is_an_error(token):
    model = built()
    pack(model)
    memory = model.encode(source())
    with pytest.raises(IndexError, match="has no row among the 19"):
        model.step(memory, model.start(memory, 2), torch.tensor([3, token, 5]))


@torch.no_grad()
def test_a_position_beyond_the_last_is_an_error():
    model = built(max_length=6)
    pack(model)
    memory = model.encode(source())
    state = model.start(memory, 7)
    for _ in range(6):
        _, state = model.step(memory, state, torch.tensor([3, 4, 5]))
    with pytest.raises(AttnbenchError, match="max_length"):
        model.step(memory, state, torch.tensor([3, 4, 5]))


@pytest.mark.parametrize("raw", [
    {"positions": "learned", "max_length": 9},
    {"tie": "decoder", "output_bias": True},
    {"norm": "pre", "tie": "decoder"},
], ids=str)  # fmt: skip
def test_embeddings_and_outputs(raw):
    model = built(**raw)
    wanted = stepped(model, 1, compiled=False)
    pack(model)
    torch.testing.assert_close(stepped(model, 1, compiled=True), wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_tokens_that_lie_apart_are_read_as_well(monkeypatch):
    """As those of a beam of one source do."""
    model = built()
    pack(model)
    ran, run = [], decoder_step._run
    monkeypatch.setattr(decoder_step, "_run", lambda *given: (ran.append(given), run(*given)))
    memory = model.encode(source())
    apart = torch.tensor([[3, 9], [4, 9], [5, 9]])[:, 0]
    logits = [model.step(memory, model.start(memory, 2), each)[0] for each in (apart, torch.tensor([3, 4, 5]))]
    assert torch.equal(*logits)
    assert len(ran) == 2
