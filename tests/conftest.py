"""What holds for every test: one thread, a cache and a terminal of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _own_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the user's cache, and none depends on how wide or colourful the terminal is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNBENCH_CACHE", str(tmp_path_factory.mktemp("attnbench-cache")))
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "160")
        patch.delenv("FORCE_COLOR", raising=False)
        torch.set_num_threads(1)
        yield
