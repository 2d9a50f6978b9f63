"""What the machine can do, measured; and what was chosen for it, with what each choice gives."""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

import torch

from attnbench.attention.catalog import build_transform
from attnbench.bench.timer import Yardstick, seconds
from attnbench.core import native, packed, processor
from attnbench.core.bfloat16 import multiplies_bfloat16
from attnbench.core.kernels import compiles
from attnbench.train.machine import facts
from attnbench.train.onednn import keep_few_products, onednn_gain, relative_error, use_onednn_float32
from attnbench.train.recorded import records
from attnbench.train.runtime import Runtime, keep_freed_memory

_SIDE = {"cpu": 1024, "cuda": 8192}
"""Side of the matrices whose product is timed."""
_BYTES = {"cpu": 1 << 28, "cuda": 1 << 31}
"""Size of the block whose copy is timed."""
_FREED = 1 << 25
"""Size of the block that is given back and asked for again, in bytes."""


class Roofline(NamedTuple):
    """flops: of matrix products a second, by type. bandwidth: bytes read and written a second by a copy."""

    flops: dict[str, float]
    bandwidth: float

    def better_of(self, other: Roofline) -> Roofline:
        """The higher of each: what else the machine does at a moment only lowers what is measured then."""
        flops = {name: max(rate, other.flops[name]) for name, rate in self.flops.items()}
        return Roofline(flops, max(self.bandwidth, other.bandwidth))


class Choice(NamedTuple):
    """One choice made for this machine. gain: how much faster it made what it is for, than what else there is; None
    where that is not timed."""

    what: str
    chosen: str
    gain: float | None = None
    than: str = "without"


def set_up(runtime: Runtime) -> list[Choice]:
    """Make the choices that every training makes, and time what they give on a processor."""
    device, searched = runtime.device, {"fp32": "float32", "bf16": "bfloat16"}[runtime.precision]
    if device.type != "cpu":
        return [
            Choice("transforms and attention", "Triton's kernels" if compiles(device) else "torch operations"),
            Choice("updates", "recorded as CUDA graphs" if records(runtime) else "computed as they come"),
        ]
    shapes = keep_few_products()
    left, right = (torch.randn(_SIDE["cpu"], _SIDE["cpu"]) for _ in range(2))
    before = _fastest(lambda: left @ right, device)
    sent = use_onednn_float32()
    after = _fastest(lambda: left @ right, device)
    error = relative_error(left @ right, left, right)
    products = f"{'oneDNN' if sent else 'the default library'} (relative error {error:.0e})"
    returned = _fastest(lambda: torch.empty(_FREED, dtype=torch.int8).fill_(1), device)
    keep_freed_memory()
    kept = _fastest(lambda: torch.empty(_FREED, dtype=torch.int8).fill_(1), device)
    of_searches = _of_searches(runtime.product_type)
    transforms = _of_transforms(device)
    compiler = native.engine()  # which knows what compiled code lacks once there is some
    other = None if sent else onednn_gain()
    of_8_bits = packed.chosen(torch.int8)[0], _of_8_bits(device)
    gain, than = (before / after, "without") if sent else (other and 1 / other, "oneDNN")
    return [
        Choice("float32 matrix products", products, gain, than),
        Choice(f"{searched} products of searches", *of_searches),
        Choice("int8 products of searches", f"by {of_8_bits[0]}", of_8_bits[1], "those of float32"),
        Choice("freed memory", "kept for the next step", returned / kept),
        Choice("code of oneDNN's products", f"kept for {shapes} shapes"),
        Choice("transforms, and steps of decoding", f"compiled by {compiler}", transforms, "torch's (entmax-1.5)")
        if compiler else Choice("transforms, and steps of decoding", "torch operations"),
        Choice("threads", f"{torch.get_num_threads()} of {processor.usable_cores()} processors", *_of_threads(device)),
    ]  # fmt: skip


def _of_8_bits(device: torch.device) -> float:
    """How many times as fast layers with a step of five rows are as in float32, both packed: so many that each lies far
    from the processor until it is wanted, as in a search."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(24)))
    states, took = torch.randn(5, 512), []
    for quantized in (None, "int8"):
        with torch.no_grad(), packed.packed(layers, quantized):
            took.append(_fastest(lambda: layers(states), device))
    return took[0] / took[1]


def _of_transforms(device: torch.device) -> float:
    """How many times as fast compiled weights of entmax-1.5 are as those of torch operations, on rows of 32."""
    entmax, scores = build_transform("entmax15"), torch.randn(64, 4, 32, 32)
    compiled = _fastest(lambda: entmax(scores), device)
    with native.off():
        return _fastest(lambda: entmax(scores), device) / compiled


def _of_threads(device: torch.device) -> tuple[float | None, str]:
    """How many times as fast a product is as in one of them."""
    threads = torch.get_num_threads()
    if threads == 1:
        return None, ""
    left, right = (torch.randn(_SIDE["cpu"], _SIDE["cpu"]) for _ in range(2))
    together = _fastest(lambda: left @ right, device)
    torch.set_num_threads(1)
    try:
        return _fastest(lambda: left @ right, device) / together, "one, a product of matrices"
    finally:
        torch.set_num_threads(threads)


def _of_searches(dtype: torch.dtype) -> tuple[str, float | None, str]:
    """With the other way to pack weights, which this machine was found to be slower with."""
    way, gain = packed.chosen(dtype)
    if way == "nothing":
        return "weights as they are", None, ""
    own = way == "code compiled here"
    other = f"weights packed by {'the matrix library' if own else 'code compiled here'}"
    return f"weights packed, by {way}", gain if gain is None or own else 1 / gain, other


def products(device: torch.device, dtype: torch.dtype) -> Yardstick:
    """Of matrices as `roofline` multiplies them."""
    side = _SIDE[device.type]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Yardstick(lambda: left @ right, 2 * side**3)


def copies(like: torch.Tensor) -> Yardstick:
    """Of a tensor of that size: one that fits into a cache is read from there, as what is timed beside is."""
    other = torch.empty_like(like)
    return Yardstick(lambda: other.copy_(like), 2 * like.numel() * like.element_size())


def roofline(device: torch.device) -> Roofline:
    """The fastest of a few products of large matrices and of copies of a large block."""
    side = _SIDE[device.type]
    flops = {}
    known = {"fp32": torch.float32, **({"bf16": torch.bfloat16} if multiplies_bfloat16(device) else {})}
    for name, dtype in known.items():
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        flops[name] = 2 * side**3 / _fastest(lambda left=left, right=right: left @ right, device)
    block = torch.zeros(_BYTES[device.type], dtype=torch.int8, device=device)
    other = torch.empty_like(block)
    return Roofline(flops, 2 * len(block) / _fastest(lambda: other.copy_(block), device))


def signature(runtime: Runtime) -> dict[str, Any]:
    """What a figure of speed depends on, once the machine is set up; figures of different ones are not compared."""
    return {**facts(runtime), "torch": torch.__version__, "python": platform.python_version()}


def _fastest(run: Any, device: torch.device) -> float:
    run()
    return min(seconds(run, 1, device) for _ in range(7))
