"""Time csoftmax and csparsemax against torch.softmax, forward and backward, gradients for scores and bounds.

    OMP_NUM_THREADS=1 python experiments/constrained/time_bounded.py

Bounds as fertilities leave them, and bounds that sum to little more than 1. The methods take turns in one run; shown
are the median, the least, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from attnbench.attention.transforms.csoftmax import csoftmax
from attnbench.attention.transforms.csparsemax import csparsemax
from attnbench.train.runtime import keep_freed_memory

SHAPE = (64, 4, 32, 32)

METHODS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": lambda scores, upper: scores.softmax(-1),
    "csoftmax": lambda scores, upper: csoftmax(scores, upper=upper),
    "csparsemax": lambda scores, upper: csparsemax(scores, upper=upper),
}


def fertilities() -> Tensor:
    """1 to 3 for a word, of which up to 1.5 are spent; 1 for the sink."""
    left = (torch.randint(1, 4, (SHAPE[0], 1, 1, SHAPE[-1])) - 1.5 * torch.rand(SHAPE)).clamp_min(0)
    left[..., -1] = 1
    return left


def tight() -> Tensor:
    """Sums of 1.05 to 2.05."""
    bounds = torch.rand(SHAPE)
    return bounds / bounds.sum(-1, keepdim=True) * (1.05 + torch.rand(*SHAPE[:-1], 1))


def seconds(method: Callable[[Tensor, Tensor], Tensor], scores: Tensor, upper: Tensor, grad: Tensor) -> float:
    scores, upper = scores.clone().requires_grad_(), upper.clone().requires_grad_()
    started = time.perf_counter()
    method(scores, upper).backward(grad)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    keep_freed_memory()
    torch.manual_seed(0)
    scores, grad = torch.randn(SHAPE), torch.randn(SHAPE)
    bounds = {"fertilities": fertilities(), "tight": tight()}
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for kind, upper in bounds.items():
            for name, method in METHODS.items():
                times[kind, name].append(seconds(method, scores, upper, grad))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {list(SHAPE)}, float32, {rounds} rounds")
    for (kind, name), taken in times.items():
        median, base = statistics.median(taken), statistics.median(times[kind, "softmax"])
        print(f"{kind:12} {name:11} {1e3 * median:6.2f} ms (least {1e3 * min(taken):5.2f})  {median / base:5.1f} x")


if __name__ == "__main__":
    main()
