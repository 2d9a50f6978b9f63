"""Training and decoding while another program uses a core: with OpenMP's threads as they are, and relieved
(attnbench/core/contention.py).

    python beside_others.py --busy 1 --rounds 4

Each round has four parts, of a few seconds a case: on idle cores and beside programs that only compute, as it is and
relieved. A multiple is the median of those of single rounds, with the least and the most of them.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from attnbench.bench import models
from attnbench.bench.sentences import Load
from attnbench.bench.subjects import transformer
from attnbench.core import processor
from attnbench.core.contention import relieved
from attnbench.train.onednn import keep_few_products, use_onednn_float32
from attnbench.train.runtime import choose_runtime, keep_freed_memory, use_threads

SECONDS = 4.0
PARTS = ("idle", "idle, relieved", "busy", "busy, relieved")


def cases() -> dict[str, Callable[[], object]]:
    runtime = choose_runtime(torch.device("cpu"), "fp32")
    tiny, mini = (transformer(size, "softmax") for size in ("tiny", "mini"))
    small = tiny._replace(update=tiny.update._replace(tokens=512))
    return {
        "update, tiny, 512 tokens": models.training(small, 1, runtime).run,
        "update, mini, 4,096 tokens": models.training(mini, 1, runtime).run,
        "beam 5, mini, 16 sources": models.decoding(mini, Load(16, 26, 5), runtime).run,
        "greedy, mini, one source": models.decoding(mini, Load(1, 26, 1), runtime).run,
    }


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute as long as the block lasts."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def seconds(run: Callable[[], object]) -> float:
    """The median of the calls of some seconds, behind one of each that is not counted."""
    run()
    taken: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS or len(taken) < 3:
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=1, help="programs beside it")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    keep_freed_memory()
    keep_few_products()
    use_threads(processor.usable_cores())
    use_onednn_float32()
    made, threads = cases(), torch.get_num_threads()
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(given.rounds):
        for part in PARTS:
            others: Any = busy(given.busy) if part.startswith("busy") else nullcontext()
            with others, relieved(threads) if part.endswith("relieved") else nullcontext():
                for name, run in made.items():
                    found.setdefault((name, part), []).append(seconds(run))
    print(f"{processor.name()}, {threads} threads, {given.busy} busy beside them, torch {torch.__version__}\n")
    print(f"| ms | {' | '.join(PARTS)} | relieved, idle: times as fast | busy: times as fast | from | to |")
    print("| --- |" + " ---: |" * 8)
    for name in made:
        times = [f"{1000 * statistics.median(found[name, part]):,.1f}" for part in PARTS]
        idle, beside = (
            sorted(
                plain / helped
                for plain, helped in zip(found[name, part], found[name, f"{part}, relieved"], strict=True)
            )
            for part in ("idle", "busy")
        )
        print(
            f"| {name} | {' | '.join(times)} | {statistics.median(idle):.2f} | {statistics.median(beside):.2f} | "
            f"{beside[0]:.2f} | {beside[-1]:.2f} |"
        )


if __name__ == "__main__":
    main()
