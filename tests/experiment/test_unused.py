"""What changes nothing is said before a run, and only that."""

from __future__ import annotations

from typing import Any

import pytest

from attnbench.cli import common
from attnbench.experiment.document import read_document
from attnbench.experiment.grid import expand
from attnbench.experiment.unused import unused


def told(bench: Any, text: str, *overrides: str) -> list[str]:
    """What is said of a spec with these lines, without file and line number."""
    for part, usual in (("task", "{kind: translation, dataset: demo}"), ("model", "{kind: transformer, tie: decoder}")):
        text = text if f"{part}:" in text else f"{part}: {usual}\n{text}"
    path = bench.write(f"name: x\n{text}")
    return [line.split(": ", 1)[1] for line in unused(expand(read_document(path, overrides)))]


TRANSFORMER = "model: {kind: transformer, tie: decoder, "
MEMORY = "model: {kind: lstm, attention: {cross: {module: {kind: fixed_memory, slots: 4%s}%s}}}\n"
FILES = (
    "task: {kind: translation, dataset: {kind: parallel, languages: [de, en], train: {source: a, target: b%s}%s}%s}\n"
)
BOTH = ", valid: {source: c, target: d}, test: {source: e, target: f}"


@pytest.mark.parametrize(("text", "path"), [
    (TRANSFORMER + "attention: {encoder_self: {pattern: window, transform: topk, budget: 4}}}\n",
     "model.attention.encoder_self.transform"),
    (TRANSFORMER + "attention: {decoder_self: {pattern: {kind: global, n: 2}, transform: {kind: topk, k: 2}}}}\n",
     "model.attention.decoder_self.transform"),
    (TRANSFORMER + "attention: {decoder_self: {pattern: {kind: block, n: 4}, transform: {kind: topk_oow, n: 8}}}}\n",
     "model.attention.decoder_self.transform"),
    (TRANSFORMER + "attention: {encoder_self: {pattern: window, transform: topk_oow, budget: 5}}}\n",
     "model.attention.encoder_self.transform"),
    (TRANSFORMER + "attention: {default: {sparsify: train}}}\n", "model.attention.encoder_self.sparsify"),
    (TRANSFORMER + "attention: {encoder_self: {transform: {kind: topk, k: 0, ties: index}}}}\n",
     "model.attention.encoder_self.transform.ties"),
    (TRANSFORMER + "attention: {encoder_self: {backend: banded}}}\n", "model.attention.encoder_self.backend"),
    (TRANSFORMER + "attention: {encoder_self: {pattern: {kind: dilated, n: 1, dilation: 7}}}}\n",
     "model.attention.encoder_self.pattern.dilation"),
    (MEMORY % (", pe_offset: plus_one", ""), "model.attention.cross.module.pe_offset"),
    (MEMORY % (", longest: 9", ""), "model.attention.cross.module.longest"),
    (MEMORY % (", encoder_transform: {kind: topk, k: 8}", ""), "model.attention.cross.module.encoder_transform"),
    (MEMORY % ("", ", transform: {kind: topk, k: 4}"), "model.attention.cross.transform"),
    (MEMORY % ("", ", backend: sdpa"), "model.attention.cross.backend"),
    (MEMORY.replace("4%s", "1, positions: true, longest: 9%s") % ("", ""), "model.attention.cross.module.positions"),
    ("model: {kind: lstm, readout: state, attention_dropout: 0.5, attention: {cross: {module: none}}}\n",
     "model.attention_dropout"),
    ("model: {kind: convs2s, heads: 4}\n", "model.heads"),
    ("model: {kind: lstm, fertility: {kind: predicted, head: regression, weight_of_one: 0.7}, "
     "attention: {cross: {transform: csparsemax}}}\n", "model.fertility.weight_of_one"),
    ("model: {kind: convs2s, layers: 1, share_attention: true}\n", "model.share_attention"),
    ("train: {optimizer: adamw}\n", "train.optimizer.kind"),
    ("train: {max_steps: 12, validate_every: 12, average: 2}\n", "train.average"),
    ("train: {max_steps: 12, validate_every: 5, patience: 3}\n", "train.patience"),
    ("train: {max_epochs: 4, validate_every: epoch, patience: 4}\n", "train.patience"),
    ("train: {max_steps: 24, schedule: {kind: linear, steps: 6}}\n", "train.max_steps"),
    ("train: {schedule: {kind: inverse_sqrt, warmup: 1, start: 1e-4}}\n", "train.schedule.start"),
    ("search: {kind: beam, size: 1, penalty: {kind: wu, alpha: 2.0}}\n", "search.penalty"),
    ("search: {kind: beam, size: 1, coverage: {kind: wu, beta: 5.0}}\n", "search.coverage"),
    ("search: {kind: beam, coverage: {kind: wu, beta: 5.0, floor: 1.0}}\n", "search.coverage.floor"),
    ("search: {kind: beam, coverage: {kind: wu, beta: 0, floor: 1.0}}\n", "search.coverage.beta"),
    ("search: {kind: beam, penalty: {kind: wu, alpha: 0}}\n", "search.penalty.alpha"),
    ("search: {kind: beam, penalty: {kind: avg, alpha: 0}}\n", "search.penalty.alpha"),
    ("train: {schedule: {kind: stairs, first: 9, every: 9, factor: 1}}\n", "train.schedule.factor"),
    ("train: {schedule: {kind: inverse_sqrt, lr: 1e-3, minimum: 1e-3}}\n", "train.schedule.minimum"),
    ("train: {schedule: {kind: linear, lr: 1e-3, minimum: 1e-3, steps: 9}}\n", "train.schedule.minimum"),
    ("train: {schedule: {kind: cosine, lr: 1e-3, minimum: 1e-3, steps: 9}}\n", "train.schedule.minimum"),
    (TRANSFORMER + "attention: {default: {transform: {kind: entmax, alpha: 1}, sparsify: train}}}\n",
     "model.attention.encoder_self.sparsify"),
    (TRANSFORMER + "attention: {encoder_self: {pattern: {kind: window, n: 1}, transform: sparsemax}}}\n",
     "model.attention.encoder_self.transform"),
    (TRANSFORMER + "attention: {encoder_self: {pattern: {kind: window, n: 1}, transform: {kind: topk, ratio: 0.5}}}}\n",
     "model.attention.encoder_self.transform"),
    ("search: {kind: beam, size: 4, n_best: 4}\n", "search.n_best"),
    (FILES % (", alignment: c", "", ""), "task.dataset.train.alignment"),
    (FILES % ("", f"{BOTH}, hold_every: 7", ""), "task.dataset.hold_every"),
    ("task: {kind: translation, dataset: demo, pretokenize: none, split_hyphens: true}\n", "task.split_hyphens"),
    ("seed: 7\ngrid: {seeds: [1, 2]}\n", "seed"),
    (TRANSFORMER + "preset: big, layers: 2, width: 64, heads: 4, ffn: 128}\n", "model.preset"),
])  # fmt: skip
def test_what_changes_nothing_is_said(bench: Any, text: str, path: str):
    assert [line.split(" changes nothing")[0] for line in told(bench, text)] == [path]


@pytest.mark.parametrize("text", [
    TRANSFORMER + "attention: {encoder_self: {pattern: {kind: window, n: 4}, transform: {kind: topk, k: 3}}}}\n",
    TRANSFORMER + "attention: {encoder_self: {pattern: {kind: global, n: 2}, transform: {kind: topk, k: 2}}}}\n",
    TRANSFORMER + "attention: {default: {sparsify: train}, cross: {transform: sparsemax}}}\n",
    TRANSFORMER + "attention: {default: {backend: banded}, encoder_self: {pattern: {kind: window, n: 4}}}}\n",
    TRANSFORMER + "attention: {encoder_self: {pattern: {kind: window, n: 6}, transform: {kind: topk_oow, n: 5}}}}\n",
    TRANSFORMER + "attention: {encoder_self: {pattern: {kind: block, n: 4}, transform: {kind: topk_oow, n: 5}}}}\n",
    MEMORY % (", positions: true, longest: 9, pe_offset: plus_one", ", transform: {kind: topk, k: 3}"),
    MEMORY % (", enc_norm: time, encoder_transform: {kind: topk, k: 8}", ""),
    "model: {kind: convs2s, heads: 4, attention: {cross: {module: multihead}}}\n",
    "train: {optimizer: {kind: adamw, weight_decay: 1e-4}}\n",
    "train: {max_steps: 13, validate_every: 3, average: 5}\n",
    "train: {max_steps: 24, schedule: {kind: linear, steps: 24}}\n",
    "train: {max_steps: 24, schedule: {kind: linear, steps: 6, minimum: 1e-5}}\n",
    "train: {max_steps: 12, validate_every: 3, average: 50, validate_bleu: true, select: bleu}\n",
    "train: {max_epochs: 3, schedule: {kind: linear, steps: 50000}}\n",
    "train: {max_steps: 24, average: 2, validate_every: 6, schedule: {kind: linear, steps: 6}}\n",
    "train: {patience: 50, validate_every: epoch}\n",
    "search: {kind: beam, size: 4, n_best: 4}\ntiming: {decode_runs: 1}\n",
    FILES % ("", ", tokenized: true", ", normalize: true"),
    "search: {kind: beam, size: 2, penalty: {kind: wu, alpha: 2.0}, coverage: {kind: wu}}\n",
    FILES % ("", ", valid: {source: c, target: d}, hold_every: 7", ", normalize: true"),
    "seed: 7\n",
])  # fmt: skip
def test_what_changes_something_is_not(bench: Any, text: str):
    assert told(bench, text) == []


def test_cells_are_named_where_it_is_not_all_of_them(bench: Any):
    text = (TRANSFORMER + "attention: {encoder_self: {pattern: {kind: window, n: 4}, transform: topk}}}\n"
            "grid: {axes: {model.attention.encoder_self.transform.k: [2, 4, 8]}}\n")  # fmt: skip
    (line,) = told(bench, text)
    assert line == (
        "model.attention.encoder_self.transform changes nothing (of k-4, k-8): the pattern 'window' leaves a row 4 "
        "keys at most, and 'topk' keeps all"
    )


@pytest.mark.parametrize(("axes", "words"), [
    ("model.attention.default.transform: [softmax, sparsemax]", "'softmax' and 'sparsemax' are the same run"),
    ("model.attention.default.transform: [softmax, entmax15], train.clip: [0.5, 1.0]", "'softmax' and 'entmax15' are"),
    ("train.clip: [0.5, 1.0], train.schedule.lr: [1e-3, 2e-3], train.schedule: [{kind: constant, lr: 5e-4}]", None),
    ("train.clip: [0.5, 1.0], cell: [{label: a, train: {clip: 2.0}}, {label: b, train: {clip: 3.0}}]",
     "'a' and 'b' are the same run"),
    ("train.clip: [0.5, 1.0]", None),
    ("train.clip: [1, 1.0]", "'1' and '1.0' are the same run"),
    ("train.clip: [1, 1.0]}, more_seeds: {1: [1, 2]", "'1' and '1.0' are the same run"),
    ("model.attention.cross.budget: [1, 2, inf]", None),
])  # fmt: skip
def test_entries_of_an_axis_that_are_the_same_runs_are_told(bench: Any, axes: str, words: str | None):
    cross = "transform: topk, budget: 4" if "budget" in axes else "score: bilinear, transform: sparsemax"
    found = told(bench, f"model: {{kind: lstm, attention: {{cross: {{{cross}}}}}}}\ngrid: {{axes: {{{axes}}}}}\n")
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


@pytest.mark.parametrize(("text", "words"), [
    ("search: {kind: beam, size: 4, max_ratio: 2.0, max_extra: 10}\ngrid: {axes: {search: [greedy, beam]}}\n",
     "grid.axes.search: 'greedy' is of another kind and begins anew: it does not take over max_ratio; write"),
    ("search: {kind: beam, max_ratio: 2.0}\ngrid: {axes: {search: [{kind: greedy, max_ratio: 3.0}]}}\n", None),
    ("search: {kind: beam, size: 4, max_ratio: 2.0}\ngrid: {axes: {search: [beam, {size: 2}]}}\n", None),
    (TRANSFORMER + "dropout: 0.33, norm: pre}\ngrid: {axes: {model: [{label: G, kind: gru}, {label: T}]}}\n",
     "grid.axes.model: 'G' is of another kind and begins anew: it does not take over dropout; write"),
    (TRANSFORMER + "attention: {default: {transform: {kind: topk, k: 8, ties: index}}}}\n"
     "grid: {axes: {model.attention.default.transform: [softmax, topk]}}\n", None),  # which has none of them
    ("train: {schedule: {kind: inverse_sqrt, lr: 0.5}}\ngrid: {axes: {train.schedule: [constant, inverse_sqrt], "
     "train.schedule.lr: [0.1, 0.2]}}\n", None),  # another axis gives it
    ("model: {kind: lstm, attention: {cross: {transform: softmax}}}\ngrid: {axes: {model: [gru, lstm]}}\n", None),
    ("model: {kind: lstm, attention: {cross: {transform: sparsemax}}}\ngrid: {axes: {model: [gru, lstm]}}\n",
     "grid.axes.model: 'gru' is of another kind and begins anew: it does not take over attention; write"),
])  # fmt: skip
def test_what_an_entry_of_another_kind_leaves_behind_is_said(bench: Any, text: str, words: str | None):
    found = [line for line in told(bench, text) if "begins anew" in line]
    assert len(found) == (words is not None)
    assert all(line.startswith(words or "") for line in found)


def test_it_is_said_at_its_place_before_a_run(bench: Any, caplog: pytest.LogCaptureFixture):
    common.conduct(bench.experiment({"train": {"patience": 9}}), bench.settings(), dry=True, as_json=True)
    (line,) = [record.getMessage() for record in caplog.records]
    given = (bench.folder / "spec.yaml").read_text().splitlines()
    assert line == (
        f"{bench.folder / 'spec.yaml'}:{given.index('  patience: 9') + 1}: train.patience changes nothing: of 2 "
        "validations at most the first is a best one"
    )


@pytest.mark.parametrize(("text", "place"), [
    ("model: {kind: transformer, tie: decoder}\ngrid:\n  axes:\n    cell:\n      - {label: a}\n"
     "      - {label: b, train: {optimizer: adamw}}\n",
     "- {label: b, train: {optimizer: adamw}}"),
    ("model:\n  kind: transformer\n  tie: decoder\n  attention:\n    default:\n      pattern: window\n"
     "      transform: {kind: topk, k: 9}\n      budget: 4\n    cross: {transform: topk, budget: 4, pattern: full}\n",
     "transform: {kind: topk, k: 9}"),
])  # fmt: skip
def test_the_place_is_that_where_it_was_given(bench: Any, text: str, place: str):
    path = bench.write(f"name: x\ntask: {{kind: translation, dataset: demo}}\n{text}")
    (line,) = {int(line.split(":")[1]) for line in unused(expand(read_document(path)))}
    assert path.read_text().splitlines()[line - 1].strip() == place
