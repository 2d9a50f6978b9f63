"""Peak memory of preparing and of batching, for corpora of different size: it must not grow with the corpus.

    python experiments/memory/peak_memory.py --pairs 100000 5000000 --folder /big/disk > experiments/memory/results.md

Each corpus is generated (pairs of 4 to 14 words, 20,000 different words a side), prepared as `parallel` with a joint
BPE of 8,000, and read for one epoch of batches; each step in a process of its own, whose peak resident memory (VmHWM,
mapped files included) is read at its end. Nothing is left in the folder. Needs 1 GB of disk for every 2 million pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = 20_000
BLOCK = 10_000
TOKENS = 4096


def recipe(folder: Path, tokenizer: str) -> dict[str, object]:
    train = {"source": str(folder / "train.src"), "target": str(folder / "train.tgt")}
    vocabulary: dict[str, object] = {"kind": "bpe", "vocab": 8000}
    if tokenizer == "word":
        vocabulary = {"kind": "word", "source_vocab": 8000, "target_vocab": 8000}
    dataset = {"kind": "parallel", "languages": ["en", "de"], "train": train, "hold_every": 1000}
    return {"dataset": dataset, "pretokenize": "none", "tokenizer": vocabulary}


def generate(folder: Path, pairs: int, tokenizer: str) -> dict[str, float]:
    """Words drawn by Zipf's law; every target word is a fixed partner of a source word, in reverse order."""
    import numpy as np

    rng = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    names = ["".join(rng.choice(letters, rng.integers(2, 10))) + str(number % 10) for number in range(WORDS)]
    with (folder / "train.src").open("w") as source, (folder / "train.tgt").open("w") as target:
        for first in range(0, pairs, BLOCK):
            lengths = rng.integers(4, 15, min(BLOCK, pairs - first))
            drawn = np.minimum(rng.zipf(1.2, lengths.sum()) - 1, WORDS - 1).tolist()
            at = 0
            for length in lengths.tolist():
                words = drawn[at : at + length]
                at += length
                source.write(" ".join([names[word] for word in words]) + "\n")
                target.write(" ".join([names[WORDS - 1 - word] for word in reversed(words)]) + "\n")
    return {}


def prepare(folder: Path, pairs: int, tokenizer: str) -> dict[str, float]:
    from attnbench.data.prepare import prepare, read_manifest
    from attnbench.data.recipe import Recipe

    started = _megabytes()
    path = prepare(Recipe.model_validate(recipe(folder, tokenizer)), cache=folder / "cache")
    assert read_manifest(path)["splits"]["train"]["read"] == pairs
    return {"imports": started, "disk": sum(file.stat().st_size for file in path.iterdir()) / 1e6}


def batches(folder: Path, pairs: int, tokenizer: str) -> dict[str, float]:
    import torch

    from attnbench.data.corpus import Data
    from attnbench.data.prepare import prepared_path
    from attnbench.data.recipe import Recipe

    torch.set_num_threads(1)
    data = Data.open(prepared_path(Recipe.model_validate(recipe(folder, tokenizer)), folder / "cache"))
    started = _megabytes()
    seen = 0
    for after, batch in data.batches(1, tokens=TOKENS):
        seen += len(batch.index)
        if after.epoch:
            break
    assert seen == len(data.split("train"))
    return {"imports": started}


STEPS = {"generate": generate, "prepare": prepare, "batches": batches}


def _megabytes() -> float:
    """Peak resident memory of this process since it was started (ru_maxrss would count its parent's too)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _child(step: str, folder: Path, pairs: int, tokenizer: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--step", step, "--folder", str(folder), "--pairs", str(pairs)]
    ran = subprocess.run([*command, "--tokenizer", tokenizer], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ran.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[100_000, 5_000_000])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--tokenizer", choices=["bpe", "word"], default="bpe")
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        begun = time.perf_counter()
        facts = STEPS[given.step](given.folder, given.pairs[0], given.tokenizer)
        facts |= {"seconds": time.perf_counter() - begun, "cpu": time.process_time(), "peak": _megabytes()}
        sys.stdout.write(json.dumps(facts))
        return
    rows = []
    for pairs in given.pairs:
        folder = Path(tempfile.mkdtemp(dir=given.folder, prefix="peak-memory-"))
        try:
            for step in STEPS:
                facts = _child(step, folder, pairs, given.tokenizer)
                if step != "generate":
                    rows.append((step, pairs, facts))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    _report(rows, given.tokenizer)


def _report(rows: list[tuple[str, int, dict[str, float]]], tokenizer: str) -> None:
    lines = [
        "# Peak memory against the size of the corpus",
        "",
        f"Made by `peak_memory.py --tokenizer {tokenizer}` with Python {platform.python_version()}, "
        f"{os.cpu_count()} cores; batches of {TOKENS:,} tokens, one epoch.",
        "",
        "| step | pairs | peak memory, MB | of it after imports, MB | CPU seconds | seconds | prepared, MB on disk |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for step, pairs, facts in sorted(rows, key=lambda row: (row[0] != "prepare", row[1])):
        disk = f"{facts['disk']:,.0f}" if "disk" in facts else ""
        numbers = [f"{facts[name]:.0f}" for name in ("peak", "imports", "cpu", "seconds")]
        cells = [step, f"{pairs:,}", *numbers, disk]
        lines.append(f"| {' | '.join(cells)} |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
