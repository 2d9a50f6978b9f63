"""FixedMemory against its definition in Python floats, against finite differences, and at its edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from attnbench.attention.modules.base import modules
from attnbench.attention.modules.fixed_memory import FixedMemorySpec, encodings
from attnbench.attention.patterns.full import FullSpec
from attnbench.attention.scores.dot import ScaledDotSpec
from attnbench.attention.site import Site
from attnbench.attention.spec import AttentionSpec, CrossSpec
from attnbench.attention.transforms.base import TransformSpec, transforms
from attnbench.attention.transforms.softmax import SoftmaxSpec
from attnbench.attention.types import Dims, Positions
from attnbench.core.dropout import Dropout

NAN = float("nan")
BATCH, SOURCE, QUERIES, WIDTH, QUERY_WIDTH, SLOTS, LONGEST = 4, 6, 3, 4, 5, 3, 5
LENGTHS = (6, 3, 1, 0)  # longer than LONGEST, ordinary, one token, none
VALID = torch.arange(SOURCE) < torch.tensor(LENGTHS)[:, None]
ENCODERS = [
    {"encoder_transform": encoder, "enc_norm": norm, "positions": bool(offset), "pe_offset": offset or "as_printed"}
    for encoder, norm in (("softmax", "k"), ("sigmoid", "k"), ("softmax", "time"))
    for offset in (None, "as_printed", "plus_one")
]
CASES = [
    pytest.param(encoder, decoder, id="-".join([*map(str, encoder.values()), decoder]))
    for encoder in ENCODERS
    for decoder in ("softmax", "sigmoid")
]
POSITIONS = Positions(torch.arange(QUERIES), torch.arange(SLOTS))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(decoder="softmax", sparsify="both", dropout=0.0, slots=SLOTS, **fields):
    torch.manual_seed(3)
    spec = FixedMemorySpec.model_validate({"slots": slots, "longest": LONGEST, **fields})
    site = Site(ScaledDotSpec(), FullSpec(), transforms.parse(decoder), sparsify)
    dims = Dims(heads=2, query_width=QUERY_WIDTH, key_width=WIDTH, longest_source=99)
    module = spec.build(site, "cross", 7, dims, dropout)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.8)
    return module.double()


def inputs():
    return draw(BATCH, SOURCE, WIDTH, seed=1), draw(BATCH, QUERIES, QUERY_WIDTH, seed=2)


def close(found, wanted, tolerance=1e-12):
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


# ---- the definition, in floats ---------------------------------------------------------------------------------------


def softmaxed(row):
    exponentials = [math.exp(z) for z in row]
    return [e / sum(exponentials) for e in exponentials]


def sigmoided(row):
    return [1 / (1 + math.exp(-z)) for z in row]


NORMALISERS = {"softmax": softmaxed, "sigmoid": sigmoided}


def encoding(length, slots, offset):
    """l[s][k], over the `length` real positions."""
    table = []
    for s in range(length):
        table.append([])
        for k in range(1, slots + 1):
            if offset == "as_printed":
                slot, time = k / slots, min(s / LONGEST, 1)
            else:
                slot, time = k / (slots + 1), min((s + 1) / (LONGEST + 1), 1)
            table[s].append((1 - slot) * (1 - time) + slot * time)
    for k in range(slots):
        total = sum(row[k] for row in table)
        for row in table:
            row[k] = row[k] / total if total else 1 / length
    return table


def by_hand(module, encoder, decoder, states, queries):
    """Contexts and maps of one source of real states alone: nested loops over lists of floats."""
    write, read = module.write_weight.tolist(), module.read_weight.tolist()
    length, slots = len(states), len(write)
    logits = [[sum(w * x for w, x in zip(row, state, strict=True)) for row in write] for state in states]
    if encoder["positions"]:
        table = encoding(length, slots, encoder["pe_offset"])
        logits = [[z * p for z, p in zip(*rows, strict=True)] for rows in zip(logits, table, strict=True)]
    normalise = NORMALISERS[encoder["encoder_transform"]]
    if encoder["enc_norm"] == "time":
        columns = [normalise([row[k] for row in logits]) for k in range(slots)]
        alpha = [[columns[k][s] for k in range(slots)] for s in range(length)]
    else:
        alpha = [normalise(row) for row in logits]
    contexts = [[sum(alpha[s][k] * states[s][d] for s in range(length)) for d in range(WIDTH)] for k in range(slots)]
    outputs, maps = [], []
    for query in queries:
        beta = NORMALISERS[decoder]([sum(w * x for w, x in zip(row, query, strict=True)) for row in read])
        outputs.append([sum(beta[k] * contexts[k][d] for k in range(slots)) for d in range(WIDTH)])
        maps.append(
            [sum(beta[k] * alpha[s][k] for k in range(slots)) for s in range(length)] + [0.0] * (SOURCE - length)
        )
    return outputs, maps


@pytest.mark.parametrize(("encoder", "decoder"), CASES)
@pytest.mark.parametrize("slots", [1, SLOTS, 9], ids=lambda slots: f"K={slots}")
def test_equals_the_definition_in_floats(encoder, decoder, slots):
    """Sources of no token, one, and more than S; more slots than tokens, and one."""
    module = build(decoder, slots=slots, **encoder)
    states, queries = inputs()
    found = module(queries, module.memorize(states, VALID, need_weights=True), POSITIONS, need_weights=True)
    assert found.weights.shape == (BATCH, 1, QUERIES, SOURCE)
    for row, length in enumerate(LENGTHS):
        outputs, maps = by_hand(module, encoder, decoder, states[row, :length].tolist(), queries[row].tolist())
        close(found.context[row], torch.tensor(outputs, dtype=torch.float64))
        close(found.weights[row, 0], torch.tensor(maps, dtype=torch.float64))


@pytest.mark.parametrize(("encoder", "decoder"), CASES)
def test_gradients_equal_finite_differences(encoder, decoder):
    module = build(decoder, **encoder)
    states, queries = inputs()

    def context(states, queries, *_):
        return module(queries, module.memorize(states, VALID), POSITIONS).context

    assert torch.autograd.gradcheck(context, (states.requires_grad_(), queries.requires_grad_(), *module.parameters()))


@pytest.mark.parametrize(("encoder", "decoder"), CASES)
def test_without_padding_no_mask_is_needed(encoder, decoder):
    module = build(decoder, **encoder)
    states, queries = inputs()
    found, wanted = (
        module(queries, module.memorize(states, valid, need_weights=True), POSITIONS, need_weights=True)
        for valid in (None, torch.ones(BATCH, SOURCE, dtype=torch.bool))
    )
    close(found.context, wanted.context)
    close(found.weights, wanted.weights)


# ---- position encodings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", ["as_printed", "plus_one"])
def test_encodings_equal_the_table(offset):
    found = encodings(torch.zeros(BATCH, SOURCE, SLOTS, dtype=torch.float64), VALID, LONGEST, offset)
    for row, length in enumerate(LENGTHS):
        close(
            found[row, :length], torch.tensor(encoding(length, SLOTS, offset), dtype=torch.float64).view(length, SLOTS)
        )
        assert not found[row, length:].any()


def test_plus_one_is_symmetric_and_as_printed_is_not():
    like = torch.zeros(1, LONGEST, SLOTS, dtype=torch.float64)
    symmetric, printed = (encodings(like, None, LONGEST, offset)[0] for offset in ("plus_one", "as_printed"))
    close(symmetric.flip(0, 1), symmetric)
    assert (printed.flip(0, 1) - printed).abs().max() > 0.1


@pytest.mark.parametrize("offset", ["as_printed", "plus_one"])
def test_what_lies_beyond_the_longest_source_counts_as_its_end(offset):
    like = torch.zeros(1, 7, 3, dtype=torch.float64)
    found = encodings(like, None, 4, offset)[0]
    assert torch.equal(found[4:], found[4].expand(3, 3))
    assert (found > 0).any(1).all()
    assert not torch.equal(found[4], found[3])


def test_one_token_gets_all_of_each_slot():
    """As printed the last slot's encoding of it is 0 / 0."""
    like = torch.zeros(1, SOURCE, SLOTS)
    found = encodings(like, torch.arange(SOURCE)[None] < 1, LONGEST, "as_printed")
    assert torch.equal(found[0, 0], torch.ones(SLOTS))


def test_the_longest_source_is_the_models_where_none_is_given():
    states, queries = inputs()
    outputs = []
    for longest in (None, 99, LONGEST):
        module = build(positions=True, longest=longest)
        outputs.append(module(queries, module.memorize(states, VALID), POSITIONS).context)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-3)


# ---- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoder", "decoder"), CASES)
def test_padded_states_may_hold_anything(encoder, decoder):
    """NaN, infinities and huge numbers behind the mask: the same bits, gradient 0 there, every gradient finite."""
    module = build(decoder, **encoder)
    states, queries = inputs()
    results = []
    for content in (0.0, NAN, torch.inf, 1e300):
        keys = states.masked_fill(~VALID[..., None], content).requires_grad_()
        values = (states + 1).masked_fill(~VALID[..., None], content).requires_grad_()
        output = module(queries, module.memorize(keys, VALID, values, need_weights=True), POSITIONS, need_weights=True)
        grads = torch.autograd.grad(
            output.context.square().sum() + output.weights.square().sum(), [keys, values, *module.parameters()]
        )
        assert not any(grad[~VALID].any() for grad in grads[:2])
        results.append([*output[:2], *grads])
    for tensors in zip(*results, strict=True):
        for tensor in tensors:
            assert tensor.isfinite().all()
            assert torch.equal(tensor, tensors[0])


@pytest.mark.parametrize(("encoder", "decoder"), CASES)
@pytest.mark.parametrize("width", [0, SOURCE], ids=["S=0", "all padding"])
def test_a_source_without_tokens_gives_zeros(encoder, decoder, width):
    module = build(decoder, **encoder)
    states = draw(2, width, WIDTH).requires_grad_()
    queries = draw(2, QUERIES, QUERY_WIDTH, seed=2).requires_grad_()
    memory = module.memorize(states, torch.zeros(2, width, dtype=torch.bool), need_weights=True)
    output = module(queries, memory, POSITIONS, need_weights=True)
    assert torch.equal(output.context, torch.zeros(2, QUERIES, WIDTH, dtype=torch.float64))
    assert torch.equal(output.weights, torch.zeros(2, 1, QUERIES, width, dtype=torch.float64))
    for grad in torch.autograd.grad(output.context.sum(), [states, queries, *module.parameters()]):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_one_slot_is_the_same_context_for_every_query():
    module = build(slots=1)
    states, queries = inputs()
    context = module(queries, module.memorize(states, VALID), POSITIONS).context
    summed = states.masked_fill(~VALID[..., None], 0.0).sum(1, keepdim=True)  # softmax over one slot is 1
    close(context, summed.expand_as(context))


def test_values_apart_from_the_keys_are_what_is_mixed():
    module = build()
    states, queries = inputs()
    values = draw(BATCH, SOURCE, WIDTH, seed=4)
    output = module(queries, module.memorize(states, VALID, values, need_weights=True), POSITIONS, need_weights=True)
    close(output.context, output.weights[:, 0] @ values)
    own = module(queries, module.memorize(states, VALID, need_weights=True), POSITIONS, need_weights=True)
    close(output.weights, own.weights)


def test_maps_sum_to_one_where_the_encoder_normalises_over_time():
    module = build(enc_norm="time")
    states, queries = inputs()
    weights = module(queries, module.memorize(states, VALID, need_weights=True), POSITIONS, need_weights=True).weights
    close(weights[:3].sum(-1), torch.ones(3, 1, QUERIES, dtype=torch.float64))
    assert module.memorize(states, VALID).written is None


def test_maps_come_only_when_asked_for_twice():
    module = build()
    states, queries = inputs()
    kept, bare = module.memorize(states, VALID, need_weights=True), module.memorize(states, VALID)
    assert module(queries, kept, POSITIONS).weights is None
    assert module(queries, bare, POSITIONS, need_weights=True).weights is None
    close(module(queries, bare, POSITIONS).context, module(queries, kept, POSITIONS, need_weights=True).context, 0)


# ---- what a decode step reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoder", "decoder"), CASES)
@torch.no_grad()
def test_a_query_touches_no_encoder_state(encoder, decoder):
    module = build(decoder, **encoder)
    states, queries = inputs()
    values = states + 1
    wanted = module(queries, module.memorize(states, VALID, values), POSITIONS).context
    valid = VALID.clone()
    memory = module.memorize(states, valid, values)
    for gone in (states, values):
        gone.fill_(NAN)
    valid.fill_(False)
    del states, values, valid
    assert torch.equal(module(queries, memory, POSITIONS).context, wanted)


def test_a_learned_alpha_is_one_as_slots_have_no_heads():
    module = build({"kind": "entmax", "alpha": "learned"})
    keys, query = inputs()
    found = module(query, module.memorize(keys, VALID), POSITIONS)
    found.context.sum().backward()
    assert module.transform.raw.shape == module.transform.raw.grad.shape == (1,)
    assert found.context.shape == (BATCH, QUERIES, WIDTH)


def test_what_a_query_reads_does_not_grow_with_the_source():
    module = build()
    for length in (1, 500):
        memory = module.memorize(draw(BATCH, length, WIDTH), torch.ones(BATCH, length, dtype=torch.bool))
        assert memory.keys is memory.valid is memory.filled is memory.written is None
        assert memory.values.shape == (BATCH, 1, SLOTS, WIDTH)
        assert memory.values.untyped_storage().nbytes() == BATCH * SLOTS * WIDTH * 8


# ---- training, precision ---------------------------------------------------------------------------------------------


def test_dropout_is_on_the_choice_of_slots_and_only_in_training():
    module = build(dropout=0.5)
    states, queries = inputs()
    memory = module.memorize(states, VALID, need_weights=True)
    plain = module.eval()(queries, memory, POSITIONS, need_weights=True)
    module.train()
    assert torch.equal(module.memorize(states, VALID).values, memory.values)
    torch.manual_seed(0)
    found = module(queries, memory, POSITIONS, need_weights=True)
    torch.manual_seed(0)
    chosen = torch.softmax(queries @ module.read_weight.T, -1)[:, None]
    close(found.context, (Dropout(0.5).train()(chosen) @ memory.values)[:, 0])
    assert not torch.allclose(found.context, plain.context)
    assert torch.equal(found.weights, plain.weights)


def test_sparsify_train_is_softmax_over_the_slots_in_eval_mode():
    top = {"kind": "topk", "k": 1}
    sparse, always, dense = build(top, sparsify="train"), build(top), build("softmax")
    states, queries = inputs()

    def context(module, training):
        module.train(training)
        return module(queries, module.memorize(states, VALID), POSITIONS).context

    assert torch.equal(context(sparse, True), context(always, True))
    assert torch.equal(context(sparse, False), context(dense, False))
    assert not torch.allclose(context(sparse, False), context(always, False), atol=1e-3)
    spread = build(sparsify="train", encoder_transform=top)
    assert torch.equal(context(spread, False), context(spread, True))


@pytest.mark.parametrize("k", [1, 3])
def test_bfloat16_makes_no_ties(k):
    """Logits are float32 under autocast: in bfloat16 many would be equal, and top-k would keep them all."""
    torch.manual_seed(0)
    top = {"kind": "topk", "k": k}
    spec = modules.parse({"kind": "fixed_memory", "slots": 300, "encoder_transform": top})
    site = Site(ScaledDotSpec(), FullSpec(), transforms.parse(top))
    module = spec.build(site, "cross", 16, Dims(query_width=16, key_width=16), 0.0)
    states, queries = torch.randn(4, 50, 16), torch.randn(4, 40, 16)
    with torch.autocast("cpu", torch.bfloat16):
        for low in (False, True):
            own = states.bfloat16() if low else states
            memory = module.memorize(own, None, need_weights=True)
            output = module(queries.bfloat16() if low else queries, memory, POSITIONS, need_weights=True)
            assert output.context.dtype == torch.bfloat16
            assert output.weights.dtype == memory.written.dtype == torch.float32
            assert ((memory.written > 0).sum(-1) == k).float().mean() > 0.999


@pytest.mark.parametrize("positions", [False, True])
def test_half_precision_weights_work_too(positions):
    module = build("sigmoid", encoder_transform="sigmoid", positions=positions).bfloat16()
    states, queries = inputs()
    output = module(
        queries.bfloat16(), module.memorize(states.bfloat16(), VALID, need_weights=True), POSITIONS, need_weights=True
    )
    assert output.context.dtype == torch.bfloat16
    assert output.context.isfinite().all()
    assert output.weights.isfinite().all()


def test_initial_weights_are_xavier_and_there_is_no_bias():
    torch.manual_seed(0)
    site = Site(ScaledDotSpec(), FullSpec(), SoftmaxSpec())
    module = FixedMemorySpec(slots=64).build(site, "cross", 1, Dims(query_width=32, key_width=96), 0.0)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert shapes == {"write_weight": (64, 96), "read_weight": (64, 32)}
    assert module.context_width == 96
    for weight in module.parameters():
        bound = (6 / sum(weight.shape)) ** 0.5
        assert weight.abs().max() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


# ---- the spec --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("raw", "words"), [
    ({"encoder_transform": "sigmoid", "enc_norm": "time"}, "'time' means nothing with encoder_transform 'sigmoid'"),
    ({"encoder_transform": "topk"}, "give k, ratio or a budget"),
    ({"encoder_transform": "softmx"}, "did you mean 'softmax'"),
    ({"slots": 0}, "greater than or equal to 1"),
    ({"longest": 0}, "greater than or equal to 1"),
    ({"enc_norm": "slots"}, "'k' or 'time'"),
    ({"pe_offset": "none"}, "'as_printed' or 'plus_one'"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(raw, words):
    with pytest.raises(ValueError, match=words):
        FixedMemorySpec.model_validate(raw)


class Bounded(TransformSpec):
    needs_upper = True


def test_a_transform_that_needs_bounds_is_refused():
    """No slot has a bound: what was spent is known of source positions."""
    site = Site(ScaledDotSpec(), FullSpec(), Bounded(kind="bounded"))
    with pytest.raises(ValueError, match=r"transform: the transform 'bounded' needs.*take another"):
        FixedMemorySpec().check(site, 4, 4)
    with pytest.raises(ValueError, match="encoder_transform: the transform 'bounded' needs"):
        FixedMemorySpec(encoder_transform=Bounded(kind="bounded"))
    FixedMemorySpec().check(site._replace(transform=SoftmaxSpec()), 4, 5)


def test_it_stands_at_cross_alone_and_takes_only_a_transform():
    raw = {"default": {"module": {"kind": "fixed_memory", "slots": 8}, "transform": "sigmoid"}}
    assert CrossSpec.model_validate(raw).cross.module == FixedMemorySpec(slots=8)
    with pytest.raises(ValueError, match="module 'fixed_memory' cannot stand at encoder_self"):
        AttentionSpec.model_validate({"encoder_self": {"module": "fixed_memory"}})
    with pytest.raises(ValueError, match="the module 'fixed_memory' has no score; drop `score: dot`"):
        AttentionSpec.model_validate({"cross": {"module": "fixed_memory", "score": "dot"}})
