"""A case in a process of its own, so that its settings and its memory are its own, too."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attnbench.bench.timer import Case, Timing
from attnbench.core.errors import AttnbenchError
from attnbench.train.onednn import keep_few_products, keep_products_as_shipped, use_onednn_float32
from attnbench.train.runtime import keep_freed_memory, use_device, use_no_tf32, use_threads

_PATIENCE = 10
"""Seconds that a process has to end by itself."""


class Recipe(NamedTuple):
    """How a process makes its case: make(*given), a function of a module. shipped: torch as it comes, without the
    settings that every training here makes."""

    make: Callable[..., Case]
    given: tuple[Any, ...]
    shipped: bool = False


class Apart:
    """One process with one case. Raises AttnbenchError where it cannot make or run it."""

    def __init__(self, recipe: Recipe, threads: int, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, recipe, threads, device), daemon=True)
        with _uninterrupted():
            self._process.start()
        other.close()
        try:
            group, name, work, checked, coarse, settle = self._answer()
        except BaseException:
            self.close()
            raise
        check = (lambda: self._ask("check")) if checked else None
        self.case = Case(group, name, lambda: self._ask("run"), work, check, coarse=coarse, settle=settle)

    def peak(self) -> float:
        """Most memory that it has held so far, in MiB: all of the process, torch with it; on a GPU what torch took."""
        return self._ask("peak")

    def close(self) -> None:
        self._pipe.close()  # which ends it
        self._process.join(_PATIENCE)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def _ask(self, what: str) -> Any:
        with suppress(BrokenPipeError):  # what is left to read says why
            self._pipe.send(what)
        return self._answer()

    def _answer(self) -> Any:
        try:
            fault, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_PATIENCE)
            raise AttnbenchError(
                f"a process that was to be timed ended with {self._process.exitcode}; was there memory enough?"
            ) from None
        if fault is not None:
            raise AttnbenchError(f"a case that was to be timed in a process of its own failed: {fault}")
        return answer


@contextmanager
def together(recipes: list[Recipe], threads: int, device: torch.device) -> Iterator[list[Apart]]:
    """A process for each, all there at once. device: that they act on."""
    with ExitStack() as stack:
        started: list[Apart] = []
        for recipe in recipes:
            started.append(Apart(recipe, threads, device))
            stack.callback(started[-1].close)
        yield started


def with_peaks(timings: list[Timing], recipes: list[Recipe], threads: int, device: torch.device) -> list[Timing]:
    """The timings with the memory that each case takes, measured one process after the other, in two calls each, and
    those that are never timed."""
    found: list[Timing] = []
    for timing, recipe in zip(timings, recipes, strict=True):
        with together([recipe], threads, device) as (one,):
            for _ in range(2 + one.case.settle):
                one.case.run()
            found.append(timing._replace(peak_mb=one.peak()))
    return found


def _serve(pipe: Connection, recipe: Recipe, threads: int, device: torch.device) -> None:
    try:
        use_device(device)
        use_threads(threads)
        if recipe.shipped:
            keep_products_as_shipped()
        else:
            keep_freed_memory()
            keep_few_products()
            use_onednn_float32()
            use_no_tf32()
        case = recipe.make(*recipe.given)
        pipe.send((None, (case.group, case.name, case.work, case.check is not None, case.coarse, case.settle)))
        while (what := _asked(pipe)) is not None:
            if what == "peak":
                pipe.send((None, _peak()))
            elif what == "check":
                assert case.check is not None  # or it would not be asked for
                pipe.send((None, case.check()))
            else:
                case.run()
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
                pipe.send((None, None))
    except KeyboardInterrupt:
        return
    except Exception as error:
        with suppress(OSError):  # nobody is left to read it
            pipe.send((f"{type(error).__name__}: {error}", None))


def _asked(pipe: Connection) -> str | None:
    """What this process is to do next; None when who started it is gone, or wants no more of it."""
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A process started in the block is deaf to Ctrl-C, of which this one tells it by the end of its pipe."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # or the first process would start it, which lets signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _peak() -> float:
    """MiB. On Linux `ru_maxrss` would begin with the parent's."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10
    import resource  # not on every system; nor is `ru_maxrss` counted alike

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10)
