"""Training of LSTM, GRU and ConvS2S models of the papers: layers as attnbench trains them on a processor
(models/_cells.py, models/_windows.py), with keys and values whose gradients are made behind all steps
(core/gathered.py, attention/cached.py), and torch's own layers and products in their place, which for ConvS2S
have padding, too; additive scores are compiled on both sides.

    python training_of_layers.py --rounds 5

Updates with a vocabulary of 10,000 words on batches of random ones, as those of `attnbench speed train`: forward,
backward, clipping and Adam, in turns in one process; everything else is the same. A multiple is the median of
those of single rounds, with the least and the most of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from attnbench.bench import models, sentences
from attnbench.core import processor
from attnbench.data.base import PAD
from attnbench.experiment.document import read_document
from attnbench.experiment.grid import expand
from attnbench.models.base import Sizes
from attnbench.train.onednn import keep_few_products, use_onednn_float32
from attnbench.train.optim import AdamSpec
from attnbench.train.runtime import Runtime, choose_runtime, keep_freed_memory, use_threads
from attnbench.train.step import accumulate, clip

HERE = Path(__file__).parent.parent
CASES = (
    ("constrained/iwslt14-de-en.yaml", "softmax", 2048),
    ("constrained/iwslt14-de-en.yaml", "softmax + CovVector", 2048),
    ("copy_seq2seq/lm1b.yaml", "GRU + additive attention", 2048),
    ("copy_seq2seq/lm1b.yaml", "CNN (ConvS2S)", 2048),
    ("fixed_memory/toy-copy.yaml", "L 50 attention", 6528),
)
"""Specs, their cells, and padded tokens of a batch."""


def update(path: str, label: str, tokens: int, runtime: Runtime) -> tuple[str, Callable[[], Any], int]:
    """The model's name, an update on three batches, and the target tokens of these."""
    spec: Any = next(cell.spec for cell in expand(read_document(HERE / path)).cells if cell.label == label)
    torch.manual_seed(0)
    task, given = models.task(), sentences.batches(3, runtime.device, tokens)
    model = spec.model.build(Sizes(sentences.WORDS, sentences.WORDS, True, PAD, longest_source=64)).train()
    optimizer = AdamSpec().build(model.parameters())

    def run() -> None:
        for batch in given:
            accumulate(task, model, [batch], 0.0, runtime)
            clip(model, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return f"{path.removesuffix('.yaml')}, {label}", run, sum(task.count(batch) for batch in given)


def seconds(run: Callable[[], Any], *, own: bool) -> float:
    with ExitStack() as torchs:
        for name in () if own else ("models._cells.serves", "models._windows.serves", "attention.cached._serves"):
            torchs.enter_context(patch(f"attnbench.{name}", return_value=False))
        if not own:
            torchs.enter_context(patch("attnbench.models.recurrent.gathered", lambda held: held))
        started = time.perf_counter()
        run()
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    given = parser.parse_args()
    runtime = choose_runtime(torch.device("cpu"), given.precision)
    keep_freed_memory()
    keep_few_products()
    use_threads(processor.usable_cores())
    use_onednn_float32()
    print(f"{runtime.precision}, {processor.name()}, threads {torch.get_num_threads()}, torch {torch.__version__}\n")
    print("| model | torch's, tokens/s | attnbench's | times as fast | from | to |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for case in CASES:
        name, run, tokens = update(*case, runtime)
        for own in (False, True):
            seconds(run, own=own)
        rounds = []
        for turn in range(given.rounds):
            taken = {own: seconds(run, own=own) for own in ((False, True) if turn % 2 else (True, False))}
            rounds.append((taken[False], taken[True]))
        ratios = sorted(theirs / ours for theirs, ours in rounds)
        theirs, ours = (tokens / statistics.median(each) for each in zip(*rounds, strict=True))
        print(
            f"| {name} | {theirs:,.0f} | {ours:,.0f} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} | "
            f"{ratios[-1]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
