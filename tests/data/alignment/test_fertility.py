from __future__ import annotations

import pytest

from attnbench.data.alignment.fertility import fertilities

ALIGNMENTS = [[(0, 0), (2, 1), (2, 2), (2, 2)], [], [(0, 1), (0, 0), (0, 2)], []]


def test_target_words_of_each_position_at_least_one():
    counts = fertilities(ALIGNMENTS, [3, 1, 2, 0])
    assert [each.tolist() for each in counts] == [[1, 1, 2], [1], [3, 1], []]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="alignment 1 has a link beyond the 2 words"):
        fertilities([[], [(2, 0)]], [1, 2])
    with pytest.raises(ValueError, match=r"argument 2 is (longer|shorter)"):
        fertilities([[]], [1, 2])
