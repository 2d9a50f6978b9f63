"""oneDNN on a processor: float32 matrix products by it, where that is as exact as the default library and not slower,
and how much of its compiled code is kept."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch

from attnbench.core import measured

_log = logging.getLogger(__name__)

_ERROR = 1e-6
"""Most that a product may differ from the exact one, as a part of it."""
_SLOWER = 0.9
"""Below this part of the default library's speed oneDNN is not used; nearer to 1 one check decides nothing."""
_ROUNDS = 50
"""Times that each is timed, three milliseconds each: of seven, some were off by half beside another process."""
_SIDE = 512
_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Of oneDNN's cache of compiled products, and of the one that torch has before it; each is read at its first use."""
_KEPT = "48"


def use_onednn_float32() -> bool:
    """Send float32 products to oneDNN where torch can and it is as exact, and not clearly slower; returns whether it
    is in use.

    On processors that MKL does not use fully this doubles their speed. The setting permits lower precision, so every
    process looks at the error. The speed is measured once a machine and kept in the cache: last digits depend on the
    library, and what is resumed goes on as it began.
    """
    matmul = _setting()
    if matmul is None:
        return False
    left, right = _pair(256)
    matmul.fp32_precision = "none"
    default = left @ right
    matmul.fp32_precision = "bf16"
    found = left @ right
    # where torch knows no oneDNN for them the setting changes nothing
    if torch.equal(found, default) or relative_error(found, left, right) > _ERROR or not _pays(matmul):
        matmul.fp32_precision = "none"
        return False
    return True


def onednn_gain() -> float | None:
    """How many times as fast oneDNN was found to be as the default library here; None where that was never timed, as
    where torch has no oneDNN for float32."""
    return measured.kept("products", "onednn_gain")


def keep_few_products() -> str:
    """Have oneDNN keep its code for 48 shapes of products in place of 1,024, at half a MiB each, unless the
    environment says otherwise; does nothing once this process has multiplied by it. Returns how many it is to keep.

    Nearly every batch of text has a shape of its own, so the code for a thousand is kept in vain, and what lies
    scattered among the tensors keeps their memory from being reused.
    """
    for name in _CAPACITIES:
        os.environ.setdefault(name, _KEPT)
    return os.environ[_CAPACITIES[0]]


def keep_products_as_shipped() -> None:
    """Undo what `keep_few_products` left to a process that is begun by this one."""
    for name in _CAPACITIES:
        if os.environ.get(name) == _KEPT:
            del os.environ[name]


def onednn_in_use() -> bool:
    """Whether float32 products of this process go to oneDNN, as use_onednn_float32 left it."""
    matmul = _setting()
    return matmul is not None and matmul.fp32_precision == "bf16"


def _setting() -> Any:
    """What torch keeps the choice in; None where it has none."""
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return matmul if hasattr(matmul, "fp32_precision") and torch.backends.mkldnn.is_available() else None


def _pair(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    own = torch.Generator().manual_seed(0)  # a training's draws go on as they would have
    return torch.randn(side, side, generator=own), torch.randn(side, side, generator=own)


def relative_error(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> float:
    """How far `found` lies from the exact product of two matrices, as a part of it."""
    exact = left.double() @ right.double()
    return float((found.double() - exact).norm() / exact.norm())


def _pays(matmul: Any) -> bool:
    gain = measured.once("products", "onednn_gain", lambda: _gain(matmul))
    return gain is None or gain >= _SLOWER


def _gain(matmul: Any) -> float:
    """How many times as fast oneDNN is as the default library; leaves oneDNN chosen."""
    left, right = _pair(_SIDE)

    def product(choice: str) -> None:
        matmul.fp32_precision = choice
        torch.mm(left, right)

    ways = {choice: functools.partial(product, choice) for choice in ("none", "bf16")}
    gain = measured.gain(ways, _ROUNDS, enough=_SLOWER)
    if gain < _SLOWER:
        _log.info("float32 products stay with the default library, which is %.1f times as fast here", 1 / gain)
    return gain
