"""What packs weights on this machine, for tests of packed layers."""

from __future__ import annotations

import pytest
import torch

from attnbench.core import packed

needs_compiler = pytest.mark.skipif(not packed._own_packs(torch.float32), reason="no C++ compiler")
WAYS = [
    pytest.param(
        packed._Library,
        marks=pytest.mark.skipif(not packed._library_packs(torch.float32), reason="this torch packs no weights"),
    ),
    pytest.param(packed._Own, marks=needs_compiler),
]
