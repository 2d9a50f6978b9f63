"""Compiled steps of a decoder are the steps of its definition; tests/conformance steps every mechanism through them."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from attnbench.attention import cached
from attnbench.attention.patterns.base import patterns
from attnbench.attention.spec import AttentionSpec
from attnbench.attention.transforms.base import transforms
from attnbench.attention.transforms.topk_oow import TopKOutOfWindowSpec
from attnbench.attention.types import Dims
from attnbench.core import native, packed
from attnbench.core.errors import AttnbenchError
from attnbench.core.packed import pack
from attnbench.core.quantization import Quantized
from attnbench.core.tree import select_batch
from attnbench.models import decoder_step
from attnbench.models.base import Source
from attnbench.models.transformer import Transformer

WORDS, SOURCES = 19, 3  # of the fixtures

pytestmark = pytest.mark.usefixtures("compiled_products")


def stepped(
    source: Source, model: Transformer, beams: int, *, compiled: bool, steps: int = 6, rows: Tensor | None = None
) -> Tensor:
    """Logits of all steps, each by compiled code or none; halfway rows change places."""
    prefixes = torch.randint(3, WORDS, (SOURCES * beams, steps), generator=torch.Generator().manual_seed(6))
    found = []
    with torch.no_grad(), nullcontext() if compiled else native.off():
        memory = model.encode(source)
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
    "gates": {"default": {"transform": "sigmoid"}},
    "top-k, ties by index": {"default": {"transform": {"kind": "topk", "k": 2, "ties": "index"}}},
    "top-k, a part": {"default": {"transform": {"kind": "topk", "ratio": 0.4, "at_least": 2}}},
    "top-k out of window": {"decoder_self": {"transform": {"kind": "topk_oow", "n": 4}}},
    "a window alone": {"decoder_self": {"transform": {"kind": "topk_oow", "n": 4}, "sparsify": "train"}},
    "additive over the source": {"cross": {"score": "additive"}},
    "no projections": {"cross": {"module": "single_head"}},
    "slots": {"cross": {"module": {"kind": "fixed_memory", "slots": 3}}},
    "dense": {"default": {"backend": "dense"}},
}


@pytest.mark.parametrize("shape", [{}, {"norm": "pre"}, {"shared_norm": True, "decoder_layers": 3}], ids=str)
@pytest.mark.parametrize("name", SITES)
def test_the_definition(name, shape, built, source):
    model = built(attention=SITES[name], **shape)
    wanted = stepped(source, model, 1, compiled=False)
    pack(model)
    torch.testing.assert_close(stepped(source, model, 1, compiled=True), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beams", [2, cached.MOST, cached.MOST + 1])
@pytest.mark.parametrize(
    "name", ["softmax", "learned alpha", "listed keys", "drawn keys", "slots", "top-k out of window"]
)
def test_beams(name, beams, built, source):
    model = built(attention=SITES[name])
    rows = torch.randint(0, beams, (SOURCES, beams)) + beams * torch.arange(SOURCES)[:, None]
    wanted = stepped(source, model, beams, compiled=False, rows=rows.flatten())
    pack(model)
    torch.testing.assert_close(
        stepped(source, model, beams, compiled=True, rows=rows.flatten()), wanted, rtol=1e-4, atol=1e-5
    )


@pytest.mark.skipif(not packed._own_packs(torch.int8), reason="this processor has no products of 8 bits here")
def test_whole_numbers_of_8_bits(monkeypatch, built, source):
    """Beside the definition, which rounds the same numbers but where a last digit of float32 decides."""
    model, other = built(), built()
    pack(model, "int8")
    monkeypatch.setattr(packed, "_way", lambda dtype: packed._Defined)
    pack(other, "int8")
    assert isinstance(other.output.forward.product.weight, Quantized)
    found, wanted = stepped(source, model, 2, compiled=True), stepped(source, other, 2, compiled=False)
    assert (found - wanted).norm() < 1e-2 * wanted.norm()


def test_heads_over_the_source_may_be_others(built, source):
    model = built()
    cross = AttentionSpec().site("cross").build("cross", 24, Dims(heads=6, query_width=24, key_width=24), 0.0)
    model.decoder[0].cross = cross.eval()  # beside 3 of its own
    wanted = stepped(source, model, 2, compiled=False)
    pack(model)
    torch.testing.assert_close(stepped(source, model, 2, compiled=True), wanted, rtol=1e-4, atol=1e-5)


class Drawn(TopKOutOfWindowSpec):
    """Keeps keys that are drawn for each head, of which a site asks for the first head's."""

    kind: Literal["drawn"] = "drawn"

    def keep(self, role):
        return patterns.parse({"kind": "random", "n": 2})

    def fused(self, built):
        return super().fused(built)


def test_keys_that_are_kept_are_those_of_the_definition(monkeypatch, built, source):
    monkeypatch.setattr(transforms, "_members", {**transforms._members, "drawn": Drawn})
    model = built(attention={"decoder_self": {"transform": {"kind": "drawn", "n": 2}}})
    wanted = stepped(source, model, 1, compiled=False, steps=12)
    pack(model)
    torch.testing.assert_close(stepped(source, model, 1, compiled=True, steps=12), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(48, 3, 96), (36, 3, 52), (20, 2, 28)], ids=str)
@pytest.mark.parametrize("beams", [1, 2])
def test_a_row_is_the_same_whatever_stands_beside_it(beams, shape, built, source):
    width, heads, inner = shape
    model = built(width=width, heads=heads, ffn=inner)
    pack(model)
    with torch.no_grad():
        memory = model.encode(source)
        together = model.widen(model.start(memory, 3), beams)
        row = torch.arange(beams) + beams  # of the second source
        alone_memory, alone = select_batch(memory, torch.tensor([1])), select_batch(together, row)
        for token in (1, 5, 7):
            logits, together = model.step(memory, together, torch.full((SOURCES * beams,), token))
            found, alone = model.step(alone_memory, alone, torch.full((beams,), token))
            assert torch.equal(found, logits[row])


def test_what_is_no_number_spoils_its_own_row(built, source):
    model = built()
    pack(model)
    with torch.no_grad():
        memory = model.encode(source)
        for each in memory.cross:
            each.values[1] = torch.nan
        logits, _ = model.step(memory, model.start(memory, 2), torch.tensor([3, 4, 5]))
    assert logits.isnan().any(1).tolist() == [False, True, False]


def test_a_full_cache_is_an_error(built, source):
    model = built()
    pack(model)
    with torch.no_grad():
        memory = model.encode(source)
        state = model.start(memory, 1)
        _, state = model.step(memory, state, torch.tensor([3, 4, 5]))
        assert state.compiled is not None
        with pytest.raises(ValueError, match="holds 1 positions; 2"):
            model.step(memory, state, torch.tensor([3, 4, 5]))


@torch.no_grad()
def test_a_state_outlives_the_block_in_which_weights_are_packed(built, source):
    model = built()
    with packed.packed(model):
        memory = model.encode(source)
        state = model.start(memory, 2)
        assert state.compiled is not None
    model.output.weight.data.zero_()
    logits, _ = model.step(memory, state, torch.tensor([3, 4, 5]))
    assert not logits.any()


@torch.no_grad()
def test_a_block_within_a_block_ends(built, source):
    """The output is packed still, other layers are not."""
    model = built()
    with packed.packed(model.output):
        with packed.packed(model):
            memory = model.encode(source)
            state = model.start(memory, 2)
            assert state.compiled is not None
        assert state.compiled.step(torch.tensor([3, 4, 5]), 0, memory.cross, state.caches, 1) is None


@torch.no_grad()
def test_keys_drawn_of_a_source_with_holes(built, source):
    model = built(attention=SITES["drawn keys"])
    pack(model)
    given, found = source, []
    holes = Source(given.data, given.valid.roll(1, 1))
    for compiled in (True, False):
        with nullcontext() if compiled else native.off():
            memory = model.encode(holes)
            state = model.start(memory, 2)
            assert (state.compiled is not None) == compiled
            found.append(model.step(memory, state, torch.tensor([3, 4, 5]))[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "what", ["tokens", "tokens of two columns", "caches", "position", "sources", "mask", "mask of numbers"]
)
@torch.no_grad()
def test_rows_that_do_not_fit_are_left_to_the_definition(what, built, source):
    """Which says so, where compiled code would read what is not there."""
    model = built()
    pack(model)
    memory = model.encode(source)
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


@pytest.mark.parametrize("threads", [1, 3])
@torch.no_grad()
def test_threads_change_nothing(threads, built, source):
    """Wide enough that each loop is shared out."""
    model = built(width=264, heads=3, ffn=520)
    pack(model)
    found, before = [], torch.get_num_threads()
    many = Source(*(each.repeat(8, 1) for each in (source.data, source.valid)))
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
def test_bfloat16(built, source):
    model = built()
    wanted = stepped(source, model, 2, compiled=False)
    with torch.autocast("cpu", torch.bfloat16):
        pack(model)
        found = stepped(source, model, 2, compiled=True)
    assert (found - wanted).norm() < 3e-2 * wanted.norm()


@torch.no_grad()
def test_another_type_under_autocast_is_left_to_the_definition(monkeypatch, built, source):
    model = built()
    pack(model)
    memory = model.encode(source)
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
def test_a_mask_that_lies_otherwise_in_memory(built, source):
    model = built()
    pack(model)
    given = source
    turned = Source(given.data, given.valid.t().contiguous().t())
    token = torch.tensor([3, 4, 5])
    logits = [model.step(memory := model.encode(each), model.start(memory, 2), token)[0] for each in (given, turned)]
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("softmax", 1),
        ("window", 1),
        ("listed keys", 1),
        ("drawn keys", 1),
        ("gates", 1),
        ("top-k out of window", 1),
        ("top-k, ties by index", 1),
        ("top-k, a part", 1),
        ("no projections", 1),
        ("slots", 2 * 2),
        ("dense", 2 * 3),
    ],
)
@torch.no_grad()
def test_calls_of_the_last_step(name, calls, monkeypatch, built, source):
    """One, or for each of two layers one more than it has attentions that are not compiled."""
    model = built(attention=SITES[name])
    pack(model)
    ran, run = [], decoder_step._run
    monkeypatch.setattr(decoder_step, "_run", lambda *given: (ran.append(given), run(*given)))
    memory = model.encode(source)
    state = model.start(memory, 8)
    for _ in range(8):
        ran.clear()
        _, state = model.step(memory, state, torch.tensor([3, 4, 5]))
    assert len(ran) == calls


@pytest.mark.parametrize("token", [-1, WORDS])
@torch.no_grad()
def test_a_token_without_an_embedding_is_an_error(token, built, source):
    model = built()
    pack(model)
    memory = model.encode(source)
    with pytest.raises(IndexError, match="has no row among the 19"):
        model.step(memory, model.start(memory, 2), torch.tensor([3, token, 5]))


@torch.no_grad()
def test_a_position_beyond_the_last_is_an_error(built, source):
    model = built(max_length=6)
    pack(model)
    memory = model.encode(source)
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
def test_embeddings_and_outputs(raw, built, source):
    model = built(**raw)
    wanted = stepped(source, model, 1, compiled=False)
    pack(model)
    torch.testing.assert_close(stepped(source, model, 1, compiled=True), wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_tokens_that_lie_apart_are_read_as_well(monkeypatch, built, source):
    """As those of a beam of one source do."""
    model = built()
    pack(model)
    ran, run = [], decoder_step._run
    monkeypatch.setattr(decoder_step, "_run", lambda *given: (ran.append(given), run(*given)))
    memory = model.encode(source)
    apart = torch.tensor([[3, 9], [4, 9], [5, 9]])[:, 0]
    logits = [model.step(memory, model.start(memory, 2), each)[0] for each in (apart, torch.tensor([3, 4, 5]))]
    assert torch.equal(*logits)
    assert len(ran) == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
@torch.no_grad()
def test_a_search_may_go_on_from_a_copy(copied, built, source):
    model = built()
    pack(model)
    memory = model.encode(source)
    _, state = model.step(memory, model.start(memory, 3), torch.tensor([3, 4, 5]))
    branch = copied(state)
    token = torch.tensor([6, 7, 8])
    torch.testing.assert_close(model.step(memory, branch, token)[0], model.step(memory, state, token)[0])


def test_caches_that_gradients_hang_on_are_left_to_the_definition(built, source):
    model = built()
    memory = model.encode(source)
    token = torch.tensor([3, 4, 5])
    _, state = model.step(memory, model.start(memory, 2), token)
    pack(model)
    with torch.no_grad():
        made = model.start(memory, 2).compiled
        assert made is not None
        assert made.step(token, 1, memory.cross, state.caches, 1) is None
