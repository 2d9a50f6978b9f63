import math

import pytest

from attnbench.metrics.likelihood import perplexity


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices():
    assert perplexity(7 * math.log(50), 7) == pytest.approx(50)
    assert perplexity(0.0, 3) == 1.0


def test_nothing_to_count_and_too_much():
    assert perplexity(0.0, 0) is None
    assert perplexity(1e6, 1) == math.inf
    assert math.isnan(perplexity(math.nan, 2))
