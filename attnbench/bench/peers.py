"""Other packages, timed in the same run where they are installed."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnbench.bench import ctranslate2, marian, nn_kinds, nn_transformer
from attnbench.bench.ops import Method
from attnbench.bench.processes import Recipe
from attnbench.bench.sentences import Load
from attnbench.bench.subjects import Subject
from attnbench.bench.timer import Case
from attnbench.core.errors import MissingExtraError, SpecError, first_line
from attnbench.core.spec import unknown

_log = logging.getLogger("attnbench")


class Peer(NamedTuple):
    """transforms: what it calls its own, as functions of scores over the last dimension. attention: functions of
    queries, keys and values on a GPU, with the attention here that does the same. training: what it trains, from a size
    and a number of batches. models: the same of any model, given as a subject; nothing where it has no such model.
    decoding: what it decodes, from a size, a load and a number of threads."""

    package: str
    version: str
    transforms: dict[str, Callable[[Tensor], Tensor]] = {}  # noqa: RUF012
    attention: dict[str, tuple[Callable[..., Tensor], Method]] = {}  # noqa: RUF012
    training: Callable[[str, int, torch.device], list[Recipe]] | None = None
    models: Callable[[Subject, int, torch.device], list[Recipe]] | None = None
    decoding: Callable[[str, Load, int], list[Recipe]] | None = None


def _entmax() -> Peer:
    entmax = importlib.import_module("entmax")
    return Peer("entmax", importlib.metadata.version("entmax"), {
        "sparsemax": lambda scores: entmax.sparsemax(scores, dim=-1),
        "entmax15": lambda scores: entmax.entmax15(scores, dim=-1),
        "entmax_bisect, alpha = 1.3": lambda scores: entmax.entmax_bisect(scores, alpha=1.3, dim=-1),
    })  # fmt: skip


def _torch() -> Peer:
    def recipes(
        make: Callable[..., Case], what: str | Subject, count: int, device: torch.device, shipped: str, set_up: str
    ) -> list[Recipe]:
        """As shipped, and on a processor, for which things are set up, with those, too."""
        found = [Recipe(make, (what, count, device, shipped), shipped=True)]
        return [*found, Recipe(make, (what, count, device, set_up))] if device.type == "cpu" else found

    def training(size: str, count: int, device: torch.device) -> list[Recipe]:
        names = nn_transformer.SHIPPED, nn_transformer.SET_UP
        return recipes(nn_transformer.training, size, count, device, *names)

    def models(subject: Subject, count: int, device: torch.device) -> list[Recipe]:
        if not nn_kinds.serves(subject.spec):
            return []
        return recipes(nn_kinds.training, subject, count, device, nn_kinds.SHIPPED, nn_kinds.SET_UP)

    return Peer("torch", torch.__version__, training=training, models=models)


def _transformers() -> Peer:
    package = importlib.import_module("transformers")

    def training(size: str, count: int, device: torch.device) -> list[Recipe]:
        return [Recipe(marian.training, (size, count, device), shipped=True)]

    return Peer("transformers", package.__version__, training=training)


def _ctranslate2() -> Peer:
    package = importlib.import_module("ctranslate2")

    def decoding(size: str, load: Load, threads: int) -> list[Recipe]:
        return [Recipe(ctranslate2.decoding, (size, load, kind, threads)) for kind in ctranslate2.COMPUTED_IN]

    return Peer("ctranslate2", package.__version__, decoding=decoding)


def _adasplash() -> Peer:
    package = importlib.import_module("adasplash")

    def entmax15(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return package.adasplash(query, key, value, alpha=1.5, is_causal=False)

    same = Method(transform="entmax15")
    return Peer("adasplash", importlib.metadata.version("adasplash"), attention={"entmax15": (entmax15, same)})


def _sdpa() -> Peer:
    return Peer("sdpa", torch.__version__)


_KNOWN: dict[str, Callable[[], Peer]] = {
    "entmax": _entmax,
    "torch": _torch,
    "transformers": _transformers,
    "ctranslate2": _ctranslate2,
    "adasplash": _adasplash,
    "sdpa": _sdpa,
}


def serves(peer: Peer, what: str, device: torch.device) -> bool:
    """Whether it has something to be timed beside `what` (a key of PLANS) on that device."""
    if peer.package == "sdpa":
        return what in ("ops", "attention", "scaling")  # where it is always timed
    of_attention = bool(peer.attention) and device.type == "cuda"
    if what in ("ops", "transforms", "attention"):
        return (bool(peer.transforms) and what != "attention") or (of_attention and what != "transforms")
    if what == "train":
        return peer.training is not None
    return what == "decode" and peer.decoding is not None and device.type == "cpu"


def find(names: list[str]) -> list[Peer]:
    """The peers of these names, but for those that are not there, which are named. Raises SpecError for an unknown one,
    MissingExtraError where none is there."""
    found: list[Peer] = []
    absent: list[str] = []
    for name in names:
        if name not in _KNOWN:
            raise SpecError(f"--against: {unknown('package', name, sorted(_KNOWN))}")
        try:
            found.append(_KNOWN[name]())
        except ImportError as error:
            if getattr(error, "name", None) == name:  # and not something that it wants
                absent.append(f"--against {name}: it is not installed; pip install {name}")
            else:
                absent.append(
                    f"--against {name}: it is installed, and cannot be imported ({first_line(error)}); mend that, or "
                    "install it anew"
                )
    if absent and not found:
        raise MissingExtraError("; ".join(absent))
    for each in absent:
        _log.warning("%s; the others are timed", each)
    return found
