from __future__ import annotations

import pytest
import torch

from attnbench.attention.transforms.softmax import softmax


def test_equals_torch(case, agree):
    agree(softmax, lambda z: torch.softmax(z, -1), case, 1e-8, kink=-1)


def test_keep_changes_nothing():
    scores = torch.tensor([[1.0, 2.0, 3.0]])
    assert torch.equal(softmax(scores, keep=torch.tensor([True, False, False])), softmax(scores))


def test_refuses_upper():
    with pytest.raises(ValueError, match="'softmax' takes no 'upper'"):
        softmax(torch.zeros(2, 2), upper=torch.ones(2))


@pytest.mark.parametrize("valid", [torch.ones(3), torch.ones(5).bool(), torch.ones(4, 2, 3).bool()])
def test_a_mask_that_does_not_fit_is_refused(valid):
    with pytest.raises(ValueError, match="'valid'"):
        softmax(torch.zeros(2, 3), valid=valid)
