"""Search over the real model: scores are those of decode(), outputs those of the definition, and nothing depends on
what else is in the batch."""

import pytest
import torch

from attnbench.attention.transforms.base import transforms
from attnbench.attention.types import ROLES
from attnbench.core import native
from attnbench.models.base import Sizes, Source
from attnbench.models.transformer import TransformerSpec
from attnbench.search.base import computing, searches

LENGTHS = (9, 4, 1, 7, 2)
LIMIT = {"max_ratio": 1.0, "max_extra": 4}
VOCABULARY = 14
TRANSFORMS = [kind for kind in transforms.kinds() if transforms.get(kind).roles >= set(ROLES)]


def site(kind):
    filled = transforms.get(kind).from_budget(3, "cross")
    return {"transform": kind} if filled is None else {"transform": filled.dump()}


def build(kind, dtype=torch.float64, norm="post", **more):
    torch.manual_seed(1)
    sizes = {"layers": 2, "width": 16, "heads": 2, "ffn": 24}
    attention = {"default": {**site(kind), **more}}
    spec = TransformerSpec.model_validate({**sizes, "norm": norm, "tie": "none", "attention": attention})
    model = spec.build(Sizes(VOCABULARY, VOCABULARY, joint=False)).eval()
    with torch.no_grad():
        model.output.weight.mul_(2.0)[2] = 0.0  # outputs that differ from source to source, some of them ended
    return model.to(dtype)


def beam(size, n_best=1, penalty="wu"):
    return searches.parse({"kind": "beam", "size": size, "n_best": n_best, "penalty": penalty, **LIMIT}).build()


def same(found, expected, tolerance):
    for row, other in zip(found, expected, strict=True):
        assert [(h.tokens, h.finished) for h in row] == [(h.tokens, h.finished) for h in other]
        for one, two in zip(row, other, strict=True):
            assert one.log_prob == pytest.approx(two.log_prob, abs=tolerance, rel=tolerance)
            assert one.score == pytest.approx(two.score, abs=tolerance, rel=tolerance)


EACH = pytest.mark.parametrize("kind", TRANSFORMS)
PRECISION = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])


@EACH
@PRECISION
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_scores_are_those_of_decode(lab, kind, dtype, tolerance, norm):
    model, source = build(kind, dtype, norm), lab.sources(*LENGTHS)
    source = Source(source.data % VOCABULARY, source.valid)
    for row, found in enumerate(beam(4, n_best=4)(model, source, lab.special)):
        assert len(found) == 4
        for hypothesis in found:
            expected = lab.rescore(model, lab.alone(source, row, LENGTHS[row]), hypothesis)
            assert hypothesis.log_prob == pytest.approx(expected, abs=tolerance, rel=tolerance)


@EACH
def test_size_one_is_greedy(lab, kind):
    model, source = build(kind), lab.sources(*LENGTHS)
    source = Source(source.data % VOCABULARY, source.valid)
    greedy = searches.parse({"kind": "greedy", **LIMIT}).build()(model, source, lab.special)
    assert beam(1, penalty="none")(model, source, lab.special) == greedy
    assert len({tuple(row[0].tokens) for row in greedy}) > 1


@EACH
@PRECISION
def test_batch_and_padding_change_nothing(lab, kind, dtype, tolerance):
    model, source = build(kind, dtype), lab.sources(*LENGTHS, pad_to=12)
    source = Source(source.data % VOCABULARY, source.valid)
    for search in (beam(4, n_best=4), searches.parse({"kind": "greedy", **LIMIT}).build()):
        together = search(model, source, lab.special)
        single = [search(model, lab.alone(source, row, length), lab.special)[0] for row, length in enumerate(LENGTHS)]
        same(together, single, tolerance)
        backwards = Source(source.data.flip(0), source.valid.flip(0))
        same(search(model, backwards, lab.special)[::-1], together, tolerance)


def test_a_source_without_a_valid_token_is_searched_too(lab):
    model, source = build("softmax"), lab.sources(5, 0)
    source = Source(source.data % VOCABULARY, source.valid)
    (first, *_), (second, *_) = beam(3)(model, source, lab.special)
    assert first.log_prob < 0
    assert second.log_prob < 0
    assert len(second.tokens) <= 4


@EACH
@pytest.mark.parametrize("size", [1, 5])
def test_outputs_are_those_of_the_definition(lab, kind, size):
    """Compiled steps and packed weights beside all scores in torch operations: of a thousand sentences one may come out
    otherwise, at a close call."""
    fast, defined = build(kind, torch.float32), build(kind, torch.float32, backend="dense")
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 10, (1000,), generator=draw).sort().values
    searcher = beam(size) if size > 1 else searches.parse({"kind": "greedy", **LIMIT}).build()
    others = []
    for some in lengths.split(250):
        source = lab.sources(*some.tolist())
        source = Source(torch.randint(3, VOCABULARY, source.data.shape, generator=draw), source.valid)
        with computing(fast, searcher.spec):
            found = searcher(fast, source, lab.special)
        with native.off():
            wanted = searcher(defined, source, lab.special)
        others += [
            abs(one.score - two.score)
            for (one, *_), (two, *_) in zip(found, wanted, strict=True)
            if one.tokens != two.tokens
        ]
    assert len(others) <= 1
    assert all(apart < 1e-4 for apart in others)
