"""Memory that updates take where every batch has a shape of its own, as batches of text do.

    python memory_of_batches.py --size mini --batches 40

The batches and models of `attnbench speed train`, which times two batches. Each case is a process of its own that meets
all batches twice; its peak is what the system counts, on Linux. ONEDNN_PRIMITIVE_CACHE_CAPACITY and LRU_CACHE_CAPACITY
are heeded as anywhere: at 1024 they are what torch has.
"""

from __future__ import annotations

import argparse

import torch

from attnbench.bench import models, nn_transformer
from attnbench.bench.processes import Recipe, with_peaks
from attnbench.bench.subjects import transformer
from attnbench.bench.timer import Timing
from attnbench.core import processor
from attnbench.train.runtime import Runtime, multiplies_bfloat16

CPU = torch.device("cpu")


def cases(size: str, batches: int) -> dict[str, Recipe]:
    shipped = (size, batches, CPU, nn_transformer.SHIPPED)
    found = {nn_transformer.SHIPPED: Recipe(nn_transformer.training, shipped, shipped=True)}
    for precision, name in (("fp32", "float32"), ("bf16", "bfloat16")):
        if precision == "fp32" or multiplies_bfloat16(CPU):
            runtime = Runtime(CPU, precision)
            found[f"attnbench, {name}"] = Recipe(models.training, (transformer(size, "softmax"), batches, runtime))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="mini", choices=("mini", "iwslt"))
    parser.add_argument("--batches", type=int, default=40)
    given = parser.parse_args()
    threads = processor.usable_cores()
    print(
        f"size {given.size}, {given.batches} batches, {processor.name()}, threads {threads}, torch {torch.__version__}"
    )
    print("\n| case | peak, MiB | times the first |\n| --- | ---: | ---: |")
    first = None
    for name, recipe in cases(given.size, given.batches).items():
        (timing,) = with_peaks([Timing(given.size, name, 1, 1, 1, 1, 1, None)], [recipe], threads, CPU)
        assert timing.peak_mb is not None
        first = first or timing.peak_mb
        print(f"| {name} | {timing.peak_mb:,.0f} | {timing.peak_mb / first:.2f} |", flush=True)


if __name__ == "__main__":
    main()
