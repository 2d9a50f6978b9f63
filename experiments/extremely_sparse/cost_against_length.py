"""Time and memory of self-attention against length, forward and backward: full, and patterns at n = 32.

    OMP_NUM_THREADS=2 python experiments/extremely_sparse/cost_against_length.py --out FOLDER

From projected queries, keys and values to contexts; the projections, which every method has alike, are left out.
Methods take turns, each with a pass that is not timed before one that is; shown are medians. Peak memory is that of a
process of its own for each method and length, above what it held before. The exponent is the slope of log time over
log length. The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.attention.backends import chunked
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.patterns.base import patterns
from attnbench.attention.scores.dot import ScaledDotSpec
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import transforms
from attnbench.attention.types import Dims, Memory, Positions
from attnbench.bench.scaling import slope
from attnbench.experiment.environment import environment
from attnbench.train.onednn import use_onednn_float32
from attnbench.train.runtime import Runtime, keep_freed_memory

LENGTHS = (512, 1024, 2048, 4096, 8192)
WIDTH, HEADS, N = 256, 4, 32
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, SDPA": {"sdpa": True},
    "window": {"pattern": "window"},
    "dilated": {"pattern": "dilated"},
    "block": {"pattern": "block"},
    "global": {"pattern": "global"},
    "BigBird": {"pattern": "bigbird"},
    "random": {"pattern": "random"},
    "top-k out of window": {"transform": "topk_oow"},
    "top-k out of window, in chunks": {"transform": "topk_oow", "limit": 1 << 23},
}


def layer(method: dict[str, Any]) -> MultiHead:
    pattern, transform = method.get("pattern", "full"), method.get("transform", "softmax")
    site = Site(
        ScaledDotSpec(),
        patterns.parse(pattern if pattern == "full" else {"kind": pattern, "n": N}),
        transforms.parse(transform if transform == "softmax" else {"kind": transform, "n": N}),
        backend="auto" if pattern == "full" else "banded",
    )
    torch.manual_seed(0)
    return MultiHead(site, "encoder_self", WIDTH, Dims(heads=HEADS, query_width=WIDTH, key_width=WIDTH), 0.0)


def inputs(length: int) -> list[Tensor]:
    """Queries, keys and values of one sequence."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, HEADS, length, WIDTH // HEADS)
    return [torch.randn(shape, generator=generator, requires_grad=True) for _ in range(3)]


def pass_over(name: str, length: int, limit: int | None = None) -> Callable[[], Tensor]:
    """Forward and backward over one sequence; gives the context. limit: another than the method's."""
    method, module = METHODS[name], layer(METHODS[name])
    query, key, value = inputs(length)
    at = Positions(torch.arange(length), torch.arange(length))

    def run() -> Tensor:
        chunked.LIMIT = limit or method.get("limit", 1 << 62)
        query.grad = key.grad = value.grad = None
        if "sdpa" in method:
            context = nn.functional.scaled_dot_product_attention(query, key, value)
        else:
            context, _, _ = module.mix(query, Memory(key, value), at, need_weights=False)
        context.square().sum().backward()
        return context.detach()

    return run


def same_as_definition() -> float:
    """The largest difference, over all methods, from the same mechanism with all scores; at 512 positions."""
    worst = 0.0
    query, key, value = inputs(512)
    at = Positions(torch.arange(512), torch.arange(512))
    for name, method in METHODS.items():
        with torch.no_grad():
            wanted, _, _ = layer(method).mix(query, Memory(key, value), at, need_weights=True)
        worst = max(worst, float((pass_over(name, 512)() - wanted).abs().max()))
    return worst


def peak(name: str, length: int) -> float:
    """Megabytes that a pass takes at most, in a process of its own."""
    command = [sys.executable, __file__, "--memory-of", name, str(length)]
    returned = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}  # what is freed is given back and counted no more
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=returned).stdout)


def memory_of(name: str, length: int) -> None:
    for small in (64, 256):  # libraries are loaded before the count begins
        pass_over(name, small, limit=1 << 12)()
    run = pass_over(name, length)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is counted from here
    before = _status("VmRSS")
    run()
    print((_status("VmHWM") - before) / 1024)


def _status(field: str) -> int:
    """Kilobytes that Linux says of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(lengths: list[int], rounds: int) -> dict[str, dict[int, float]]:
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    for length in lengths:
        runs = {name: pass_over(name, length) for name in METHODS}
        for _ in range(rounds):
            for name, run in runs.items():
                run()  # what came before may have left no memory at hand
                started = time.perf_counter()
                run()
                taken[name, length].append(time.perf_counter() - started)
        print(f"length {length} timed", file=sys.stderr)
    return {name: {length: statistics.median(taken[name, length]) for length in lengths} for name in METHODS}


def table(seconds: dict[str, dict[int, float]], memory: dict[str, dict[int, float]]) -> str:
    lengths = list(next(iter(seconds.values())))
    head = [f"{length:,}" for length in lengths]
    lines = [f"| milliseconds at length | {' | '.join(head)} | exponent |", "| --- |" + " ---: |" * (len(head) + 1)]
    for name, costs in seconds.items():
        cells = [f"{1e3 * cost:,.1f}" for cost in costs.values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {slope(list(costs.items())):.2f} |")
    lines += ["", f"| peak memory, MB, at length | {' | '.join(head)} |", "| --- |" + " ---: |" * len(head)]
    lines += [f"| {name} | {' | '.join(f'{cost:,.0f}' for cost in costs.values())} |" for name, costs in memory.items()]
    return "\n".join(lines) + "\n"


def draw(seconds: dict[str, dict[int, float]], memory: dict[str, dict[int, float]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "attnbench"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2))
    for axis, costs, scale, label in ((axes[0], seconds, 1e3, "milliseconds"), (axes[1], memory, 1, "peak memory, MB")):
        for name, by_length in costs.items():
            style = "--" if name.startswith("full") else "-." if name.startswith("top-k") else "-"
            axis.loglog(list(by_length), [scale * cost for cost in by_length.values()], style, marker=".", label=name)
        axis.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
        axis.minorticks_off()
        axis.set_xlabel("length")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(
        f"Self-attention of one sequence, forward and backward: n = {N}, {HEADS} heads of width {WIDTH // HEADS}"
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for cost_against_length.{json,md,svg}")
    parser.add_argument("--memory-of", nargs=2, metavar=("METHOD", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        return memory_of(options.memory_of[0], int(options.memory_of[1]))
    lengths = [length for length in LENGTHS if length <= options.longest]
    if len(lengths) < 2:
        parser.error(f"--longest {options.longest}: a slope needs two lengths; {LENGTHS[1]} is the least")
    difference = same_as_definition()
    print(f"largest difference from the definition: {difference:.1e}", file=sys.stderr)
    if difference > 1e-4:
        sys.exit("a path does not give what the definition gives; nothing is timed")
    memory = {name: {length: peak(name, length) for length in lengths} for name in METHODS}
    print("memory measured", file=sys.stderr)
    keep_freed_memory()
    use_onednn_float32()
    seconds = measure(lengths, options.rounds)
    print(table(seconds, memory))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        made = environment(Runtime(torch.device("cpu")))
        content = {"n": N, "width": WIDTH, "heads": HEADS, "rounds": options.rounds, "difference": difference}
        content |= {"seconds": seconds, "peak_mb": memory, "env": made}
        (options.out / "cost_against_length.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (options.out / "cost_against_length.md").write_text(table(seconds, memory), encoding="utf-8")
        draw(seconds, memory, options.out / "cost_against_length.svg")


if __name__ == "__main__":
    main()
