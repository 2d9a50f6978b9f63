"""Processes of their own: what they run, what they tell, how they fail and end."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
import torch

from attnbench.bench import processes
from attnbench.bench.processes import Recipe, together, with_peaks
from attnbench.bench.timer import Case, Timing, measure
from attnbench.core.errors import AttnbenchError

CPU = torch.device("cpu")
MIB = 2**20


def holding(mib: int) -> Case:
    """A case that holds so much memory, once it has run."""
    kept = []
    hold = lambda: kept.append(bytearray(os.urandom(MIB)) * mib)  # noqa: E731
    return Case("held", f"{mib} MiB", hold, 3.0, lambda: 0.25, coarse=True)


def dying() -> Case:
    return Case("g", "dies", lambda: os._exit(7))


def living() -> Case:
    return Case("g", str(os.getpid()), lambda: None)


def failing() -> Case:
    raise ValueError("no such thing")


def counting_threads() -> Case:
    def run() -> None:
        if torch.get_num_threads() != 1:
            raise RuntimeError(f"{torch.get_num_threads()} threads")

    return Case("g", "threads", run)


def test_a_case_is_told_run_and_checked_where_it_lives():
    with together([Recipe(holding, (1,)), Recipe(counting_threads, (), True)], 1, CPU) as (held, threads):
        case = held.case
        assert (case.group, case.name, case.work) == ("held", "1 MiB", 3.0)
        assert case.check() == 0.25
        assert case.coarse
        assert not threads.case.coarse
        assert threads.case.check is None
        threads.case.run()
        with pytest.raises(AttnbenchError, match="definition"):
            measure([case], rounds=1, chunk=0.01, device=CPU)
    assert not multiprocessing.active_children()


def test_the_memory_of_each_is_its_own():
    recipes = [Recipe(holding, (1,)), Recipe(holding, (300,))]
    timings = [Timing("held", name, 1, 1, 1, 1, 1, None) for name in "ab"]
    few, many = with_peaks(timings, recipes, 1, CPU)
    assert (few.name, many.name) == ("a", "b")
    assert many.peak_mb - few.peak_mb == pytest.approx(600, rel=0.2)


def test_what_this_process_held_is_not_the_others(monkeypatch):
    bytearray(os.urandom(MIB)) * 700  # and let go
    timing = Timing("held", "a", 1, 1, 1, 1, 1, None)
    (found,) = with_peaks([timing], [Recipe(holding, (1,))], 1, CPU)
    assert found.peak_mb < 600


def test_a_case_that_cannot_be_made_says_why():
    with pytest.raises(AttnbenchError, match="ValueError: no such thing"), together([Recipe(failing, ())], 1, CPU):
        pytest.fail("nothing is there")


def test_a_process_that_dies_is_no_figure():
    with (
        together([Recipe(dying, ())], 1, CPU) as (one,),
        pytest.raises(AttnbenchError, match=r"ended with 7.*memory enough"),
    ):
        one.case.run()


def test_a_process_that_was_ended_between_two_calls_is_told_as_such():
    with together([Recipe(living, ())], 1, CPU) as (one,):
        one.case.run()
        os.kill(int(one.case.name), signal.SIGKILL)
        one._process.join()
        with pytest.raises(AttnbenchError, match=r"ended with -9.*memory enough"):
            one.case.run()


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no masks of signals here")
def test_an_interrupt_is_not_the_processs_to_answer():
    with together([Recipe(living, ())], 1, CPU) as (one,):
        os.kill(int(one.case.name), signal.SIGINT)
        one.case.run()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


class Ended:
    """The pipe of a process that is asked for nothing."""

    def send(self, what):
        assert what[0] is None

    def recv(self):
        raise EOFError


@pytest.mark.parametrize("shipped", [True, False])
def test_what_is_timed_as_shipped_has_nothing_set_for_it(shipped, monkeypatch):
    found = []
    for name in ("keep_products_as_shipped", "keep_freed_memory", "keep_few_products", "use_onednn_float32"):
        monkeypatch.setattr(processes, name, lambda name=name: found.append(name))
    processes._serve(Ended(), Recipe(living, (), shipped), torch.get_num_threads(), CPU)
    given = ["keep_freed_memory", "keep_few_products", "use_onednn_float32"]
    assert found == (["keep_products_as_shipped"] if shipped else given)


class Left:
    """The pipe of a process whose starter was ended by Ctrl-C while an answer lay unread."""

    def send(self, what):
        if what[0] is not None:
            raise BrokenPipeError

    def recv(self):
        raise ConnectionResetError


def test_a_process_that_nobody_asks_any_more_ends_in_silence():
    processes._serve(Left(), Recipe(living, (), True), torch.get_num_threads(), CPU)
    processes._serve(Left(), Recipe(failing, (), True), torch.get_num_threads(), CPU)


def test_an_interrupt_while_a_process_starts_leaves_none_behind(monkeypatch):
    monkeypatch.setattr(processes.Apart, "_answer", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        processes.Apart(Recipe(living, ()), 1, CPU)
    assert not multiprocessing.active_children()
