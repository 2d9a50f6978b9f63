"""What holds for every test: one thread, a cache and a terminal of its own; and the command line, called in process."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: kernels run as Python, on any device

import pytest
import torch
from hypothesis import settings
from typer.testing import CliRunner

from attnbench.core.processor import usable_cores

settings.register_profile("suite", deadline=None, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=2000)  # pytest --hypothesis-profile=thorough
settings.load_profile("suite")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


_ROOT = "ATTNBENCH_TESTS"
"""Environment variable: the folder of the caches of all workers, and of tests that run tests."""


def pytest_configure(config: pytest.Config) -> None:
    """No test reads or fills the user's cache: each process has its own; compiled code is shared. Workers that have no
    test left take some of another's."""
    if config.getoption("dist", "no") == "load":
        config.option.dist = "worksteal"
    pytest.register_assert_rewrite("fused_laws")  # what fails in tests/cases says what it found, too
    if _ROOT not in os.environ:
        os.environ[_ROOT] = tempfile.mkdtemp(prefix="attnbench-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(_ROOT), ignore_errors=True))
    root = Path(os.environ[_ROOT])
    cache = Path(tempfile.mkdtemp(prefix="cache-", dir=root))
    (root / "native").mkdir(exist_ok=True)
    (cache / "native").symlink_to(root / "native")
    os.environ["ATTNBENCH_CACHE"] = str(cache)


def pytest_collection_finish() -> None:
    """What is there by now stays; looking through it for garbage again and again would take seconds."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or packages in C++ take it for a leak


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """`-n auto`: as many as there are cores, but each takes some hundred megabytes."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else min(8, usable_cores())


@pytest.fixture(scope="session", autouse=True)
def _own_world() -> Iterator[None]:
    """No test depends on how wide or colourful the terminal is, or on how many cores there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "160")
        patch.delenv("FORCE_COLOR", raising=False)
        torch.set_num_threads(1)
        yield


@pytest.fixture
def _as_before() -> Iterator[None]:
    """What a command sets for its whole process is put back: logging, threads, the way float32 is multiplied."""
    logger = logging.getLogger("attnbench")
    kept = logger.handlers, logger.propagate, logger.level
    threads = torch.get_num_threads()
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    precision = getattr(matmul, "fp32_precision", None)
    yield
    logger.handlers, logger.propagate, logger.level = kept
    torch.set_num_threads(threads)
    if matmul is not None and precision is not None:
        matmul.fp32_precision = precision


@pytest.fixture
def invoke(_as_before: None) -> Callable[..., Any]:
    """`invoke("train", "--seed", 1, code=0)`: run the command in this process; its exit code must be `code`."""
    from attnbench.cli.app import app

    def call(*arguments: object, code: int = 0, stdin: str | None = None) -> Any:
        result = CliRunner().invoke(app, [str(each) for each in arguments], input=stdin, prog_name="attnbench")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, f"exit {result.exit_code}\n{result.stdout}\n{result.stderr}"
        assert "Traceback" not in result.output
        return result

    return call
