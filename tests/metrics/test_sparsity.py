import math

import pytest
import torch

from attnbench.metrics.sparsity import SiteSparsity, Sparsity

ALL = torch.ones(1, 2, dtype=torch.bool)


def one_head(*rows):
    return torch.tensor([[rows]], dtype=torch.float32)


def test_known_rows():
    sparsity = Sparsity()
    sparsity.add(one_head([0.5, 0.5, 0.0], [1.0, 0.0, 0.0]), ALL)
    assert sparsity.rows == 2
    assert sparsity.attended == 1.5
    assert sparsity.entropy == pytest.approx(math.log(2) / 2)


def test_rows_of_invalid_queries_do_not_count_whatever_they_hold():
    sparsity = Sparsity()
    sparsity.add(one_head([0.25] * 4, [math.nan] * 4), torch.tensor([[True, False]]))
    assert (sparsity.rows, sparsity.attended) == (1, 4.0)
    assert sparsity.entropy == pytest.approx(math.log(4))


def test_dead_rows_attend_nothing():
    sparsity = Sparsity()
    sparsity.add(one_head([0.0, 0.0], [0.0, 1.0]), ALL)
    assert (sparsity.attended, sparsity.entropy) == (0.5, 0.0)


def test_gates_have_the_entropy_of_their_row_over_its_sum():
    sparsity = Sparsity()
    sparsity.add(one_head([0.9, 0.9, 0.0], [0.3, 0.3, 0.0]), ALL)
    assert sparsity.entropy == pytest.approx(math.log(2), rel=1e-6)
    assert sparsity.attended == 2.0


def test_parts_add_up_to_the_whole_and_heads_count_alike():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(6, 3, 4, 5, generator=generator)
    weights = weights * (weights > 0.4)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    valid = torch.rand(6, 4, generator=generator) > 0.3
    whole, parts = Sparsity(), Sparsity()
    whole.add(weights, valid)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        parts.add(weights[rows], valid[rows])
    assert whole.rows == parts.rows == 3 * int(valid.sum())
    assert whole.attended == pytest.approx(parts.attended)
    assert whole.entropy == pytest.approx(parts.entropy)

    kept, nats = 0, 0.0  # the definition, row by row
    for b, h, q in torch.cartesian_prod(torch.arange(6), torch.arange(3), torch.arange(4)).tolist():
        if valid[b, q]:
            row = [w for w in weights[b, h, q].tolist() if w > 0]
            kept, nats = kept + len(row), nats - sum(w * math.log(w) for w in row)
    assert whole.attended == pytest.approx(kept / whole.rows)
    assert whole.entropy == pytest.approx(nats / whole.rows, rel=1e-5)


def test_padding_keys_change_nothing():
    plain, padded = Sparsity(), Sparsity()
    weights = torch.softmax(torch.randn(2, 2, 3, 4, generator=torch.Generator().manual_seed(1)), -1)
    valid = torch.ones(2, 3, dtype=torch.bool)
    plain.add(weights, valid)
    padded.add(torch.nn.functional.pad(weights, (0, 3)), valid)
    assert (plain.attended, plain.entropy) == (padded.attended, pytest.approx(padded.entropy))


def test_half_precision_is_widened():
    sparsity = Sparsity()
    sparsity.add(torch.full((1, 1, 2, 512), 1 / 512, dtype=torch.bfloat16), ALL)
    assert sparsity.entropy == pytest.approx(math.log(512), rel=1e-5)


def test_nothing_valid_gives_none():
    sparsity = Sparsity()
    assert (sparsity.attended, sparsity.entropy) == (None, None)
    sparsity.add(one_head([1.0], [1.0]), ~ALL)
    sparsity.add(torch.zeros(0, 4, 2, 3), torch.zeros(0, 2, dtype=torch.bool))
    assert (sparsity.rows, sparsity.attended, sparsity.entropy) == (0, None, None)


def test_shapes_that_do_not_belong_together():
    with pytest.raises(ValueError, match="query_valid"):
        Sparsity().add(torch.zeros(2, 1, 3, 4), torch.ones(2, 4, dtype=torch.bool))


def test_numbers_by_site():
    sites = SiteSparsity()
    sites.add("cross", one_head([1.0, 0.0], [0.5, 0.5]), ALL)
    sites.add("cross", one_head([0.5, 0.5], [0.5, 0.5]), ALL)  # a second layer
    sites.add("encoder_self", one_head([1.0], [1.0]), ~ALL)
    assert sites.numbers() == {
        "attended/cross": 1.75,
        "entropy/cross": pytest.approx(0.75 * math.log(2)),
        "attended/encoder_self": None,
        "entropy/encoder_self": None,
    }
