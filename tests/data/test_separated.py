"""One row more than the vocabulary that is wrapped, and nothing else changed."""

from __future__ import annotations

from attnbench.data.blocks import split_sentences
from attnbench.data.separated import Separated
from attnbench.data.tokenizers.bpe import BpeSpec

TEXT = ["ein haus und ein hof", "die katze schläft im haus", "das haus ist alt"] * 3


def test_the_last_row_is_the_separator():
    inner = BpeSpec(vocab=120).learn(lambda: TEXT, 120)
    outer = Separated(inner)
    assert (outer.rows, outer.separator) == (121, 120)
    assert outer.token(120) == "<sep>"
    block = "ein haus <sep> <sep> das haus"
    ids = outer.encode(block)
    assert ids == [*inner.encode("ein haus"), 120, 120, *inner.encode("das haus")]
    assert outer.decode(ids) == "ein haus <sep>  <sep> das haus"
    assert split_sentences(outer.decode(ids)) == ["ein haus", "", "das haus"]
    assert outer.encode_batch([block, "", "ein hof"]) == [ids, [], inner.encode("ein hof")]


def test_it_is_saved_and_read_back(tmp_path):
    spec = BpeSpec(vocab=120)
    Separated(spec.learn(lambda: TEXT, 120)).save(tmp_path / "bpe.json")
    again = Separated(spec.load(tmp_path / "bpe.json", 120))
    assert again.decode(again.encode("die katze <sep> ein hof")) == "die katze <sep> ein hof"
