"""What a plan times is what it says: which mechanisms, models and packages, beside what, and how cost grows."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from attnbench.attention.patterns.base import patterns
from attnbench.attention.patterns.window import WindowSpec
from attnbench.attention.transforms.base import transforms
from attnbench.attention.transforms.softmax import SoftmaxSpec
from attnbench.attention.transforms.topk import TopKSpec
from attnbench.bench import models, ops, plans, scaling, sentences, subjects
from attnbench.bench.processes import Recipe
from attnbench.bench.timer import Case, Timing, Yardstick
from attnbench.train.runtime import Runtime

CPU = torch.device("cpu")
SHAPE = (2, 3, 5, 9)


def test_backends_stand_side_by_side_on_a_processor(monkeypatch):
    seen = []
    monkeypatch.setattr(plans, "measure", lambda cases, **given: seen.extend(cases) or [])
    monkeypatch.setattr(ops, "SHAPES", ((1, 2, 9, 9),))
    for quick in (True, False):
        seen.clear()
        assert list(plans.ops_sections(plans.Plan(Runtime(CPU), 1, quick, [])))
        names = {case.name for case in seen}
        of_torch = {name for name in names if name.endswith("(torch)")}
        dense = {name for name in names if name.endswith("(dense)")}
        if quick:
            assert not of_torch | dense
            continue
        assert of_torch == {f"{name} (torch)" for name in (*ops.TRANSFORMS, ops.TRAINED)}
        assert dense == {f"{name}, n = 2 (dense)" for name in ops.PATTERNS}
    for case in seen:
        if case.name.endswith(("(torch)", "(dense)")):
            assert plans.Plan(Runtime(CPU), 1, False, [], only=[ops.kind_of(case.name)]).wants(case.name)
            case.run()
            assert (case.check is None) is case.name.endswith("(torch)")  # it is what others are checked with


def test_a_plan_has_those_mechanisms_that_are_asked_for_beside_what_they_are_compared_with():
    plan = plans.Plan(Runtime(CPU), 1, True, [], only=["entmax", "window"])
    names = [
        *ops.TRANSFORMS, ops.TRAINED, "window, n = 32 (flex)", "topk, k = 8 (triton)", "SDPA", ops.BASELINE,
        "entmax: entmax15",
    ]  # fmt: skip
    assert [name for name in names if plan.wants(name)] == [
        "softmax", "entmax, alpha = 1.3", "entmax, learned alpha", ops.TRAINED, "window, n = 32 (flex)", "SDPA",
        ops.BASELINE, "entmax: entmax15",
    ]  # fmt: skip
    assert all(map(plan._replace(only=()).wants, names))


def test_what_can_be_timed():
    kinds = {what: plans.kinds_of(what) for what in plans.PLANS}
    assert {"csoftmax", "topk", "window", "topk_oow"} <= kinds["ops"]
    assert "csoftmax" in kinds["transforms"]
    assert not {"window", "topk_oow"} & kinds["transforms"]
    for what in ("attention", "train", "decode"):
        assert {"topk_oow", "sigmoid", "window", "bigbird"} <= kinds[what]
        assert not {"csoftmax", "full"} & kinds[what]
    assert kinds["scaling"] == set()


def test_what_is_timed_where_it_is_asked_for_alone():
    assert plans.beyond("train", ["window", "topk", "csoftmax", "sigmoid"]) == ["window", "sigmoid"]
    assert plans.beyond("decode", ["window", "block"]) == ["block"]
    assert plans.beyond("transforms", ["topk", "topk_oow", "csoftmax"]) == []
    assert plans.beyond("ops", ["topk_oow"]) == ["topk_oow"]
    assert plans.beyond("scaling", ["topk_oow"]) == []


@pytest.mark.parametrize("what", ["transforms", "attention", "train", "decode"])
def test_what_is_not_asked_for_is_not_timed(what, monkeypatch):
    names = []

    def measured(cases, **more):
        names.extend(case.name for case in cases)
        return []

    monkeypatch.setattr(plans, "measure", measured)
    monkeypatch.setattr(models, "training", lambda subject, *rest: _named(subject.name))
    monkeypatch.setattr(models, "decoding", lambda subject, *rest: _named(subject.name))
    plan = plans.Plan(Runtime(CPU), 1, True, [], only=["topk"])
    for _ in plans.PLANS[what](plan):
        pass
    assert set(names) >= {"softmax", "topk, k = 8"}
    assert set(names) <= {"softmax", "topk, k = 8", "SDPA", ops.BASELINE, "softmax, int8"}


OTHERS = [
    ("transforms", {"kept, k = 8", "plain"}), ("attention", {"kept, k = 8", "plain", "every, n = 8"}),
    ("train", {"kept, k = 8", "plain", "every, n = 8"}), ("decode", {"kept, k = 8", "plain", "every, n = 8"}),
]  # fmt: skip


@pytest.mark.parametrize(("what", "wanted"), OTHERS, ids=[what for what, _ in OTHERS])
def test_ones_own_mechanisms_are_timed_where_they_are_asked_for(what, wanted, own_mechanisms, monkeypatch):
    names = []

    def measured(cases, **more):
        for case in cases:
            assert case.check is None or case.check() < 1e-5
            case.run()
            names.append(case.name)
        return []

    monkeypatch.setattr(plans, "measure", measured)
    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(sentences, "TOKENS", 200)
    monkeypatch.setattr(sentences, "STEPS", 4)
    monkeypatch.setattr(plans.Plan, "shapes", property(lambda plan: [(2, 5)]))
    monkeypatch.setattr(ops, "SHAPES", ((1, 2, 32, 32),))
    only = [kind for kind in ("kept", "plain", "every") if kind in plans.kinds_of(what)]
    for _ in plans.PLANS[what](plans.Plan(Runtime(CPU), 1, True, [], only=only)):
        pass
    assert set(names) - {"softmax", "SDPA", ops.BASELINE, "softmax, int8"} == wanted


@pytest.fixture
def own_mechanisms(monkeypatch):
    """A transform of a budget, one that takes none, and a pattern."""

    class KeptSpec(TopKSpec):
        kind: Literal["kept"] = "kept"

    class PlainSpec(SoftmaxSpec):
        kind: Literal["plain"] = "plain"

    class EverySpec(WindowSpec):
        kind: Literal["every"] = "every"

    monkeypatch.setattr(transforms, "_members", {**transforms._members, "kept": KeptSpec, "plain": PlainSpec})
    monkeypatch.setattr(patterns, "_members", {**patterns._members, "every": EverySpec})


def _named(name):
    return Case("a group", name, lambda: None)


def test_exponents():
    def timing(name, size, *rounds):
        return size, Timing(f"length {size}", name, 7.0, 7.0, 7.0, 0, 1, None, rounds=rounds)  # no medians of times

    straight = [timing("a", n, 3e-6 * n**1.5) for n in (100, 10, 1000)]
    bent = [timing("b", 10, 1, 1, 1), timing("b", 100, 1, 10, 1), timing("b", 1000, 100, 100, 10_000)]
    assert scaling.exponents([*straight, *bent, timing("c", 10, 1.0)]) == {
        "a": (pytest.approx(1.5), 10, 1000, None, pytest.approx(1.5)),
        "b": (pytest.approx(1.0), 10, 1000, pytest.approx(0.5), pytest.approx(2.0)),  # by rounds 1, 1, 2 and 2, 1, 4
    }
    assert scaling.exponents(straight[:2])["a"].last is None  # it is the whole


def test_cost_is_told_group_by_group(monkeypatch):
    def cases(*given):
        for what, size in (("length", 1), ("length", 2), ("k", 1), ("k", 2)):
            yield what, size, size

    monkeypatch.setattr(scaling, "cases", cases)
    plan = plans.Plan(Runtime(CPU), 1, True, [])
    monkeypatch.setattr(
        plans.Plan,
        "time",
        lambda self, made, yardstick, **more: [Timing("g", "a", n, n, n, 0, 1, None, rounds=(n,)) for n in made],
    )
    found = [
        [(each.title, each.exponents, each.limit) for each in sections] for sections in plans.scaling_sections(plan)
    ]
    slopes = {"a": (pytest.approx(1.0), 1, 2, None, None)}
    whole = [
        ("cost against length", slopes, "matrix products"), ("cost against k", slopes, "copies of the scores"),
    ]  # fmt: skip
    assert found == [whole[:1], whole]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_grows_is_timed_in_its_own_precision(precision, monkeypatch):
    """By its check, and beside products of the same numbers."""
    real = scaling.cases
    monkeypatch.setattr(scaling, "cases", lambda lengths, *given: (
        each for each in real((16, 32), *given) if each[1] <= 1000))  # fmt: skip
    monkeypatch.setattr(scaling, "scores", lambda device: torch.randn(2, 2, 4, 300))
    beside = []
    monkeypatch.setattr(plans, "products", lambda device, dtype: beside.append(dtype) or Yardstick(int, 1.0))
    *_, found = plans.scaling_sections(plans.Plan(Runtime(CPU, precision), 1, True, []))
    assert [each.title.split()[-1] for each in found] == ["length", "k", "slots", "vocabulary"]
    assert all(timing.error < (1e-2 if precision == "bf16" else 1e-4) for each in found for timing in each.timings)
    assert beside[0] == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert set(beside[1:]) == {torch.float32}


def test_transforms_are_timed_beside_copies_of_all_scores(monkeypatch):
    seen = []
    monkeypatch.setattr(plans.ops, "SHAPES", ((2, 3, 5, 7), (1, 1, 2, 2)))
    monkeypatch.setattr(plans.Plan, "time", lambda self, made, yardstick, **more: seen.append(yardstick.cost) or [])
    list(plans.transforms_sections(plans.Plan(Runtime(CPU), 1, False, [])))
    assert seen == [2 * 2 * 3 * 5 * 7 * 4, 2 * 4 * 4]


def test_other_packages_are_timed_in_processes_that_rest_and_training_is_of_torch_as_shipped(monkeypatch):
    from attnbench.bench import nn_transformer, peers

    seen = []
    case = Case("mini", "softmax", int, 4.0)
    started = contextlib.nullcontext([SimpleNamespace(case=case)])
    monkeypatch.setattr(plans, "together", lambda *given: started)
    monkeypatch.setattr(plans, "with_peaks", lambda timings, *given: timings)
    monkeypatch.setattr(models, "training", lambda subject, *given: case._replace(group=subject.group))
    timing = Timing("mini", "softmax", 1.0, 1.0, 1.0, 1.0, 4.0, None)
    monkeypatch.setattr(plans, "measure", lambda cases, **given: seen.append(given) or [timing])
    plan = plans.Plan(Runtime(CPU), 1, True, peers.find(["torch"]), ["mini"], ["topk"])
    (sections,) = plans.train_sections(plan)
    assert [section.baseline for section in sections] == [(nn_transformer.SHIPPED,), ("softmax",)]
    assert "as shipped" in nn_transformer.SHIPPED
    # threads of another package wait in a loop for 0.2 s after their work
    assert [given["rest"] > 0.2 for given in seen] == [True, False]
    assert seen[0]["device"] == CPU


@pytest.mark.parametrize("of", ["families", "cells"])
def test_models_of_every_kind_are_timed_beside_torchs_each_with_its_own(of, monkeypatch, caplog):
    from attnbench.bench import nn_kinds, peers

    def beside(self: plans.Plan, recipes: list[Recipe], *, peaks: bool) -> list[Timing]:
        made = [recipe.make(*recipe.given) for recipe in recipes]
        return [Timing(case.group, case.name, 1.0, 1.0, 1.0, 1.0, case.work, None) for case in made]

    monkeypatch.setattr(sentences, "WORDS", 60)
    monkeypatch.setattr(plans.Plan, "beside", beside)
    monkeypatch.setattr(plans, "_trained", lambda *given: [])
    monkeypatch.setattr(plans.Plan, "of_sizes", [])
    plan = plans.Plan(Runtime(CPU), 1, True, peers.find(["torch"]))
    known = subjects.families(8, 200)
    if of == "cells":
        plan = plan._replace(cells=known)
    else:
        monkeypatch.setattr(plans.Plan, "families", known)
    with caplog.at_level("WARNING", logger="attnbench"):
        *_, (found, rest) = plans.train_sections(plan)
    lacking = [record.getMessage() for record in caplog.records]
    assert lacking == [
        f"--against torch: '{name}' stands beside nothing, for it has no such model"
        for name in ("LSTM, csparsemax", "LSTM, fixed-size memory")
    ]
    titles = {
        "families": (plans._TRAINING_KINDS_BESIDE, plans._TRAINING_KINDS),
        "cells": (plans._TRAINING_CELLS_BESIDE, plans._TRAINING_CELLS),
    }
    assert (found.title, rest.title) == titles[of]
    assert found.baseline == (nn_kinds.SHIPPED,)
    assert [(each.group, each.name) for each in found.timings] == [
        (f"8 wide, {name}", made)
        for name in ("Transformer", "LSTM, no attention", "LSTM, softmax", "GRU, additive", "ConvS2S")
        for made in (nn_kinds.OURS, nn_kinds.SHIPPED, nn_kinds.SET_UP)
    ]  # fmt: skip
    assert len({each.work for each in found.timings}) == 1


def test_what_grows_runs():
    made = list(scaling.cases([16, 32], CPU))
    assert {what for what, _, _ in made} == {"length", "k", "memory slots", "vocabulary"}
    for what, size, case in made:
        if what != "vocabulary" or size == 1000:
            case.run()
            assert case.check() < 1e-4
            assert case.cost() > 0
    assert next(case for what, _, case in made if what == "vocabulary").cost() == 3 * 2 * 512 * scaling.WIDTH * 1000


def test_a_gradient_of_attention_that_is_wrong_is_found():
    cases = list(ops.attention_cases(((1, 2, 12, 12),), CPU, torch.float32, n=4))
    both = [case for case in cases if case.group.endswith("backward")]
    assert all(case.check() < 1e-5 for case in both if case.check is not None)
    plain = ops.Mixer(ops.Method(), 2, CPU)
    given = [torch.randn(1, 2, 12, ops.HEAD) for _ in range(3)]
    assert ops.slopes_apart(lambda query, key, value: plain(query, key, value.detach() * 2 - value), plain, given) > 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_stands_beside_other_packages_has_a_share_where_it_is_known(precision, monkeypatch):
    """Of as many operations as ours has; not what rounds to 8 bits, nor float32 beside products in bfloat16."""

    def made(name: str, cost: float | None = None, coarse: bool = False) -> Case:
        return Case("tiny", name, lambda: None, 3.0, cost=None if cost is None else lambda: cost, coarse=coarse)

    recipes = [Recipe(made, ("ours", 5.0)), Recipe(made, ("theirs",)), Recipe(made, ("theirs, int8", None, True))]

    @contextlib.contextmanager
    def together(given, *others):
        yield [SimpleNamespace(case=recipe.make(*recipe.given)._replace(cost=None)) for recipe in given]

    monkeypatch.setattr(plans, "together", together)
    monkeypatch.setattr(plans, "_REST", 0)
    monkeypatch.setattr(plans.Plan, "products", Yardstick(lambda: None, 1.0))
    timed = plans.Plan(Runtime(CPU, precision), 1, True, []).beside(recipes)
    assert [each.share is not None for each in timed] == [True, precision == "fp32", False]
    assert [each.pace for each in timed] == [None] * 3
    done = [each.share * each.rounds[0] for each in timed if each.share is not None]
    assert done == pytest.approx([done[0]] * len(done))  # as much, in whatever time
    untold = [Recipe(made, ("ours",)), *recipes[1:]]
    assert all(each.share is None for each in plans.Plan(Runtime(CPU), 1, True, []).beside(untold))
