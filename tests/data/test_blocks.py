from __future__ import annotations

from attnbench.data.blocks import join_sentences, split_sentences


def test_sentences_come_apart_as_they_were_put_together():
    assert split_sentences(join_sentences(["a b", "", "c"])) == ["a b", "", "c"]
    assert split_sentences("") == [""]
    assert split_sentences("<sep>") == ["", ""]
