import pytest
import torch
from pydantic import ValidationError

from attnbench.models.base import Source
from attnbench.search import base
from attnbench.search.base import searches


def room(ratio, extra, *lengths):
    valid = torch.arange(max(lengths) or 1) < torch.tensor(lengths)[:, None]
    return searches.parse({"kind": "greedy", "max_ratio": ratio, "max_extra": extra}).room(Source(valid.long(), valid))


def test_room_is_a_matter_of_each_source():
    assert room(1.2, 10, 25, 4, 0).tolist() == [40, 14, 10]
    assert room(0.5, 0, 5, 1, 0).tolist() == [2, 1, 1]  # at least one token
    assert room(0.0, 3, 9, 2).tolist() == [3, 3]
    assert room(1.1, 0, 10, 30).tolist() == [11, 33]  # 1.1 * 10 is a little above 11 and no less
    assert room(1.15, 0, 100, 20).tolist() == [115, 23]  # 1.15 * 100 is a little below 115
    assert room(1000.0, 7, 200_000).tolist() == [200_000_007]


@pytest.mark.parametrize("kind", ["greedy", "beam"])
def test_fields_that_make_no_sense_are_refused(kind):
    for field, value in (
        ("max_ratio", -1.0),
        ("max_ratio", float("inf")),
        ("max_extra", -1),
        ("max_extra", 1.5),
        ("max_ratio", 1e20),
        ("max_ratio", float("nan")),
        ("max_extra", 10**19),
    ):
        with pytest.raises(ValidationError, match=field):
            searches.parse({"kind": kind, field: value})


def test_other_kinds_of_numbers_are_refused():
    assert searches.parse({"kind": "greedy", "quantization": "int8"}).canonical() == {
        "kind": "greedy", "quantization": "int8",
    }  # fmt: skip
    with pytest.raises(ValidationError, match="int8"):
        searches.parse({"kind": "greedy", "quantization": "int4"})


@pytest.mark.parametrize(("asked", "known", "used"), [
    ("bf16", True, torch.bfloat16), ("bf16", False, torch.float32), ("fp32", True, torch.float32),
])  # fmt: skip
def test_a_search_computes_in_its_precision_where_the_device_has_it(asked, known, used, monkeypatch):
    monkeypatch.setattr(base, "multiplies_bfloat16", lambda device: known)
    spec = searches.parse({"kind": "greedy", **({} if asked == "fp32" else {"precision": asked})})
    assert spec.canonical() == {"kind": "greedy", **({} if asked == "fp32" else {"precision": asked})}
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 4))
    with base.computing(model, spec):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is used
        assert model(torch.ones(1, 3)).dtype is used
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16), base.computing(model, spec):  # as a training decodes
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def test_weights_of_8_bits_go_with_either_precision(monkeypatch):
    monkeypatch.setattr(base, "multiplies_bfloat16", lambda device: True)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4))
    for precision in ("fp32", "bf16"):
        spec = searches.parse({"kind": "greedy", "precision": precision, "quantization": "int8"})
        with base.computing(model, spec), torch.no_grad():
            assert vars(model[0])["forward"].dtype == torch.int8
            assert model(torch.ones(1, 3)).dtype is torch.float32


def test_beam_fields():
    with pytest.raises(ValidationError, match=r"n_best \(3\) is larger than the beam \(size 2\)"):
        searches.parse({"kind": "beam", "size": 2, "n_best": 3})
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        searches.parse({"kind": "beam", "size": 0})
    with pytest.raises(ValidationError, match="less than or equal to 10000"):
        searches.parse({"kind": "beam", "size": 1 << 16})
    for kind in ("avg", "wu"):
        with pytest.raises(ValidationError, match="less than or equal to 10"):
            searches.parse({"kind": "beam", "penalty": {"kind": kind, "alpha": 400}})
    with pytest.raises(ValidationError, match="did you mean 'avg'"):
        searches.parse({"kind": "beam", "penalty": "avgg"})


@pytest.mark.parametrize("kind", searches.kinds())
@pytest.mark.parametrize("seed", range(3))
def test_what_a_source_gets_depends_on_it_alone(lab, kind, seed):
    """And it is told as `Hypothesis` has it: tokens without BOS and EOS, and their probability."""
    model, lengths = lab.toy(seed, eos=1.0), (5, 0, 9, 3)
    source, special, search = lab.sources(*lengths, seed=seed), lab.special, searches.parse(kind).build()
    found = search(model, source, special)
    assert len(found) == len(lengths)
    for row, (length, hypotheses) in enumerate(zip(lengths, found, strict=True)):
        assert hypotheses
        own = lab.alone(source, row, length)
        assert search(model, own, special) == [hypotheses]
        for each in hypotheses:
            assert not {special.bos, special.eos, special.pad} & set(each.tokens)
            assert len(each.tokens) + each.finished <= int(search.spec.room(own))
            assert each.log_prob == pytest.approx(lab.rescore(model, own, each))


def test_specs_survive_yaml_and_have_stable_names():
    assert set(searches.kinds()) >= {"beam", "greedy"}
    spec = searches.parse({"kind": "beam", "size": 4, "penalty": {"kind": "wu", "alpha": 1}, "n_best": 2})
    assert spec.dump() == {
        "kind": "beam",
        "max_ratio": 1.2,
        "max_extra": 10,
        "precision": "fp32",
        "quantization": None,
        "size": 4,
        "penalty": {"kind": "wu", "alpha": 1.0},
        "coverage": None,
        "n_best": 2,
    }
    assert searches.parse(spec.dump()) == spec
    assert searches.parse(spec.dump()).digest() == spec.digest()
