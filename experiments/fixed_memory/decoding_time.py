"""Decoding time against the length of the source: no attention, additive attention with precomputed keys, K contexts.

    python experiments/fixed_memory/decoding_time.py --out experiments/fixed_memory/results/decoding-time

The paper's copy-task model (Britz et al. 2017, section 4.1: LSTM, 2 layers on both sides, the encoder bidirectional,
256 units) with beam 10 over 32 sources of exactly L symbols. The weights are drawn, since the time does not depend on
them, and EOS is impossible, so that every output runs to its limit. In each round all systems decode once, in an order
drawn anew; the figures are medians over the rounds, and so are the ratios, which are taken within a round. Two
measurements:

- `seconds`: the whole decoding, encoder included, to L + 1 tokens (the paper's question);
- `ms_per_step`: what is left without the encoder, over the same number of steps at every L.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from attnbench.core.files import write_atomic, write_json
from attnbench.core.packed import pack
from attnbench.data.special import BOS, EOS, PAD, SPECIALS
from attnbench.experiment.environment import environment
from attnbench.models.base import Seq2SeqModel, Sizes, Source, models
from attnbench.search.base import Searcher, SpecialIds, searches
from attnbench.train.onednn import use_onednn_float32
from attnbench.train.runtime import Runtime, keep_freed_memory, use_threads

SYMBOLS, SENTENCES, BEAM = 20, 32, 10
NO_TOKEN = -1
SPECIAL = SpecialIds(bos=BOS, eos=NO_TOKEN, pad=PAD)
ATTENTION, MEMORY = "additive attention", "K 32"


def systems(longest: int) -> dict[str, dict[str, Any]]:
    """Label -> the spec of the model."""
    base = {"kind": "lstm", "layers": 2, "width": 256, "bidirectional": True}
    cross = {
        "no attention": {"module": "none"},
        ATTENTION: {"module": "single_head", "score": "additive"},
        **{
            f"K {slots}": {"module": {"kind": "fixed_memory", "slots": slots, "positions": True, "longest": longest}}
            for slots in (1, 4, 16, 32, 64)
        },
    }
    return {label: {**base, "attention": {"cross": site}} for label, site in cross.items()}


def build(raw: dict[str, Any]) -> Seq2SeqModel:
    torch.manual_seed(1)
    rows = SYMBOLS + len(SPECIALS)
    model = models.parse(raw).build(Sizes(rows, rows, True, PAD)).eval()
    pack(model)  # as every evaluation does
    return model


def sources(length: int) -> Source:
    rng = torch.Generator().manual_seed(length)
    data = torch.randint(len(SPECIALS), len(SPECIALS) + SYMBOLS, (SENTENCES, length + 1), generator=rng)
    data[:, -1] = EOS
    return Source(data, torch.ones_like(data, dtype=torch.bool))


def beam(steps: int) -> Searcher:
    """A beam that takes exactly `steps` steps."""
    return searches.parse({"kind": "beam", "size": BEAM, "max_ratio": 0.0, "max_extra": steps}).build()


def clock(work: Any) -> float:
    started = time.perf_counter()
    with torch.no_grad():
        work()
    return time.perf_counter() - started


def measure(length: int, steps: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Label -> medians of one length, and the ratios to additive attention."""
    built = {label: build(raw) for label, raw in systems(length + 1).items()}
    source, whole, some = sources(length), beam(length + 1), beam(steps)
    times: dict[str, dict[str, list[float]]] = {label: {"seconds": [], "ms_per_step": []} for label in built}
    for model in built.values():
        beam(3)(model, source, SPECIAL)
    order = list(built)
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for label in order:
            model = built[label]
            times[label]["seconds"].append(clock(lambda model=model: whole(model, source, SPECIAL)))
            encoding = clock(lambda model=model: model.encode(source))
            stepping = clock(lambda model=model: some(model, source, SPECIAL)) - encoding
            times[label]["ms_per_step"].append(1000 * stepping / steps)
    found: dict[str, dict[str, Any]] = {}
    for label, own in times.items():
        found[label] = {name: statistics.median(values) for name, values in own.items()}
        found[label] |= {f"{name}_all": values for name, values in own.items()}
        for name, values in own.items():
            ratios = [theirs / ours for theirs, ours in zip(times[ATTENTION][name], values, strict=True)]
            found[label][f"{name}_speedup"] = statistics.median(ratios)
    return found


def page(found: dict[int, dict[str, dict[str, Any]]], steps: int, rounds: int, environ: dict[str, Any]) -> str:
    lengths = list(found)
    lines = [
        "# Decoding time against the length of the source",
        "",
        f"Made by `decoding_time.py`: {SENTENCES} sources, beam {BEAM}, {rounds} rounds, "
        f"{environ['threads']} thread(s), float32, torch {environ['packages']['torch']}.",
        "In brackets: how many times as fast as additive attention in the same round (medians).",
    ]
    for name, title in (
        ("seconds", "Seconds to decode L + 1 tokens, encoder included"),
        ("ms_per_step", f"Milliseconds a step without the encoder, over {steps} steps at every L"),
    ):
        lines += ["", f"## {title}", "", "| | " + " | ".join(f"L {length}" for length in lengths) + " |"]
        lines += ["| --- |" + " ---: |" * len(lengths)]
        for label in found[lengths[0]]:
            own = [found[length][label] for length in lengths]
            cells = [f"{each[name]:.3g} ({each[f'{name}_speedup']:.2f})" for each in own]
            lines.append(f"| {label} | " + " | ".join(cells) + " |")
    first, last = lengths[0], lengths[-1]
    growth = {
        label: found[last][label]["ms_per_step"] / found[first][label]["ms_per_step"] for label in (ATTENTION, MEMORY)
    }
    lines += ["", f"A step at L {last} costs, against one at L {first}: " + ", ".join(
        f"{label} {value:.2f} times" for label, value in growth.items()) + "."]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 50, 100, 200])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="written as OUT.json and OUT.md")
    given = parser.parse_args()
    use_threads(given.threads)
    keep_freed_memory()  # as every cell does: without it blocks of 32 MiB and more pay for their page faults
    use_onednn_float32()
    environ = environment(Runtime(torch.device("cpu")))
    found = {length: measure(length, given.steps, given.rounds) for length in given.lengths}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {"sentences": SENTENCES, "beam": BEAM, "rounds": given.rounds, "steps": given.steps}
    write_json(given.out.with_suffix(".json"), {**settings, "environment": environ, "lengths": found})
    write_atomic(given.out.with_suffix(".md"), page(found, given.steps, given.rounds, environ))


if __name__ == "__main__":
    main()
