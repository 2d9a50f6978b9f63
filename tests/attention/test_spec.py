"""AttentionSpec: default laid under the sites, budgets spent, faults told at the path that holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from attnbench.attention.patterns.base import PatternSpec, patterns
from attnbench.attention.spec import AttentionSpec, CrossSpec, SiteSpec
from attnbench.attention.transforms.base import TransformSpec, transforms
from attnbench.attention.types import ROLES, Dims, Positions
from attnbench.core.files import dump_yaml, parse_yaml
from attnbench.core.spec import dotted, problems
from attnbench.models.base import models

INF = float("inf")


def parse(raw: Any) -> AttentionSpec:
    return AttentionSpec.model_validate(raw)


def faults(raw: Any, parse: Callable[[Any], Any] = parse) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        parse(raw)
    return {dotted(path): message for path, message in problems(caught.value)}


def transforms_of(spec: AttentionSpec) -> list[dict[str, Any]]:
    return [spec.site(role).transform.canonical() for role in ROLES]


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that takes a budget, and one for self-attention alone."""

    class Near(PatternSpec):
        kind: Literal["near"] = "near"
        n: int = 1
        step: int = 1

        def mask_mod(self, role, layer=0):
            return lambda b, h, q, k: (q - k).abs() < self.n

        @classmethod
        def from_budget(cls, n: int, role) -> Self:
            return cls(n=n)

    class Own(PatternSpec):
        kind: Literal["own"] = "own"
        roles: ClassVar = frozenset({"encoder_self", "decoder_self"})

        def mask_mod(self, role, layer=0):
            return lambda b, h, q, k: q == k

    patterns.kinds()
    monkeypatch.setattr(patterns, "_members", {**patterns._members, "near": Near, "own": Own})


# ---- default and sites ----------------------------------------------------------------------------------------------


def test_nothing_said_is_dense_attention():
    spec = parse({})
    assert spec == AttentionSpec()
    assert {site.transform.kind for site in map(spec.site, ROLES)} == {"softmax"}
    assert {site.pattern.kind for site in map(spec.site, ROLES)} == {"full"}
    assert spec.canonical() == {}


def test_a_site_is_laid_over_the_default_field_by_field():
    spec = parse(
        {
            "default": {"transform": {"kind": "topk", "k": 4}, "sparsify": "train", "score": "dot"},
            "cross": {"transform": "sparsemax"},
            "decoder_self": {"sparsify": "both"},
        }
    )
    assert [site["kind"] for site in transforms_of(spec)] == ["topk", "topk", "sparsemax"]
    assert [spec.site(role).sparsify for role in ROLES] == ["train", "both", "train"]
    assert {spec.site(role).score.kind for role in ROLES} == {"dot"}


def test_a_site_replaces_the_transform_and_takes_nothing_from_the_old_one():
    spec = parse(
        {"default": {"transform": {"kind": "topk", "k": 4, "ties": "index"}}, "cross": {"transform": "entmax"}}
    )
    assert spec.cross.transform.dump() == {"kind": "entmax", "alpha": 1.5}


# ---- budgets --------------------------------------------------------------------------------------------------------


def test_a_budget_goes_to_every_site():
    assert transforms_of(parse({"default": {"transform": "topk", "budget": 8}})) == [{"kind": "topk", "k": 8}] * 3


def test_a_site_may_have_a_budget_of_its_own():
    spec = parse({"default": {"transform": "topk", "budget": 8}, "cross": {"budget": 2}})
    assert [site["k"] for site in transforms_of(spec)] == [8, 8, 2]


def test_a_site_may_drop_the_budget():
    spec = parse({"default": {"transform": "topk", "budget": 8}, "cross": {"budget": None, "transform": "softmax"}})
    assert [site["kind"] for site in transforms_of(spec)] == ["topk", "topk", "softmax"]


def test_an_inherited_budget_does_not_bind_a_site_that_takes_none():
    spec = parse({"default": {"transform": "topk", "budget": 8}, "cross": {"transform": "sparsemax"}})
    assert [site["kind"] for site in transforms_of(spec)] == ["topk", "topk", "sparsemax"]
    spec = parse({"default": {"transform": "topk", "budget": 8}, "cross": {"transform": {"kind": "topk", "k": 3}}})
    assert [site["k"] for site in transforms_of(spec)] == [8, 8, 3]


def test_an_inherited_budget_serves_a_site_whose_own_choice_takes_one():
    spec = parse({"default": {"budget": 8}, **{role: {"transform": "topk"} for role in ROLES}})
    assert transforms_of(spec) == [{"kind": "topk", "k": 8}] * 3


def test_other_fields_stay_when_a_budget_comes():
    spec = parse({"default": {"transform": {"kind": "topk", "ties": "index"}, "budget": 3}})
    assert transforms_of(spec)[0] == {"kind": "topk", "k": 3, "ties": "index"}


@pytest.mark.parametrize("infinite", ["inf", INF])
def test_an_infinite_budget_is_dense_attention(infinite):
    spec = parse({"default": {"transform": "topk", "budget": infinite}})
    assert spec == AttentionSpec()
    assert spec.digest() == AttentionSpec().digest()


@pytest.mark.usefixtures("near")
def test_a_budget_goes_to_pattern_and_transform():
    spec = parse({"default": {"transform": "topk", "pattern": "near", "budget": 5}})
    assert spec.cross.pattern.canonical() == {"kind": "near", "n": 5}
    assert spec.cross.transform.canonical() == {"kind": "topk", "k": 5}
    dense = parse({"default": {"transform": "topk", "pattern": "near", "budget": "inf"}})
    assert dense == AttentionSpec()


@pytest.mark.usefixtures("near")
def test_a_budget_passes_by_what_has_its_own_number():
    spec = parse(
        {"default": {"transform": {"kind": "topk", "k": 2}, "pattern": {"kind": "near", "step": 2}, "budget": 5}}
    )
    assert spec.cross.pattern.canonical() == {"kind": "near", "n": 5, "step": 2}
    assert spec.cross.transform.canonical() == {"kind": "topk", "k": 2}
    dense = parse({"default": {"transform": {"kind": "topk", "k": 2}, "pattern": "near", "budget": "inf"}})
    assert dense.cross.pattern.kind == "full"
    assert dense.cross.transform.canonical() == {"kind": "topk", "k": 2}


@pytest.mark.parametrize("transform", [
    "softmax", "sparsemax", "entmax15", {"kind": "topk", "k": 4}, {"kind": "topk", "ratio": 0.5},
])  # fmt: skip
@pytest.mark.parametrize("budget", [4, "inf"])
def test_a_budget_without_a_taker_is_told_at_its_node(transform, budget):
    kind = transform if isinstance(transform, str) else transform["kind"]
    for raw, path in (
        ({"default": {"transform": transform, "budget": budget}}, "default"),
        ({"cross": {"transform": transform, "budget": budget}}, "cross"),
    ):
        (found,) = faults(raw).items()
        assert found[0] == path
        assert f"the budget {budget} has no taker" in found[1]
        assert f"transform '{kind}'" in found[1]


def test_a_budget_that_only_some_sites_take_is_told_at_the_default():
    found = faults({"default": {"budget": 4}, "cross": {"transform": "topk"}})
    assert list(found) == ["default"]


@pytest.mark.parametrize("budget", [0, -1, 2.5, True, "many", [1], -INF, float("nan")])
def test_a_budget_is_a_count_or_inf(budget):
    found = faults({"default": {"transform": "topk", "budget": budget}})
    assert list(found) == ["default.budget"]
    assert "whole number of positions from 1 on, or inf" in found["default.budget"]


def test_a_budget_beyond_every_position_is_refused():
    found = faults({"default": {"pattern": "window", "budget": 10**20}, "cross": {"pattern": "full"}})
    assert "more positions than there can be; write inf" in found["default.budget"]


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("raw", "path", "words"), [
    ({"default": {"transform": "topk"}}, "default", "give k, ratio or a budget"),
    ({"cross": {"transform": "topk"}}, "cross", "give k, ratio or a budget"),
    ({"default": {"transfrom": "topk"}}, "default.transfrom", "did you mean 'transform'"),
    ({"cross": {"transfrom": "topk"}}, "cross.transfrom", "did you mean 'transform'"),
    ({"cros": {}}, "cros", "did you mean 'cross'"),
    ({"default": {"transform": "topkk"}}, "default.transform.kind", "did you mean 'topk'"),
    ({"cross": {"transform": {"kind": "topk", "kk": 2}}}, "cross.transform.kk", "did you mean 'k'"),
    ({"cross": {"transform": {"kind": "topk", "k": 2.5}}}, "cross.transform.k", "integer"),
    ({"cross": {"transform": "sigmoid", "sparsify": "train"}}, "cross", "the mean of the values in place of a sum"),
    ({"encoder_self": {"pattern": {"kind": "dilated", "n": 10**20}}}, "encoder_self.pattern.n", "2147483647"),
    ({"encoder_self": {"pattern": {"kind": "dilated", "n": 3, "dilation": 10**20}}},
     "encoder_self.pattern.dilation", "2147483647"),
    ({"encoder_self": {"pattern": {"kind": "random", "n": 3, "seed": 2**32}}},
     "encoder_self.pattern.seed", "4294967295"),
    ({"encoder_self": {"transform": {"kind": "topk_oow", "n": 10**20}}}, "encoder_self.transform.n", "2147483647"),
    ({"cross": {"transform": {"kind": "topk", "k": 10**20}}}, "cross.transform.k", "2147483647"),
    ({"cross": {"sparsify": "trian"}}, "cross.sparsify", "did you mean 'train'"),
    ({"cross": {"module": "multihed"}}, "cross.module.kind", "did you mean 'multihead'"),
    ({"cross": None}, "cross", "given: None"),
    ({"default": "topk"}, "default", "given: 'topk'"),
])  # fmt: skip
def test_a_fault_is_told_once_at_its_path(raw, path, words):
    found = faults(raw)
    assert list(found) == [path]
    assert words in found[path]


@pytest.mark.usefixtures("near")
def test_what_cannot_stand_at_a_site_is_refused():
    assert parse({"encoder_self": {"pattern": "own"}}).encoder_self.pattern.kind == "own"
    found = faults({"cross": {"pattern": "own"}})
    assert found == {"cross": "pattern 'own' cannot stand at cross (it can at: decoder_self, encoder_self)"}
    assert list(faults({"default": {"pattern": "own"}})) == ["default"]
    spec = parse({"default": {"pattern": "own"}, "cross": {"pattern": "full"}})
    assert spec.cross.pattern.kind == "full"


# ---- stages that a module does not have ------------------------------------------------------------------------------


@pytest.mark.parametrize(("site", "words"), [
    ({"module": "fixed_memory", "score": "dot"}, "the module 'fixed_memory' has no score; drop `score: dot`"),
    ({"module": "fixed_memory", "pattern": "near"}, "the module 'fixed_memory' has no pattern; drop `pattern: near`"),
    ({"module": "none", "transform": "sparsemax"}, "the module 'none' has no transform; drop `transform: sparsemax`"),
])  # fmt: skip
@pytest.mark.usefixtures("near")
def test_a_stage_that_the_module_has_not_is_refused_with_the_mend(site, words):
    assert faults({"cross": site}) == {"cross": words}
    assert faults({"cross": site}, CrossSpec.model_validate) == {"cross": words}
    assert faults({"default": site}, CrossSpec.model_validate) == {"default": words}


@pytest.mark.usefixtures("near")
def test_what_is_inherited_does_not_bind_a_module_that_has_no_such_stage():
    default = {"score": "dot", "pattern": "near", "transform": "topk", "budget": 5}
    spec = parse({"default": default, "cross": {"module": "fixed_memory"}})
    assert spec.cross.canonical() == {"module": {"kind": "fixed_memory"}, "transform": {"kind": "topk", "k": 5}}
    assert spec.encoder_self.score.kind == "dot"
    spec = parse({"default": {"pattern": "near", "budget": 5}, "cross": {"module": "fixed_memory"}})
    assert spec.cross.canonical() == {"module": {"kind": "fixed_memory"}}
    assert spec.decoder_self.pattern.canonical() == {"kind": "near", "n": 5}
    found = faults({"default": default, "cross": {"module": {"kind": "fixed_memory", "slots": 0}}})
    assert list(found) == ["cross.module.slots"]


@pytest.mark.parametrize("module", ["single_head", "fixed_memory", "none"])
def test_modules_without_a_cache_stand_at_cross_alone(module):
    assert parse({"cross": {"module": module}}).cross.module.kind == module
    for role in ("encoder_self", "decoder_self"):
        told = f"module '{module}' cannot stand at {role} (it can at: cross)"
        assert faults({role: {"module": module}}) == {role: told}


def test_the_fields_of_fixed_memory_stand_in_its_mapping():
    module = {"kind": "fixed_memory", "slots": 8, "encoder_transform": {"kind": "topk", "k": 2}}
    spec = parse({"cross": {"module": module, "transform": "sigmoid"}})
    assert spec.cross.module.canonical() == module
    assert spec.cross.transform.kind == "sigmoid"
    misspelt = {"cross": {"module": {**module, "encoder_transform": {"kind": "topk", "kk": 2}}}}
    assert list(faults(misspelt)) == ["cross.module.encoder_transform.kk"]


def test_a_transformer_without_sight_of_the_source_is_refused():
    raw = {"kind": "transformer", "attention": {"cross": {"module": "none"}}}
    (message,) = faults(raw, models.parse).values()
    assert "attention.cross: with the module 'none' a Transformer's decoder would know nothing of the source" in message
    assert "take another module, or a recurrent model" in message


# ---- models whose one site is the source -----------------------------------------------------------------------------


def test_nothing_said_of_one_site_is_additive_attention_of_one_head():
    spec = CrossSpec.model_validate({})
    assert spec == CrossSpec()
    assert spec.canonical() == {}
    kinds = [getattr(spec.cross, stage).kind for stage in ("module", "score", "pattern", "transform")]
    assert kinds == ["single_head", "additive", "full", "softmax"]


def test_cross_is_laid_over_the_default():
    default = {"transform": "topk", "budget": 4, "score": "bilinear", "sparsify": "train"}
    spec = CrossSpec.model_validate({"default": default, "cross": {"score": {"kind": "additive", "units": 7}}})
    assert spec.cross.canonical() == {
        "transform": {"kind": "topk", "k": 4},
        "score": {"kind": "additive", "units": 7},
        "sparsify": "train",
    }


@pytest.mark.parametrize(("raw", "path", "words"), [
    ({"encoder_self": {}}, "encoder_self", "unknown key 'encoder_self'"),
    ({"cros": {}}, "cros", "did you mean 'cross'"),
    ({"default": {"score": "addditive"}}, "default.score.kind", "did you mean 'additive'"),
    ({"cross": {"score": {"kind": "additive", "unit": 3}}}, "cross.score.unit", "did you mean 'units'"),
    ({"default": {"transform": "topk"}}, "default", "give k, ratio or a budget"),
    ({"cross": {"budget": 3}}, "cross", "the budget 3 has no taker"),
    ({"cross": {"budget": 3, "transform": {"kind": "topk", "k": 8, "ties": "index"}}}, "cross",
     "at cross: transform 'topk' has k: 8 of its own; drop that, or the budget"),
    ({"cross": {"budget": 3, "transform": {"kind": "topk", "ratio": 0.5}}}, "cross",
     "at cross: transform 'topk' has ratio: 0.5 of its own; drop that, or the budget"),
])  # fmt: skip
def test_a_fault_of_the_one_site_is_told_at_its_path(raw, path, words):
    found = faults(raw, CrossSpec.model_validate)
    assert list(found) == [path]
    assert words in found[path]


TOP = {"transform": {"kind": "topk", "k": 4}}
SAME_AT_ONE_SITE = [
    ({}, {"default": {}}, {"cross": {}}, {"default": {"score": "additive"}}, {"cross": {"module": "single_head"}}),
    ({"default": {"score": "dot"}}, {"cross": {"score": "dot"}},
     {"default": {"score": "additive"}, "cross": {"score": "dot"}}),
    ({"default": {"transform": "topk", "budget": 4}}, {"cross": TOP},
     {"default": {"transform": "topk"}, "cross": {"budget": 4}},
     {"default": {"budget": 4}, "cross": {"transform": "topk"}}),
    ({"default": {"module": "fixed_memory"}}, {"cross": {"module": {"kind": "fixed_memory", "slots": 32}}},
     {"cross": {"module": {"kind": "fixed_memory", "encoder_transform": {"kind": "softmax"}, "longest": None}}}),
]  # fmt: skip


@pytest.mark.parametrize("group", SAME_AT_ONE_SITE)
def test_ways_to_write_the_one_site_have_one_digest(group):
    specs = [CrossSpec.model_validate(raw) for raw in group]
    assert len({spec.digest() for spec in specs}) == 1
    for spec in specs:
        assert spec == specs[0]
        assert CrossSpec.model_validate(parse_yaml(dump_yaml(spec.dump()))[0]) == spec


def test_what_differs_at_the_one_site_has_another_digest():
    module = {"kind": "fixed_memory", "slots": 8}
    sites = [
        {}, {"score": "dot"}, {"score": {"kind": "additive", "units": 3}}, {"module": "none"}, {"module": "multihead"},
        {"module": module}, {"module": {**module, "enc_norm": "time"}}, {"module": {**module, "positions": True}},
        {"module": {**module, "encoder_transform": "sigmoid"}}, {"module": module, "transform": "sigmoid"},
    ]  # fmt: skip
    assert len({CrossSpec.model_validate({"cross": site}).digest() for site in sites}) == len(sites)


# ---- identity -------------------------------------------------------------------------------------------------------

SAME = [
    ({}, {"default": {}}, {"default": {"transform": "softmax"}}, {"cross": {"pattern": "full"}}),
    (
        {"default": {"transform": "topk", "budget": 4}},
        {"default": {"transform": {"kind": "topk", "k": 4}}},
        {role: {"transform": {"kind": "topk", "k": 4, "ties": "threshold"}} for role in ROLES},
        {"default": {"transform": "topk"}, **{role: {"budget": 4} for role in ROLES}},
    ),
    (
        {"cross": {"transform": "entmax"}},
        {"cross": {"transform": {"kind": "entmax", "alpha": 1.5}}},
        {"default": {"transform": "entmax"}, "encoder_self": {"transform": "softmax"},
         "decoder_self": {"transform": {"kind": "softmax"}}},
    ),
    (
        {"default": {"transform": {"kind": "entmax", "alpha": 2}}},
        {"default": {"transform": {"kind": "entmax", "alpha": 2.0}}},
    ),
]  # fmt: skip


@pytest.mark.parametrize("group", SAME)
def test_equal_meaning_equal_digest(group):
    specs = [parse(raw) for raw in group]
    assert len({spec.digest() for spec in specs}) == 1
    assert all(spec == specs[0] for spec in specs)


def test_different_meaning_different_digest():
    specs = [parse(group[0]) for group in SAME] + [
        parse({"default": {"transform": "topk", "budget": 5}}),
        parse({"default": {"transform": {"kind": "topk", "k": 4}, "sparsify": "train"}}),
        parse({"cross": {"transform": {"kind": "topk", "k": 4}}}),
        parse({"encoder_self": {"transform": {"kind": "topk", "k": 4}}}),
        parse({"default": {"transform": {"kind": "topk", "k": 4, "ties": "index"}}}),
        parse({"default": {"score": "dot"}}),
    ]
    assert len({spec.digest() for spec in specs}) == len(specs)


SITES = st.fixed_dictionaries({}, optional={
    "transform": st.sampled_from(["softmax", "topk", "sparsemax", "entmax15", {"kind": "topk", "k": 3},
                                  {"kind": "topk", "ties": "index"}, {"kind": "topk", "ratio": 0.25},
                                  {"kind": "entmax", "alpha": "learned"}]),
    "budget": st.sampled_from([1, 4, "inf", INF, None]),
    "sparsify": st.sampled_from(["train", "both"]),
    "score": st.sampled_from(["dot", "scaled_dot", {"kind": "dot"}]),
    "pattern": st.sampled_from(["full", {"kind": "full"}]),
})  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(raw=st.fixed_dictionaries({}, optional=dict.fromkeys(("default", *ROLES), SITES)))
def test_a_parsed_spec_survives_its_dump(raw):
    """Parsing is idempotent, through YAML too, and no budget is left to be spent."""
    try:
        spec = parse(raw)
    except ValidationError:
        return
    again = parse(parse_yaml(dump_yaml(spec.dump()))[0])
    assert again == spec
    assert again.digest() == spec.digest()
    assert again.dump() == spec.dump()
    assert parse(spec) is spec
    assert spec.replace() == spec
    for role in ROLES:
        site = spec.site(role)
        assert site.budget is None
        assert site.resolved(role) == site


def test_a_spec_made_in_python_is_the_one_made_from_text():
    top = transforms.parse({"kind": "topk", "k": 4})
    by_objects = AttentionSpec(default=SiteSpec(transform=top), cross=SiteSpec(score="dot"))  # pyright: ignore
    by_text = parse(
        {"default": {"transform": {"kind": "topk", "k": 4}}, "cross": {"transform": "softmax", "score": "dot"}}
    )
    assert by_objects == by_text


def test_members_take_what_they_say():
    """from_budget gives a spec that needs nothing more, at each site."""
    for kind in transforms.kinds():
        cls: type[TransformSpec] = transforms.get(kind)
        for role in cls.roles:
            filled = cls.from_budget(4, role)
            if filled is not None:
                filled.require()
                assert filled.digest() == SiteSpec(transform=kind, budget=4).resolved(role).transform.digest()


@pytest.mark.parametrize("role", ["encoder_self", "decoder_self"])
@pytest.mark.parametrize("pattern", [kind for kind in patterns.kinds() if "n" in patterns.get(kind).model_fields])
@pytest.mark.parametrize("transform", ["topk", "topk_oow"])
def test_a_transform_that_is_said_to_change_nothing_is_softmax_there(role, pattern, transform):
    """And one that does is not said to: with fewer positions than the pattern's, some row loses a key."""
    positions = Positions(torch.arange(12), torch.arange(12))
    states = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))
    valid = torch.arange(12) < torch.tensor([[12], [7]])
    told = {}
    for n in range(1, 12):
        raw = {"pattern": {"kind": pattern, "n": 4, **({"seed": 3} if patterns.get(pattern).drawn else {})}}
        name = "k" if transform == "topk" else "n"
        site = SiteSpec.model_validate({**raw, "transform": {"kind": transform, name: n}})
        told[n] = "transform" in dict(site.unused_at(role))
        weights = []
        for each in (site, SiteSpec.model_validate(raw)):
            torch.manual_seed(1)
            module = each.build(role, 8, Dims(0, 2, 8, 8), 0.0).eval()
            memory = module.memorize(states, valid if role == "encoder_self" else None, need_weights=True)
            weights.append(module(states, memory, positions, need_weights=True).weights)
        if told[n]:
            torch.testing.assert_close(*weights)
        elif transform == "topk" and n < 4 and pattern != "bigbird":
            assert not torch.equal(*weights)
    one_sided = role == "encoder_self" and pattern in ("global", "bigbird")
    known = ("bigbird", "block", "dilated", "global", "random", "window")
    assert told[11] == (not one_sided if pattern in known else patterns.get(pattern)(n=4).most(role) is not None)
