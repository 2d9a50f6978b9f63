from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnbench.core.errors import AttnbenchError
from attnbench.data.base import PAD
from attnbench.experiment import timing
from attnbench.experiment.executor import attempt
from attnbench.experiment.pipeline import Place, build_model
from attnbench.experiment.timing import TimingSpec, time_decoding
from attnbench.search.base import Hypothesis
from attnbench.train.runtime import Runtime

RUNTIME = Runtime(torch.device("cpu"))


class Counted:
    """A search that counts its batches and notes their sizes."""

    def __init__(self, searcher: Any, spec: Any) -> None:
        self.searcher, self.spec = searcher, spec
        self.sizes: list[tuple[int, int]] = []

    def __call__(self, model: Any, source: Any, limits: Any) -> Any:
        assert torch.equal(source.valid, source.data != PAD)
        self.sizes.append(tuple(source.data.shape))
        return self.searcher(model, source, limits)


@pytest.fixture
def parts(bench: Any) -> Any:
    """(task, model, data, search) of the tiny spec, not trained."""
    spec = bench.experiment().cells[0].spec
    return spec.task.bind(), build_model(spec).eval(), spec.task.open(spec.task.data_path(bench.cache)), spec.search


@pytest.mark.parametrize(("runs", "sentences"), [(1, None), (3, 4)])
def test_a_split_is_decoded_so_many_times(parts: Any, monkeypatch: pytest.MonkeyPatch, runs: int, sentences: int):
    task, model, data, search = parts
    ticks = [0.0]

    def clock() -> float:
        ticks.append(ticks[-1] + len(ticks))
        return ticks[-1]

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=clock))  # compilers look at the other one
    counted = Counted(search.build(), search)
    spec = TimingSpec(decode_runs=runs, sentences=sentences)
    metrics = time_decoding(task, model, data, spec, counted, RUNTIME, 4096)
    batches = counted.sizes[1:][: 1 if sentences is None else 2]
    assert [rows for rows, _ in batches] == ([6] if sentences is None else [4, 2])
    assert counted.sizes == [batches[-1], *batches * runs]
    spans = [end - start for start, end in zip(ticks[1::2], ticks[2::2], strict=True)]
    assert len(spans) == 2 * runs
    assert metrics.values["seconds"] == pytest.approx(statistics.fmean(spans[:runs]))
    assert metrics.values["encode_seconds"] == pytest.approx(statistics.fmean(spans[runs:]))
    assert ("seconds_spread" in metrics.values) == (runs > 1)
    if runs > 1:
        assert metrics.values["seconds_spread"] == pytest.approx(statistics.stdev(spans[:runs]))
    assert (metrics.values["runs"], metrics.samples) == (runs, {"sentences": 6})
    left = 1000 * (metrics.values["seconds"] - metrics.values["encode_seconds"])
    assert metrics.values["ms_per_step"] == pytest.approx(left / metrics.values["steps"])


@pytest.mark.parametrize("kind", ["greedy", "beam"])
def test_outputs_of_full_length_hang_on_no_training(parts: Any, bench: Any, kind: str):
    task, model, data, _ = parts
    search = {"kind": kind, "max_ratio": 1.0, "max_extra": 0}
    searcher = bench.experiment({"search": search}).cells[0].spec.search.build()
    batches = list(data.eval_batches("valid", tokens=40))
    said = task.decode(model, batches, searcher, to_limit=True)
    task.special = task.special._replace(eos=said[0].tokens[0])  # a word that ends outputs wherever it may
    assert len(task.decode(model, batches, searcher)[0].tokens) < len(said[0].tokens)
    decoded = task.decode(model, batches, searcher, to_limit=True)
    assert {line: len(best.tokens) for line, best in decoded.items()} == {
        line: len(text.split()) + 1 for line, text in enumerate(data.split("valid").source)
    }
    metrics = time_decoding(
        task, model, data, TimingSpec(decode_runs=1, full_length=True, sentences=1), searcher, RUNTIME, 4096
    )
    assert metrics.values["steps"] == sum(len(best.tokens) for best in decoded.values())


def test_too_little_memory_is_told_with_its_mend(parts: Any):
    task, model, data, spec = parts

    def full(*given: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(AttnbenchError, match=r"the decoding of 6 sentences at once; give timing\.sentences, say 1,"):
        time_decoding(task, model, data, TimingSpec(decode_runs=1), Counted(full, spec), RUNTIME, 4096)


def test_the_encoder_is_timed_as_the_search_uses_it(parts: Any):
    task, model, data, spec = parts
    encode, seen = model.encode, []

    def watched(source: Any) -> Any:
        seen.append(model.output.forward.dtype)
        return encode(source)

    model.encode = watched
    counted = Counted(spec.replace(quantization="int8").build(), spec.replace(quantization="int8"))
    time_decoding(task, model, data, TimingSpec(decode_runs=2), counted, RUNTIME, 4096)
    assert set(seen) == {torch.int8}
    assert len(seen) == 5  # once for a start, twice decoded, twice encoded


def test_steps_are_those_that_the_decoder_takes(parts: Any):
    """A beam goes on past what is its best output in the end."""
    task, model, data, spec = parts

    def search(model: Any, source: Any, limits: Any) -> Any:
        memory, first = model.encode(source), torch.full((len(source.data),), limits.bos)
        state = model.start(memory, 5)
        for _ in range(5):
            _, state = model.step(memory, state, first)
        return [[Hypothesis([], 0.0, 0.0, True)] for _ in first]

    counted = Counted(search, spec)
    metrics = time_decoding(task, model, data, TimingSpec(decode_runs=3, sentences=2), counted, RUNTIME, 4096)
    assert metrics.values["steps"] == 5 * 3  # 6 sentences


def test_a_cell_that_is_timed(bench: Any):
    experiment = bench.experiment({"timing": {"decode_runs": 2, "split": "test"}})
    cell = experiment.cells[0]
    assert attempt(bench.runs, cell, Place(bench.cache), False, lambda _: None).error is None
    result = json.loads(Path(bench.runs / "cells" / cell.folder / "result.json").read_text())
    assert {"decode/seconds", "decode/seconds_spread", "decode/encode_seconds", "decode/ms_per_step"} <= set(
        result["metrics"]
    )
    assert result["metrics"]["decode/runs"] == 2
    assert result["samples"]["decode"] == 6


def test_what_is_not_timed_is_the_cell_it_was(bench: Any):
    plain, timed = bench.experiment().cells[0], bench.experiment({"timing": {"decode_runs": 2}}).cells[0]
    assert "timing" not in plain.spec.canonical()
    assert plain.digest != timed.digest
    assert bench.experiment({"timing": None}).cells[0].digest == plain.digest
