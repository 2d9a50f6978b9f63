"""`attnbench speed`: a report on stdout and in files, comparison with an earlier one, and what is no option."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch

from attnbench.attention.transforms.base import transforms
from attnbench.attention.transforms.softmax import SoftmaxSpec
from attnbench.bench import machine, ops, plans, run, sentences, subjects
from attnbench.bench.plot import draw
from attnbench.bench.run import Report
from attnbench.bench.timer import Case
from attnbench.cli import common
from attnbench.cli.speed import cells_of
from attnbench.core import contention
from attnbench.models.base import models
from attnbench.train import runtime


@pytest.fixture(autouse=True)
def _small(tmp_path, monkeypatch):
    """Small cases, and no pictures; the number of threads is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ops, "SHAPES", ((2, 2, 3, 5),))
    monkeypatch.setattr(machine, "_SIDE", {"cpu": 64})
    monkeypatch.setattr(machine, "_BYTES", {"cpu": 1 << 12})
    monkeypatch.setattr(machine, "_FREED", 1 << 12)
    monkeypatch.setattr(run, "draw", lambda sections, path: bool(path.write_text("<svg/>")))
    monkeypatch.setattr(plans, "measure", lambda cases, **given: _measure(cases, **{**given, "chunk": 1e-4}))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


_measure = plans.measure
RUN = ("speed", "ops", "--quick", "--rounds", "1", "--threads", "1")


def test_a_report_for_people_and_in_files(invoke):
    result = invoke(*RUN, "--against", "entmax", "--out", "found")
    for word in ("transforms of scores", "torch.softmax", "entmax: sparsemax", "SDPA", "GFLOP/s", "threads"):
        assert word in result.stdout
    document = json.loads(Path("found/speed.json").read_text())
    assert document["command"].startswith("attnbench")
    assert document["signature"]["threads"] == 1
    assert list(document["peers"]) == ["entmax"]
    transforms = document["sections"][0]
    assert {each["name"] for each in transforms["timings"]} >= {*ops.TRANSFORMS, ops.BASELINE, "entmax: entmax15"}
    for each in transforms["timings"]:
        assert each["low"] <= each["median"] <= each["high"]
        assert each["relative"] > 0
    assert "| torch.softmax |" in Path("found/speed.md").read_text()


def test_a_picture_where_matplotlib_is_and_a_word_where_it_is_not(invoke, monkeypatch):
    from attnbench.bench import plot

    monkeypatch.setattr(plot.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    monkeypatch.setattr(run, "draw", draw)
    result = invoke(*RUN, "--out", "found")
    assert "no speed.svg" in result.stderr
    assert not Path("found/speed.svg").exists()
    assert Path("found/speed.md").exists()


def test_what_was_measured_before_a_fault_is_kept_and_so_is_an_earlier_measurement(invoke, monkeypatch):
    invoke(*RUN, "--out", "found")
    whole = Path("found/speed.json").read_text()
    assert sorted(path.name for path in Path("found").iterdir() if path.suffix != ".svg") == ["speed.json", "speed.md"]
    assert json.loads(whole)["finished"]
    wrong = [Case("2x2x3x5", "wrong", lambda: None, check=lambda: 1.0)]
    with monkeypatch.context() as patch:
        patch.setattr(ops, "attention_cases", lambda *given, **more: wrong)
        said = invoke(*RUN, "--out", "found", code=1).stderr
    assert "wrong (2x2x3x5) lies 1.0e+00 from its definition" in said
    assert "what was measured before is in found/unfinished.md" in said
    assert Path("found/speed.json").read_text() == whole
    part = json.loads(Path("found/unfinished.json").read_text())
    assert not part["finished"]
    assert part["sections"] == [{**part["sections"][0], "title": "transforms of scores"}]
    assert "- not finished" in Path("found/unfinished.md").read_text()
    assert "was not finished" in invoke(*RUN, "--compare", "found/unfinished.json", code=2).stderr
    invoke(*RUN, "--out", "found")
    assert not Path("found/unfinished.json").exists()
    assert not Path("found/unfinished.md").exists()


def test_an_interrupt_says_where_the_figures_are(invoke, monkeypatch):
    def interrupted(*given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(ops, "attention_cases", interrupted)
    said = invoke(*RUN, "--out", "found", code=130).stderr
    assert "what was measured before is in found/unfinished.md" in said
    assert "to go on" not in said


def test_a_folder_that_fails_meanwhile_stops_nothing(invoke, monkeypatch):
    monkeypatch.setattr(Report, "write_unfinished", lambda *given: (_ for _ in ()).throw(OSError("no space left")))
    said = invoke(*RUN, "--out", "found").stderr
    assert "--out found: what is measured so far could not be kept: no space left" in said
    assert Path("found/speed.json").is_file()


def test_json_alone_on_stdout(invoke):
    result = invoke(*RUN, "--json")
    assert json.loads(result.stdout)["schema_version"] == 1


def scale(document, factor):
    """As if all ratios had been so many times as high."""
    for section in document["sections"]:
        for each in section["timings"]:
            for name in ("best", "pace"):
                each[name] = each[name] and each[name] * factor


def test_comparison_with_an_earlier_run(invoke):
    invoke(*RUN, "--out", "found")
    path = Path("found/speed.json")
    document = json.loads(path.read_text())
    scale(document, 1e-3)
    path.write_text(json.dumps(document))
    assert "0 of" in invoke(*RUN, "--compare", str(path)).stderr
    scale(document, 1e9)
    path.write_text(json.dumps(document))
    result = invoke(*RUN, "--compare", str(path), code=1)
    assert "fell: transforms of scores: sparsemax" in result.stderr


@pytest.mark.parametrize(("factor", "code"), [(1e9, 1), (1e-3, 0)])
def test_what_is_compared_with_stays(factor, code, invoke):
    """Also where nothing fell: many runs, each a little slower than the last, would never be told."""
    invoke(*RUN, "--out", "found")
    path = Path("found/speed.json")
    document = json.loads(path.read_text())
    scale(document, factor)
    path.write_text(json.dumps(document))
    for _ in range(2):
        said = invoke(*RUN, "--out", "found", "--compare", str(path), code=code).stderr
    assert "found/speed.json stays what later runs are compared with; this run is in found/now.json" in said
    assert json.loads(path.read_text()) == document
    assert json.loads(Path("found/now.json").read_text())["finished"]


@pytest.mark.parametrize("shown", [(), ("--json",)])
def test_a_reader_who_left_hides_no_fall(shown, invoke, monkeypatch):
    invoke(*RUN, "--out", "found")
    path = Path("found/speed.json")
    document = json.loads(path.read_text())
    scale(document, 1e9)
    path.write_text(json.dumps(document))
    monkeypatch.setattr(Report, "show", lambda *given: sys.exit(1))  # as rich does
    monkeypatch.setattr(common, "emit_json", lambda *given: (_ for _ in ()).throw(BrokenPipeError()))
    assert "ratios fell by more than" in invoke(*RUN, "--compare", str(path), *shown, code=1).stderr


def test_a_case_that_is_no_longer_measured_is_told(invoke):
    invoke(*RUN, "--out", "found")
    path = Path("found/speed.json")
    document = json.loads(path.read_text())
    timings = document["sections"][0]["timings"]
    timings.append({**timings[0], "name": "halfmax"})
    path.write_text(json.dumps(document))
    result = invoke(*RUN, "--compare", str(path), "--tolerance", "1", code=1)
    assert f"gone: transforms of scores: halfmax ({timings[0]['group']}) was measured then" in result.stderr


def test_a_part_is_compared_with_the_same_part(invoke, monkeypatch):
    invoke(*RUN, "--only", "topk", "--out", "found")
    path = Path("found/speed.json")
    document = json.loads(path.read_text())
    scale(document, 1e-3)
    path.write_text(json.dumps(document))
    assert "0 of" in invoke(*RUN, "--only", "topk", "--compare", str(path)).stderr
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    said = invoke(*RUN, "--only", "topk,sparsemax", "--compare", str(path), code=2).stderr
    assert "what the earlier measurement has besides would be gone" in said


def test_figures_that_were_taken_beside_other_programs_say_so(invoke, monkeypatch):
    monkeypatch.setattr(contention, "waited", dict)
    assert "other programs" not in invoke(*RUN, "--only", "topk").stdout
    shares = itertools.count(1.0)
    monkeypatch.setattr(contention, "_PERIOD", 0.001)
    monkeypatch.setattr(contention, "waited", lambda: {"1": next(shares)})
    result = invoke(*RUN, "--only", "topk", "--out", "found")
    assert "other programs used the same processor cores for" in result.stdout
    assert json.loads(Path("found/speed.json").read_text())["shared_seconds"] > 0


def test_figures_of_other_work_are_not_compared(invoke, monkeypatch):
    command = ("speed", "train", "--quick", "--rounds", "1", "--threads", "1", "--size", "tiny", "--only", "topk")
    monkeypatch.setattr(sentences, "TOKENS", 200)
    result = invoke(*command, "--out", "found")
    assert "at most 200 padded tokens a side" in result.stdout
    path = Path("found/speed.json")
    assert json.loads(path.read_text())["work"]["padded tokens a side"] == 200
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    monkeypatch.setattr(sentences, "TOKENS", 100)
    said = invoke(*command, "--compare", str(path), code=2).stderr
    assert "these figures are not of the same kind: padded tokens a side (200, now 100)" in said
    monkeypatch.setattr(sentences, "TOKENS", 200)
    monkeypatch.setitem(subjects.SIZES, "tiny", {**subjects.SIZES["tiny"], "layers": 1})
    assert "not of the same kind: another model 'tiny'" in invoke(*command, "--compare", str(path), code=2).stderr


def test_a_package_that_stands_beside_nothing_is_named_where_others_do(invoke):
    result = invoke(*RUN, "--against", "torch,sdpa")
    assert (
        "--against torch: it does nothing that could be timed beside ops on cpu; the others are timed" in result.stderr
    )


def test_nothing_in_common_is_no_success(invoke):
    invoke(*RUN, "--out", "found")
    path = Path("found/speed.json")
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "sections": []}))
    assert "no figure in common" in invoke(*RUN, "--compare", str(path), code=2).stderr


def test_figures_of_another_kind_are_not_compared(invoke, monkeypatch):
    invoke(*RUN, "--out", "found")
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    path = Path("found/speed.json")
    document = json.loads(path.read_text())
    document["signature"]["threads"] = 99
    path.write_text(json.dumps(document))
    result = invoke(*RUN, "--compare", str(path), code=2)
    assert "threads (99, now 1)" in result.stderr


def test_bfloat16_is_measured_where_it_would_be_used(invoke, monkeypatch):
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    monkeypatch.setattr(runtime, "multiplies_bfloat16", lambda device: False)
    assert "training takes float32 instead; measure fp32" in invoke(*RUN, "--precision", "bf16", code=3).stderr


@pytest.mark.parametrize(("what", "kind", "said"), [
    ("transforms", "window", "--only window: transforms does not time it; leave it out"),
    ("train", "csoftmax", "--only csoftmax: train does not time it; leave it out"),
    ("scaling", "topk", "--only: scaling times all its cases; leave it out"),
])  # fmt: skip
def test_mechanisms_that_would_not_be_timed(invoke, monkeypatch, what, kind, said):
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    assert said in invoke("speed", what, "--only", kind, code=2).stderr


def test_one_that_neither_a_budget_nor_defaults_make_is_told_before_anything_is_timed(invoke, monkeypatch):
    class BareSpec(SoftmaxSpec):
        kind: Literal["bare"] = "bare"
        power: float

    monkeypatch.setattr(transforms, "_members", {**transforms._members, "bare": BareSpec})
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    said = invoke("speed", "ops", "--only", "bare", code=2).stderr
    assert "--only bare: " in said
    assert "power: this key is required and absent" in said


@pytest.mark.parametrize(("options", "said"), [
    (("--against", "entmx"), "did you mean 'entmax'"),
    (("--size", ","), "--size ',': names nothing; leave it out, or give names with commas"),
    (("--against", " , "), "--against ' , ': names nothing"),
    (("--size", "huge"), "--size: unknown size 'huge'"),
    (("--only", "entmax16"), "--only: unknown mechanism 'entmax16'"),
    (("--only", "topk", "--compare", "of training.json"), "compare with one of the same --only, or leave one"),
    (("--only", " ,"), "--only ' ,': names nothing; leave it out, or give names with commas"),
    (("--compare", "nowhere.json"), "nowhere.json: it cannot be read"),
    (("--compare", "other.json"), "it holds no measurement"),
    (("--compare", "empty.json"), "it holds no measurement"),
    (("--compare", "unsigned.json"), "it holds no measurement"),
    (("--compare", "no timings.json"), "it holds no measurement"),
    (("--compare", "words.json"), "it holds no measurement"),
    (("--compare", "of training.json"), "no figure in common; run what the earlier one ran"),
    (("--size", "mini"), "--size: ops times no models; leave it out, or time train or decode"),
    (("--against", "torch"), "--against torch: it does nothing that could be timed beside ops on cpu; leave it out"),
    (("--threads", "4096"), "cores can be used here; give that many at most"),
    (("--tolerance", "1.5"), "--tolerance"),
    (("--tolerance", "0.5"), "--tolerance is of a comparison; name the earlier measurement with --compare FILE"),
    (("--out", "other.json"), "--out other.json: this is a file; name a folder, which is made if need be"),
])  # fmt: skip
def test_bad_options_before_anything_is_timed(invoke, monkeypatch, options, said):
    Path("other.json").write_text("[1]")
    Path("empty.json").write_text('{"schema_version": 1, "sections": []}')
    timing = {"group": "mini", "name": "softmax", "best": 1.0, "share": None}
    for name, title, timings, signature in (
        ("unsigned", "transforms of scores", [timing], None),
        ("no timings", "transforms of scores", None, {}),
        ("words", "transforms of scores", [{**timing, "best": "fast"}], {}),
        ("of training", "training, target tokens", [timing], {}),
    ):
        sections = [{"title": title, "timings": timings}]
        document = {"schema_version": 1, "sections": sections, "signature": signature, "peers": {}}
        Path(f"{name}.json").write_text(json.dumps(document))
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    assert said in invoke(*RUN, *options, code=2).stderr


def test_what_limits_the_threads_is_named(invoke, monkeypatch):
    for asked, limit in (("1", " as OMP_NUM_THREADS says"), ("4096", ""), ("", "")):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        said = invoke("speed", "ops", "--threads", "4095", code=2).stderr
        assert f"cores can be used here{limit}; give that many at most" in said


def test_transforms_have_no_other_precision(invoke, monkeypatch):
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    said = invoke("speed", "transforms", "--precision", "bf16", code=2).stderr
    assert "--precision bf16: transforms are timed in float32; leave it out, or time attention" in said


def test_names_with_commas_and_spaces_are_named_once(invoke):
    result = invoke(*RUN, "--against", "entmax, entmax,", "--json")
    assert list(json.loads(result.stdout)["peers"]) == ["entmax"]


def test_what_was_measured_is_written_though_it_cannot_be_shown(invoke, monkeypatch):
    monkeypatch.setattr(Report, "show", lambda *given: (_ for _ in ()).throw(OSError(5, "gone", "stdout")))
    assert "error: stdout: gone" in invoke(*RUN, "--out", "found", code=1).stderr
    assert json.loads(Path("found/speed.json").read_text())["finished"]


def test_a_size_that_there_is_not_leaves_no_folder(invoke):
    invoke(*RUN, "--size", "nope", "--out", "new", code=2)
    assert not Path("new").exists()


def test_what_was_measured_is_shown_though_it_cannot_be_written(invoke, monkeypatch):
    monkeypatch.setattr(Report, "write", lambda *given: (_ for _ in ()).throw(OSError(28, "no space left", "found")))
    result = invoke(*RUN, "--out", "found", code=1)
    assert "transforms of scores" in result.stdout
    assert "error: found: no space left" in result.stderr


def test_what_fell_is_told_though_nothing_can_be_written(invoke, monkeypatch):
    invoke(*RUN, "--out", "found")
    path = Path("found/speed.json")
    document = json.loads(path.read_text())
    scale(document, 1e9)
    path.write_text(json.dumps(document))
    monkeypatch.setattr(Report, "write", lambda *given: (_ for _ in ()).throw(OSError(28, "no space left", "other")))
    said = invoke(*RUN, "--compare", str(path), "--out", "other", code=1).stderr
    assert "fell: transforms of scores: sparsemax" in said
    assert "error: other: no space left" in said


@pytest.mark.parametrize(("name", "said"), [
    ("speed.json", "this is a folder; name a file"), ("unfinished.md", "this is a folder; name a file"),
])  # fmt: skip
def test_a_place_that_cannot_be_written_to_is_told_before_anything_is_timed(name, said, invoke, monkeypatch):
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    (Path("found") / name).mkdir(parents=True)
    assert f"--out found/{name}: {said}" in invoke(*RUN, "--out", "found", code=2).stderr


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_timed(invoke, monkeypatch):
    """As below /proc, for a user who may do everything."""
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    monkeypatch.setattr(Path, "mkdir", lambda *given, **more: (_ for _ in ()).throw(OSError(2, "No such file")))
    said = invoke(*RUN, "--out", "found", code=2).stderr
    assert "--out found: it cannot be made (No such file); name another place" in said


def test_a_picture_of_earlier_figures_does_not_stay_beside_others(invoke, monkeypatch):
    from attnbench.bench import plot

    monkeypatch.setattr(plot.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    monkeypatch.setattr(run, "draw", draw)
    Path("found").mkdir()
    Path("found/speed.svg").write_text("of last year")
    invoke(*RUN, "--out", "found")
    assert sorted(path.name for path in Path("found").iterdir()) == ["speed.json", "speed.md"]


@pytest.mark.parametrize(("place", "value"), [
    ("low", "x"), ("group", ["a"]), ("best", float("nan")), ("best", "fast"), ("name", 3), ("pace", None),
    ("low", None),
])  # fmt: skip
def test_an_earlier_measurement_that_was_spoilt_is_told_before_anything_is_timed(place, value, invoke, monkeypatch):
    invoke(*RUN, "--out", "found")
    path = Path("found/speed.json")
    document = json.loads(path.read_text())
    for section in document["sections"]:
        for each in section["timings"]:
            each[place] = value
    path.write_text(json.dumps(document))
    if value is None:  # as where the machine's own rate was not measured
        invoke(*RUN, "--compare", str(path), "--tolerance", "1")
        return
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    assert "it holds no measurement of `attnbench speed`" in invoke(*RUN, "--compare", str(path), code=2).stderr


def test_an_earlier_measurement_of_other_sizes_is_told_before_anything_is_timed(invoke, monkeypatch):
    invoke(*RUN, "--out", "found")
    path = Path("found/speed.json")
    document = json.loads(path.read_text())
    section = document["sections"][0]
    section["title"] = "training, target tokens"
    for each in section["timings"]:
        each["group"] = "base"
    path.write_text(json.dumps({**document, "sections": [section]}))
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    for options in ((), ("--quick",), ("--size", "mini,iwslt")):
        said = invoke("speed", "train", *options, "--threads", "1", "--compare", str(path), code=2).stderr
        assert "the two measurements have no figure in common" in said


def test_a_nested_file_is_no_measurement(invoke):
    Path("deep.json").write_text("[" * 200_000)
    assert "--compare deep.json: it cannot be read" in invoke(*RUN, "--compare", "deep.json", code=2).stderr


def test_a_package_that_is_not_installed(invoke, monkeypatch):
    real = importlib.import_module

    def absent(missing):
        def imported(name):
            if name == "entmax":
                raise missing
            return real(name)

        return imported

    monkeypatch.setattr(importlib, "import_module", absent(ModuleNotFoundError("No module", name="entmax")))
    assert "pip install entmax" in invoke(*RUN, "--against", "entmax", code=3).stderr
    for broken in (ImportError("libx.so: cannot open"), ModuleNotFoundError("libx.so: cannot open", name="other")):
        monkeypatch.setattr(importlib, "import_module", absent(broken))
        said = invoke(*RUN, "--against", "entmax", code=3).stderr
        assert "--against entmax: it is installed, and cannot be imported (libx.so: cannot open); mend that" in said


SPEC = """\
name: own
task: {kind: copying, dataset: {kind: copy, symbols: 20, longest: 9, pairs: 60, held_out: 6}}
model: {kind: lstm, layers: 1, width: 8, attention: {cross: {score: bilinear}}}
train: {batch_tokens: 60, max_steps: 4, optimizer: sgd, clip: 0.0, label_smoothing: 0.0}
search: {kind: beam, size: 2}
grid:
  seeds: [1, 2]
  axes:
    model.attention.cross.transform: [softmax, sparsemax]
"""
OF_SPEC = ("--spec", "own.yaml", "--quick", "--rounds", "1", "--threads", "1")


def test_the_cells_of_a_spec_are_timed(invoke):
    """Each once, whatever its seeds; as it says, with the first of them as what the others are compared with."""
    Path("own.yaml").write_text(SPEC)
    document = json.loads(invoke("speed", *OF_SPEC, "--json").stdout)
    training, decoding = document["sections"]
    assert training["title"] == "training of the cells of a spec, target tokens"
    assert decoding["title"] == "decoding by the cells of a spec, tokens of the best outputs"
    whole = "own.yaml, up to 10 tokens"
    for section, group in ((training, whole), (decoding, f"{whole}, 16 x 10")):
        assert [(each["group"], each["name"]) for each in section["timings"]] == [
            (group, "softmax"), (group, "sparsemax"),
        ]  # fmt: skip
        assert section["baseline"] == ["softmax"]
        assert all(each["error"] < 1e-5 for each in section["timings"])


def test_what_a_spec_says_of_training_and_search_is_what_is_timed():
    Path("own.yaml").write_text(SPEC)
    options = {"overrides": ["model.width=16"], "axes": ["model.attention.cross.transform=sparsemax,softmax"]}
    found = cells_of(Path("own.yaml"), **options)
    assert [each.name for each in found] == ["sparsemax", "softmax"]
    for each in found:
        assert (each.update.tokens, each.update.smoothing, each.update.clip) == (60, 0.0, 0.0)
        assert each.update.optimizer["kind"] == "sgd"
        assert (each.search or {})["size"] == 2
        assert each.model["width"] == 16
        assert (each.sizes.source_vocab, each.longest) == (24, 9)


def test_cells_are_compared_with_what_they_were(invoke, monkeypatch):
    Path("own.yaml").write_text(SPEC)
    invoke("speed", "train", *OF_SPEC, "--out", "found")
    path = Path("found/speed.json")
    document = json.loads(path.read_text())
    scale(document, 1e9)
    path.write_text(json.dumps(document))
    said = invoke("speed", "train", *OF_SPEC, "--compare", str(path), code=1).stderr
    assert "fell: training of the cells of a spec, target tokens: sparsemax (own.yaml, up to 10 tokens)" in said
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    Path("other.yaml").write_text(SPEC)
    said = invoke("speed", "train", "--spec", "other.yaml", *OF_SPEC[2:], "--compare", str(path), code=2).stderr
    assert "no figure in common" in said
    compared = ("speed", "train", *OF_SPEC, "--compare", str(path))
    said = invoke(*compared, "--set", "model.width=16", code=2).stderr
    assert "these cells are not those of the earlier measurement: 'softmax' was another model, or trained other" in said
    axis = "model.attention.cross.transform=sparsemax,softmax"
    assert "the first cell was 'softmax'; measure both alike" in invoke(*compared, "--axis", axis, code=2).stderr


def test_labels_are_shown_as_they_are(invoke):
    labels = "[{label: 'soft [/old]', kind: softmax}, {label: 'sparse [wide], all', kind: sparsemax}]"
    Path("a, b.yaml").write_text(SPEC.replace("[softmax, sparsemax]", labels))
    given = ("speed", "train", "--spec", "a, b.yaml", *OF_SPEC[2:])
    shown = invoke(*given, "--out", "found").stdout
    assert "soft [/old]" in shown
    assert "sparse [wide], all" in shown
    invoke(*given, "--compare", "found/speed.json", "--tolerance", "1")


def test_cells_that_are_alike_in_all_that_is_timed_are_timed_once(caplog):
    Path("own.yaml").write_text(SPEC)
    found = cells_of(Path("own.yaml"), [], ["train.accumulate=1,8"])
    assert [each.name for each in found] == ["softmax accumulate-1", "sparsemax accumulate-1"]
    assert "'softmax accumulate-8' is timed as 'softmax accumulate-1': nothing that is timed differs" in caplog.text


def test_cells_of_several_lengths_stand_apart(invoke):
    Path("own.yaml").write_text(SPEC)
    options = ("--axis", "task.dataset.longest=5,9", "--json")
    document = json.loads(invoke("speed", "decode", *OF_SPEC, *options).stdout)
    (section,) = document["sections"]
    groups = [each["group"] for each in section["timings"]]
    assert groups == [f"own.yaml, up to {most} tokens, 16 x {most}" for most in (6, 6, 10, 10)]
    assert section["baseline"] == ["softmax longest-5", "softmax longest-9"]
    assert [each["relative"] is None for each in section["timings"]] == [False] * 4


@pytest.mark.parametrize(("given", "said"), [
    (("ops", "--spec", "own.yaml"), "--spec: ops times no models; leave it out, or time train or decode"),
    (("--spec", "own.yaml", "--size", "mini"), "--size: with --spec its cells are timed, and nothing else"),
    (("--spec", "own.yaml", "--only", "topk"), "--only: with --spec its cells are timed, and nothing else"),
    (
        ("train", "--spec", "own.yaml", "--set", "model.attention.cross.score=dot", "--against", "torch"),
        "--against torch: it does nothing that could be timed beside train of these cells; leave it out",
    ),
    (("decode", "--spec", "own.yaml", "--against", "torch"), "that could be timed beside decode on cpu; leave it out"),
    (("--spec", "nowhere.yaml"), "nowhere.yaml: there is no such file"),
    (("--spec", "own.yaml", "--set", "model.widht=3"), "unknown key 'widht'; did you mean 'width'?"),
    (("--set", "model.width=3"), "--set model.width=3: it changes a spec; name one with --spec"),
    (("--axis", "transform=softmax"), "--axis transform=softmax: it changes a spec; name one with --spec"),
])  # fmt: skip
def test_bad_options_of_a_spec_before_anything_is_timed(given, said, invoke, monkeypatch):
    Path("own.yaml").write_text(SPEC)
    monkeypatch.setattr(plans, "measure", lambda *given, **more: pytest.fail("timed"))
    assert said in invoke("speed", *given, code=2).stderr


def test_models_of_every_kind_are_timed_where_no_others_are_asked_for():
    plan = plans.Plan(runtime.Runtime(torch.device("cpu")), 1, True, [])
    kinds = {each.model["kind"] for each in plan.families}
    assert kinds == set(models.kinds())
    assert plan.groups == {"tiny", "128 wide"}
    for other in ({"sizes": ["mini"]}, {"only": ["topk"]}, {"cells": plan.families[:1]}):
        assert not plan._replace(**other).families
