from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnbench.core import native, packed
from attnbench.models.base import Sizes, Source
from attnbench.models.transformer import Transformer, TransformerSpec

WORDS, LENGTHS = 19, (6, 1, 4)


@pytest.fixture
def compiled_products(monkeypatch):
    """Whatever is faster on this machine."""
    if native.engine() is None or not packed._own_packs(torch.float32):
        pytest.skip("no C++ compiler, or its products are not exact: the definition serves")
    monkeypatch.setattr(packed, "_way", lambda dtype: packed._Own)


@pytest.fixture
def built() -> Callable[..., Transformer]:
    """Makes a small Transformer, of 19 words, whose settings may be told."""

    def build(**raw: Any) -> Transformer:
        torch.manual_seed(2)
        small = {"layers": 2, "width": 24, "heads": 3, "ffn": 40, "dropout": 0.1, "tie": "none"}
        model = TransformerSpec.model_validate({**small, **raw}).build(Sizes(WORDS, WORDS, False, longest_source=9))
        for parameter in model.parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        return model.eval()

    return build


@pytest.fixture
def source() -> Source:
    """Of 6 words, 1 and 4."""
    valid = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return Source(torch.randint(3, WORDS, valid.shape, generator=torch.Generator().manual_seed(5)) * valid, valid)
