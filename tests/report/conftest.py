"""Run folders made of nothing but files, as a finished, half-done or broken grid leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

LC = "nrefs:1|case:lc|eff:no|tok:none|smooth:none|version:2.6.0"
BUDGET = "model.attention.default.budget"
PLACE = "model.attention.default"


class RunFolder:
    """Writes cells one by one; `grid()` last."""

    def __init__(self, root: Path, name: str = "explicit-sparse/demo") -> None:
        self.root = root
        self.name = name
        self.cells: list[dict[str, Any]] = []

    def add(
        self,
        label: str,
        seed: int = 1,
        bleu: float | None = None,
        *,
        axes: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        signature: str = LC,
        data: str = "aaaaaaaaaaaa",
        lines: Sequence[str] | None = None,
        references: Sequence[str] | None = None,
        seconds: float = 60.0,
        outcome: Mapping[str, Any] | str | None = None,
        weights: Sequence[int] = (1000,),
        against: str | None = None,
        task: str | None = None,
        samples: Mapping[str, int] | None = None,
    ) -> Path:
        """A cell; with `bleu` it is done. weights: the checkpoints that were scored; none: it has no scores. against:
        the hash of its references. task: of its spec, in YAML. samples: what its scores are of."""
        name = f"{label}-s{seed}"
        folder = self.root / "cells" / name
        axes = dict(axes or {})
        row = {"label": label, **axes}
        self.cells.append(
            {"label": label, "digest": f"d{name}", "folder": name, "seed": seed, "axes": axes, "row": row}
        )
        if bleu is None:
            return folder
        folder.mkdir(parents=True)
        result = {
            "schema_version": 1,
            "status": "done",
            "digest": "d" + name,
            "seed": seed,
            "outcome": outcome,
            "weights": list(weights),
            "metrics": {**({"test/bleu": bleu} if weights else {}), **(metrics or {})},
            "signatures": {"test/bleu": signature} if weights else {},
            "samples": {"test": 3, "attended": 256, **(samples or {})},
            **({"references": {"test": against}} if against else {}),
            "data": {"folder": f"corpus/{data}", "content_sha256": "f" * 64},
            "commit": "0123456789abcdef",
            "dirty": False,
            "total_seconds": seconds,
            "finished": f"2026-01-0{seed}T00:00:00+00:00",
        }
        (folder / "result.json").write_text(json.dumps(result))
        spec = "name: x\nmodel: {kind: lstm, k: .inf}\ntable: {rows: label}\nseed: 1\n"
        (folder / "spec.yaml").write_text(spec + (f"task: {task}\n" if task else ""))
        (folder / "env.json").write_text(json.dumps({"device": "cpu", "threads": 1}))
        for file, text in (("test", lines), ("test.ref", references)):
            if text is not None:
                (folder / "hyps").mkdir(exist_ok=True)
                (folder / "hyps" / f"{file}.txt").write_text("".join(line + "\n" for line in text))
        return folder

    def grid(self, table: Mapping[str, Any] | None = None, source: str | None = None) -> Path:
        """Write grid.json; returns the run folder."""
        self.root.mkdir(parents=True, exist_ok=True)
        content = {
            "schema_version": 1,
            "name": self.name,
            "command": "attnbench sweep-k spec.yaml",
            "table": {"rows": "label", "cols": None, "value": "test/bleu", "reduce": "mean_std", **(table or {})},
            "source": source,
            "cells": self.cells,
        }
        (self.root / "grid.json").write_text(json.dumps(content))
        return self.root


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., RunFolder]:
    return lambda place="run", **about: RunFolder(tmp_path / place, **about)


@pytest.fixture
def attention() -> dict[str, float]:
    return dict(ATTENTION)


ATTENTION = {
    "attended/encoder_self": 7.96,
    "attended/decoder_self": 5.25,
    "attended/cross": 7.9,
    "entropy/encoder_self": 1.2,
    "entropy/decoder_self": 0.8,
    "entropy/cross": 1.0,
    "train/tokens_per_s": 12345.6,
    "decode/tokens_per_s": 987.6,
}


@pytest.fixture
def sweep(run_folder: Callable[..., RunFolder]) -> RunFolder:
    """Dense with three seeds, top-k with one of three failed, one that never ran."""
    folder = run_folder()
    for seed, bleu in ((1, 35.0), (2, 35.5), (3, 36.1)):
        folder.add("dense", seed, bleu, axes={BUDGET: "inf"}, metrics=ATTENTION)
    folder.add("topk-8", 1, 35.25, axes={BUDGET: 8}, metrics=ATTENTION)
    folder.add("topk-8", 2, 35.75, axes={BUDGET: 8}, metrics=ATTENTION)
    failed = folder.add("topk-8", 3, axes={BUDGET: 8})
    failed.mkdir(parents=True)
    (failed / "error.txt").write_text("the loss is NaN at step 30 (encoder.0.self)\nTraceback ...\n")
    folder.add("topk-1", 1, axes={BUDGET: 1})
    return folder
