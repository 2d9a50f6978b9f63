"""Compiled steps of a ConvS2S's decoder are the steps of its definition."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.attention import cached
from attnbench.attention.modules.single_head import SingleHead
from attnbench.core import native, packed
from attnbench.core.dropout import Dropout
from attnbench.core.errors import AttnbenchError
from attnbench.core.packed import pack
from attnbench.core.quantization import Quantized
from attnbench.core.tree import select_batch
from attnbench.models import convs2s_step
from attnbench.models.base import Sizes, Source
from attnbench.models.convs2s import ConvS2S, ConvS2SSpec, DecoderAttention, GatedConvolution, PositionedEmbedding

WORDS, SOURCES = 19, 3  # of the fixture `source`
TOKEN = torch.tensor([3, 4, 5])

pytestmark = pytest.mark.usefixtures("compiled_products")


@pytest.fixture
def built() -> Callable[..., ConvS2S]:
    """Makes a small ConvS2S, of 19 words, whose settings may be told."""

    def build(**raw: Any) -> ConvS2S:
        torch.manual_seed(2)
        small = {"layers": 2, "width": 20, "embedding": 12, "heads": 3, "dropout": 0.1, "max_length": 20}
        model = ConvS2SSpec.model_validate({**small, **raw}).build(Sizes(WORDS, WORDS, False, longest_source=9))
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        return model.eval()

    return build


def stepped(
    source: Source, model: ConvS2S, beams: int, *, compiled: bool, steps: int = 6, rows: Tensor | None = None
) -> Tensor:
    """Logits of all steps, each by compiled code or none; halfway rows change places."""
    prefixes = torch.randint(3, WORDS, (SOURCES * beams, steps), generator=torch.Generator().manual_seed(6))
    found = []
    with torch.no_grad(), nullcontext() if compiled else native.off():
        memory = model.encode(source)
        state = model.widen(model.start(memory, steps), beams)
        assert (state.compiled is not None) == compiled
        for at in range(steps):
            before = state
            logits, state = model.step(memory, state, prefixes[:, at])
            found.append(logits)
            if before.compiled is not None:  # the same step again, without a way out
                again = once(model, memory, before, prefixes[:, at])
                assert again is not None
                assert torch.equal(again[0], logits)
            if at == 2 and rows is not None:
                state = model.reorder(state, rows, 0)
    return torch.stack(found)


def once(model: ConvS2S, memory: Any, state: Any, token: Tensor, **changed: Any) -> Any:
    """What compiled code gives for a step."""
    cross = memory.cross * (len(model.decoder) // len(memory.cross))
    given = {"memories": cross, "scale": memory.scale, "inputs": state.inputs, "beams": state.beams}
    return state.compiled.step(token, state.length, **{**given, **changed})


SITES: dict[str, Any] = {
    "softmax": {},
    "top-k": {"transform": {"kind": "topk", "k": 2}},
    "sparse in training": {"transform": "sparsemax", "sparsify": "train"},
    "learned alpha": {"transform": {"kind": "entmax", "alpha": "learned"}},
    "gates": {"transform": "sigmoid"},
    "scaled": {"score": "scaled_dot"},
    "drawn keys": {"pattern": "random", "budget": 3},
    "heads": {"module": "multihead", "score": "scaled_dot"},
    "heads with top-k": {"module": "multihead", "transform": {"kind": "topk", "k": 2}},
    "heads with drawn keys": {"module": "multihead", "pattern": "random", "budget": 3},
    "heads, dense": {"module": "multihead", "backend": "dense"},
    "additive": {"score": "additive"},
    "bilinear": {"score": "bilinear"},
    "slots": {"module": {"kind": "fixed_memory", "slots": 3}},
    "dense": {"backend": "dense"},
}  # fmt: skip


@pytest.mark.parametrize(
    "shape", [{}, {"kernel": 1, "tie": "decoder"}, {"kernel": 4, "share_attention": True, "decoder_layers": 3}], ids=str
)
@pytest.mark.parametrize("name", SITES)
def test_the_definition(name, shape, built, source):
    model = built(attention={"cross": SITES[name]}, **shape)
    wanted = stepped(source, model, 1, compiled=False)
    pack(model)
    torch.testing.assert_close(stepped(source, model, 1, compiled=True), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beams", [2, cached.MOST, cached.MOST + 1])
@pytest.mark.parametrize("name", ["softmax", "gates", "heads", "heads with drawn keys", "additive", "slots"])
def test_beams(name, beams, built, source):
    model = built(attention={"cross": SITES[name]})
    rows = torch.randint(0, beams, (SOURCES, beams)) + beams * torch.arange(SOURCES)[:, None]
    wanted = stepped(source, model, beams, compiled=False, rows=rows.flatten())
    pack(model)
    torch.testing.assert_close(
        stepped(source, model, beams, compiled=True, rows=rows.flatten()), wanted, rtol=1e-4, atol=1e-5
    )


@pytest.mark.skipif(not packed._own_packs(torch.int8), reason="this processor has no products of 8 bits here")
def test_whole_numbers_of_8_bits(monkeypatch, built, source):
    """Beside the definition, which rounds the same numbers but where a last digit of float32 decides; convolutions are
    not rounded."""
    model, other = built(), built()
    pack(model, "int8")
    with monkeypatch.context() as patched:
        patched.setattr(packed, "_way", lambda dtype: packed._Defined if dtype == torch.int8 else packed._Own)
        pack(other, "int8")
    assert isinstance(other.output.forward.product.weight, Quantized)
    found, wanted = stepped(source, model, 2, compiled=True), stepped(source, other, 2, compiled=False)
    assert (found - wanted).norm() < 1e-2 * wanted.norm()


@pytest.mark.skipif(not packed._own_packs(torch.bfloat16), reason="this processor does not multiply bfloat16")
def test_bfloat16(built, source):
    model = built()
    wanted = stepped(source, model, 2, compiled=False)
    with torch.autocast("cpu", torch.bfloat16):
        pack(model)
        found = stepped(source, model, 2, compiled=True)
    assert (found - wanted).norm() < 3e-2 * wanted.norm()


@pytest.mark.parametrize("shape", [(48, 24), (36, 13), (20, 7)], ids=str)
@pytest.mark.parametrize("beams", [1, 2])
def test_a_row_is_the_same_whatever_stands_beside_it(beams, shape, built, source):
    width, embedding = shape
    model = built(width=width, embedding=embedding, heads=1)
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


@pytest.mark.parametrize("threads", [1, 3])
@torch.no_grad()
def test_threads_change_nothing(threads, built):
    """Wide enough that each loop is shared out."""
    model = built(width=256, embedding=96, heads=1)
    pack(model)
    rows = 200
    source = Source(torch.full((rows, 4), 5), torch.ones(rows, 4, dtype=torch.bool))
    before, found = torch.get_num_threads(), []
    memory = model.encode(source)  # torch's products may change with threads
    try:
        for each in (2, threads):
            torch.set_num_threads(each)
            _, state = model.step(memory, model.start(memory, 2), torch.arange(rows) % WORDS)
            assert state.compiled is not None
            found.append(model.step(memory, state, torch.arange(rows) % 7)[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@torch.no_grad()
def test_what_is_no_number_spoils_its_own_row(built, source):
    model = built()
    pack(model)
    memory = model.encode(source)
    for each in memory.cross:
        each.values[1] = torch.nan
    logits, _ = model.step(memory, model.start(memory, 2), TOKEN)
    assert logits.isnan().any(1).tolist() == [False, True, False]


@torch.no_grad()
def test_a_state_outlives_the_block_in_which_weights_are_packed(built, source):
    model = built()
    with packed.packed(model):
        memory = model.encode(source)
        state = model.start(memory, 2)
        assert state.compiled is not None
    model.output.weight.data.zero_()
    model.output.bias.data.zero_()
    logits, _ = model.step(memory, state, TOKEN)
    assert not logits.any()


@pytest.mark.parametrize("part", ["output", "decoder"])
@torch.no_grad()
def test_a_block_within_a_block_ends(part, built, source):
    """Some layers are packed still, others are not."""
    model = built()
    with packed.packed(getattr(model, part)):
        with packed.packed(model):
            memory = model.encode(source)
            state = model.start(memory, 2)
        assert once(model, memory, state, TOKEN) is None


@pytest.mark.parametrize("what", ["tokens", "two columns", "inputs", "their number", "sources", "scale", "mask"])
@torch.no_grad()
def test_rows_that_do_not_fit_are_left_to_the_definition(what, built, source):
    """Compiled code would read what is not there."""
    model = built()
    pack(model)
    memory = model.encode(source)
    state = model.start(memory, 2)
    assert once(model, memory, state, TOKEN) is not None
    token, changed = TOKEN, {}
    if what == "tokens":
        token = torch.tensor([3, 4, 5, 6, 7])
    elif what == "two columns":
        token = torch.tensor([[3, 4], [4, 5], [5, 6]])
    elif what == "inputs":
        changed["inputs"] = select_batch(state.inputs, torch.tensor([0, 1]))
    elif what == "their number":
        changed["inputs"] = tuple(each[:, 1:] for each in state.inputs)
    elif what == "sources":
        changed["memories"] = select_batch(memory.cross, torch.tensor([0, 1]))
    elif what == "scale":
        changed["scale"] = memory.scale[:2]
    else:
        changed["memories"] = tuple(each._replace(valid=source.valid[:, :-1]) for each in memory.cross)
    assert once(model, memory, state, token, **changed) is None


@torch.no_grad()
def test_inputs_that_lie_apart_are_left_to_the_definition(built, source):
    model = built()
    pack(model)
    memory = model.encode(source)
    _, state = model.step(memory, model.start(memory, 3), TOKEN)
    turned = state._replace(inputs=tuple(each.transpose(1, 2).contiguous().transpose(1, 2) for each in state.inputs))
    assert once(model, memory, turned, TOKEN) is None
    torch.testing.assert_close(model.step(memory, turned, TOKEN)[0], model.step(memory, state, TOKEN)[0])


@torch.no_grad()
def test_another_type_under_autocast_is_left_to_the_definition(built, source):
    model = built()
    pack(model)
    memory = model.encode(source)
    state = model.start(memory, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert once(model, memory, state, TOKEN) is None
    with native.off():
        assert once(model, memory, state, TOKEN) is None
    with torch.enable_grad():
        assert once(model, memory, state, TOKEN) is None
    assert once(model, memory, state, TOKEN) is not None


@pytest.mark.parametrize(
    ("name", "calls"),
    [("softmax", 1), ("drawn keys", 1), ("gates", 1), ("heads", 1), ("slots", 2 * 2), ("heads, dense", 2 * 2)],
)
@torch.no_grad()
def test_calls_of_a_step(name, calls, monkeypatch, built, source):
    """One, or for each of two layers two where its attention is not compiled."""
    model = built(attention={"cross": SITES[name]})
    pack(model)
    ran, run = [], convs2s_step._run
    monkeypatch.setattr(convs2s_step, "_run", lambda *given: (ran.append(given), run(*given)))
    memory = model.encode(source)
    model.step(memory, model.start(memory, 8), TOKEN)
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
        _, state = model.step(memory, state, TOKEN)
    with pytest.raises(AttnbenchError, match="max_length"):
        model.step(memory, state, TOKEN)


@torch.no_grad()
def test_tokens_that_lie_apart_are_read_as_well(built, source):
    """As those of a beam of one source do."""
    model = built()
    pack(model)
    memory = model.encode(source)
    apart = torch.tensor([[3, 9], [4, 9], [5, 9]])[:, 0]
    found = [once(model, memory, model.start(memory, 2), each)[0] for each in (apart, TOKEN)]
    assert torch.equal(*found)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
@torch.no_grad()
def test_a_search_may_go_on_from_a_copy(copied, built, source):
    model = built()
    pack(model)
    memory = model.encode(source)
    _, state = model.step(memory, model.start(memory, 3), TOKEN)
    branch = copied(state)
    torch.testing.assert_close(model.step(memory, branch, TOKEN)[0], model.step(memory, state, TOKEN)[0])


@torch.no_grad()
def test_attention_that_is_summed_up_is_left_to_the_definition(built, source):
    model = built()
    pack(model)
    memory = model.encode(source, need_weights="cross")
    assert model.start(memory, 2, track=True).compiled is None


@pytest.mark.parametrize("name", ["decoder.1.weight", "decoder.0.bias", "target_embedding.positions.weight"])
@torch.no_grad()
def test_other_weights_in_a_state_that_has_begun(name, built, source):
    """As torch.func.functional_call puts them there."""
    model = built()
    pack(model)
    memory = model.encode(source)
    state = model.start(memory, 2)
    owner, _, own = name.rpartition(".")
    part = model.get_submodule(owner)
    setattr(part, own, nn.Parameter(torch.zeros_like(getattr(part, own))))
    assert once(model, memory, state, TOKEN) is None
    torch.testing.assert_close(
        model.step(memory, state, TOKEN)[0], model.step(memory, state._replace(compiled=None), TOKEN)[0]
    )


@pytest.mark.parametrize("name", ["slots", "additive"])
@torch.no_grad()
def test_sources_that_do_not_fit_an_attention_that_is_asked(name, built, source):
    model = built(attention={"cross": SITES[name]})
    pack(model)
    memory = model.encode(source)
    state = select_batch(model.start(memory, 2), torch.tensor([0]))
    assert once(model, memory, state, TOKEN[:1], scale=memory.scale[:1]) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.attention[0], "project_query", nn.Linear(20, 400)),
        lambda model: setattr(model.attention[1], "project_query", nn.Linear(20, 1)),
        lambda model: setattr(model.attention[0], "project_context", nn.Linear(12, 1)),
        lambda model: setattr(model.attention[0].attention, "context_width", 6),
        lambda model: setattr(model.target_embedding, "positions", nn.Embedding(20, 1)),
        lambda model: model.decoder.__setitem__(1, GatedConvolution(20, 5, 0.1).eval()),
        lambda model: setattr(model, "contract", nn.Linear(20, 24)),
    ],
)
@torch.no_grad()
def test_widths_that_do_not_fit_are_left_to_the_definition(change, built, source):
    """Compiled code would write beyond its room."""
    model = built()
    memory = model.encode(source)
    change(model.eval())
    pack(model)
    assert model.eval().start(memory, 2).compiled is None


class _Convolution(GatedConvolution):
    pass


class _Attention(DecoderAttention):
    pass


class _Single(SingleHead):
    pass


class _Embedding(PositionedEmbedding):
    pass


class _Dropout(Dropout):
    pass


class _Model(ConvS2S):
    def logits(self, hidden):
        return super().logits(hidden)


def _of_class(find: Callable[[ConvS2S], Any], kind: type) -> Callable[[ConvS2S], None]:
    def change(model: ConvS2S) -> None:
        find(model).__class__ = kind

    change.__name__ = kind.__name__
    return change


def _hooked(model: ConvS2S) -> None:
    model.decoder[1].register_forward_hook(lambda *given: None)


def _hooked_attention(model: ConvS2S) -> None:
    model.attention[0].attention.register_forward_hook(lambda *given: None)


def _in_training(model: ConvS2S) -> None:
    model.decoder[0].dropout.train()


def _replaced(model: ConvS2S) -> None:
    model.attention[1].forward = lambda *given, **named: None


def _one_weight_less(model: ConvS2S) -> None:
    del model.attention[1].project_query.forward


def _a_convolution_less(model: ConvS2S) -> None:
    del model.decoder[1].forward


def _other_weights(model: ConvS2S) -> None:
    model.decoder[1].weight = nn.Parameter(model.decoder[1].weight.detach().clone())


def _logits_as_they_are(model: ConvS2S) -> None:
    del model.output.forward


def _own_logits(model: ConvS2S) -> None:
    model.logits = lambda hidden: hidden


def _bounded_embeddings(model: ConvS2S) -> None:
    model.target_embedding.table.max_norm = 1.0


def _wrapped_projection(model: ConvS2S) -> None:
    model.attention[0].project_context = nn.Sequential(model.attention[0].project_context)


@pytest.mark.parametrize(
    "change",
    [
        _of_class(lambda model: model.decoder[1], _Convolution),
        _of_class(lambda model: model.attention[1], _Attention),
        _of_class(lambda model: model.target_embedding, _Embedding),
        _of_class(lambda model: model.dropout, _Dropout),
        _of_class(lambda model: model, _Model),
        _hooked,
        _hooked_attention,
        _in_training,
        _replaced,
        _one_weight_less,
        _a_convolution_less,
        _other_weights,
        _logits_as_they_are,
        _own_logits,
        _bounded_embeddings,
        _wrapped_projection,
    ],
    ids=lambda change: change.__name__,
)
@torch.no_grad()
def test_what_is_out_of_the_ordinary_is_left_to_the_definition(change, built, source):
    model = built()
    pack(model)
    memory = model.encode(source)
    assert model.start(memory, 2).compiled is not None
    change(model)
    assert model.start(memory, 2).compiled is None


@torch.no_grad()
def test_an_attention_of_another_class_is_asked(built, source):
    model = built()
    model.attention[0].attention.__class__ = _Single
    asked = []
    mix = _Single.mix
    wanted = stepped(source, model, 1, compiled=False)
    pack(model)
    model.attention[0].attention.mix = lambda *given: asked.append(1) or mix(model.attention[0].attention, *given)
    torch.testing.assert_close(stepped(source, model, 1, compiled=True), wanted, rtol=1e-4, atol=1e-5)
    assert asked


@torch.no_grad()
def test_hooks_of_all_modules_are_called(built, source):
    model = built()
    pack(model)
    memory = model.encode(source)
    hook = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        assert model.start(memory, 2).compiled is None
    finally:
        hook.remove()
