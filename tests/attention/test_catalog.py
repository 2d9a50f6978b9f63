from __future__ import annotations

import pytest
import torch
from torch import nn

from attnbench.attention import build_pattern, build_transform, mechanisms
from attnbench.attention.patterns.random import RandomSpec
from attnbench.attention.transforms.base import transforms
from attnbench.attention.transforms.entmax import entmax
from attnbench.attention.transforms.softmax import softmax
from attnbench.attention.transforms.topk import TopKSpec
from attnbench.attention.transforms.topk_oow import TopKOutOfWindowSpec
from attnbench.attention.types import Dims


def test_builds_what_the_names_say():
    scores = torch.randn(2, 3, 4, 7)
    valid = torch.arange(7) < 5
    assert torch.equal(build_transform("softmax")(scores, valid=valid), softmax(scores, valid=valid))
    for fields in ({"k": 2}, {"ratio": 0.5, "ties": "index"}):
        built = TopKSpec.model_validate({"kind": "topk", **fields}).build(Dims(0, 1, 1, 1))
        assert torch.equal(build_transform("topk", **fields)(scores, valid=valid), built(scores, valid=valid))
    assert torch.equal(build_transform("topk", k=None)(scores), softmax(scores))
    assert torch.equal(build_transform("entmax", alpha=1.3)(scores), entmax(scores, alpha=1.3))


def test_a_learned_alpha_is_a_module_with_one_alpha_a_head():
    module = build_transform("entmax", heads=3, alpha="learned")
    assert isinstance(module, nn.Module)
    assert [parameter.shape for parameter in module.parameters()] == [(3,)]
    strict = build_transform("entmax", heads=3, alpha="learned", strict=True)
    assert isinstance(strict, nn.Module)
    assert [parameter.shape for parameter in strict.parameters()] == [(3,)]


@pytest.mark.parametrize(("name", "params", "message"), [
    ("topj", {"k": 3}, "did you mean 'topk'"),
    ("topk", {"budget": 3}, "unknown parameter 'budget'.*known: k, ratio, at_least, ties"),
    ("topk", {}, "give k, ratio or a budget"),
    ("topk", {"k": -2}, "topk: k: .*greater than or equal to 0.*-2"),
    ("topk", {"k": 2.5}, "topk: k"),
    ("topk", {"k": 2, "ratio": 0.5}, "not both"),
    ("topk", {"ratio": 2.0}, "topk: ratio"),
    ("entmax", {"alpha": 0.9}, "entmax: alpha: .*from 1 on, not 0.9"),
    ("entmax", {"alpha": "learn"}, "'learned' or a finite number"),
    ("softmax", {"heads": 0}, "at least one head"),
])  # fmt: skip
def test_what_cannot_be_built_says_why(name, params, message):
    with pytest.raises(ValueError, match=message):
        build_transform(name, **params)


@pytest.mark.parametrize("name", transforms.kinds())
@pytest.mark.parametrize("content", [float("nan"), float("inf")])
def test_strict_raises_on_what_would_become_nan(name, content):
    params: dict[str, int] = {"topk": {"k": 2}, "topk_oow": {"n": 2}}.get(name, {})
    strict, lenient = build_transform(name, strict=True, **params), build_transform(name, **params)
    scores = torch.randn(2, 1, 3, 5)
    upper = torch.ones(5) if transforms.get(name).needs_upper else None
    valid = torch.ones(3, 5, dtype=torch.bool)
    valid[1, 2] = False
    valid[2] = False
    scores[1, 0, 1, 2] = scores[0, 0, 2, 0] = content
    scores[0, 0, 0, 0] = -float("inf")
    assert torch.equal(strict(scores, valid=valid, upper=upper), lenient(scores, valid=valid, upper=upper))
    scores[1, 0, 0, 3] = content
    with pytest.raises(
        ValueError, match=r"1 valid scores are NaN or \+inf, the first (nan|inf) at index \(1, 0, 0, 3\)"
    ):
        strict(scores, valid=valid, upper=upper)
    assert lenient(scores, valid=valid, upper=upper)[1, 0, 0].isnan().all()
    with pytest.raises(ValueError, match="3 valid scores"):
        strict(scores, upper=upper)


def test_every_mechanism_is_listed_with_its_parameters_and_paper():
    found = {(item.kind, item.name): item for item in mechanisms()}
    assert len(found) == len(mechanisms())
    assert {name for kind, name in found if kind == "transform"} == set(transforms.kinds())
    assert {kind for kind, _ in found} >= {"transform", "pattern", "score", "module"}
    assert all(item.paper and item.description for item in found.values())
    alpha = found["transform", "entmax"].parameters["alpha"]
    assert (alpha.type, alpha.default, alpha.required) == ("float | learned", 1.5, False)
    topk_parameters = found["transform", "topk"].parameters
    assert [(name, item.type) for name, item in topk_parameters.items()] == [
        ("k", "int | null"), ("ratio", "float | null"), ("at_least", "int"), ("ties", "threshold | index"),
    ]  # fmt: skip
    assert all(item.description for item in topk_parameters.values())
    memory = found["module", "fixed_memory"].parameters
    assert (memory["encoder_transform"].type, memory["encoder_transform"].default) == ("transform", {"kind": "softmax"})
    assert memory["slots"].default == 32


def test_a_pattern_is_a_mask_of_the_queries_that_come_last():
    window = build_pattern("window", n=2)
    assert window.dense(3, 3).tolist() == [[True, False, False], [True, True, False], [False, True, True]]
    whole = window.dense(9, 9, "decoder_self", layer=1, head=3)
    assert torch.equal(window.dense(2, 9, "decoder_self"), whole[-2:])
    assert torch.equal(build_pattern("full").dense(2, 5, "cross"), torch.ones(2, 5, dtype=torch.bool))
    assert torch.equal(build_pattern("full").dense(2, 3, "decoder_self"), torch.ones(2, 3).tril(1).bool())


@pytest.mark.parametrize(("name", "params", "message"), [
    ("windw", {"n": 2}, "did you mean 'window'"),
    ("window", {}, "window needs to know how many positions"),
    ("window", {"n": 0}, "window: n"),
    ("window", {"n": 2, "dilation": 2}, "unknown parameter 'dilation'"),
    ("full", {"n": 2}, "unknown parameter 'n'"),
])  # fmt: skip
def test_a_pattern_that_cannot_be_is_told(name, params, message):
    with pytest.raises(ValueError, match=message):
        build_pattern(name, **params)


@pytest.mark.parametrize("make", [
    lambda: RandomSpec().layout("cross"), lambda: TopKOutOfWindowSpec().build(Dims()),
], ids=["random", "topk_oow"])  # fmt: skip
def test_nobody_counts_as_one_what_was_not_given(make):
    with pytest.raises(ValueError, match="needs to know how many"):
        make()


def test_a_mask_that_cannot_be_is_told():
    window = build_pattern("window", n=2)
    with pytest.raises(ValueError, match="cannot stand at cross"):
        window.dense(2, 2, "cross")
    with pytest.raises(ValueError, match="as many keys as queries"):
        window.dense(3, 2)
