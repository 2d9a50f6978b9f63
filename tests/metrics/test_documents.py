from __future__ import annotations

import pytest

from attnbench.metrics.documents import joined, matched


@pytest.mark.parametrize(
    ("sentences", "count", "wanted"),
    [
        (["a", "b"], 2, ["a", "b"]),
        (["a"], 3, ["a", "", ""]),
        (["a", "b", "c"], 2, ["a", "b c"]),
        (["a", "b"], 1, ["a b"]),
        ([""], 2, ["", ""]),
    ],
)
def test_an_output_has_as_many_sentences_as_the_reference(sentences, count, wanted):
    assert matched(sentences, count) == wanted
    with pytest.raises(ValueError, match="at least one"):
        matched(sentences, 0)


def test_a_document_is_one_line():
    assert joined(["a b", "", "c", "d"], ["x", "x", "y", "x"]) == ["a b", "c", "d"]
    assert joined(["", "e"], ["x", "y"]) == ["", "e"]
    assert joined([], []) == []
