"""Blocks hold every sentence once, in order, within one document and the limit, and no block could hold more."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.data.pack import pack
from attnbench.data.store import TextLines, TextWriter


class Words:
    """A vocabulary for which a word is a token."""

    rows = filled = 9

    def encode_batch(self, texts):
        return [[4] * len(text.split()) for text in texts]


def packed(folder, sentences, limit):
    """(document, source sentences, target sentences) of each block, and what `pack` counts."""
    sides = {"docs": 0, "src.txt": 1, "tgt.txt": 2, "tgt.raw": 2}
    for name, place in sides.items():
        with TextWriter(folder / f"test.{name}") as writer:
            for sentence in sentences:
                writer.write(sentence[place])
    counts = pack(folder, "test", (Words(), Words()), limit)  # pyright: ignore[reportArgumentType]
    columns = [list(TextLines(folder / f"test.{name}")) for name in sides]
    assert columns[2] == columns[3]
    rows = zip(*columns[:3], strict=True)
    return [(name, source.split(" <sep> "), target.split(" <sep> ")) for name, source, target in rows], counts


def line(count, letter):
    return " ".join([letter] * count)


@settings(deadline=None, max_examples=60)
@given(
    sentences=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(1, 6)).map(
            lambda drawn: (f"d{drawn[0]}", line(drawn[1], "s"), line(drawn[2], "t"))
        ),
        min_size=1,
        max_size=30,
    ),
    limit=st.integers(2, 20),
)
def test_blocks_hold_all_and_no_more_than_fits(tmp_path_factory, sentences, limit):
    blocks, counts = packed(tmp_path_factory.mktemp("pack"), sentences, limit)
    flat = [(name, *pair) for name, *sides in blocks for pair in zip(*sides, strict=True)]
    assert flat == sentences
    assert (counts["pairs"], counts["sentences"]) == (len(blocks), len(sentences))
    widths = [max(sum(len(text.split()) + 1 for text in side) for side in sides) for _, *sides in blocks]
    for width, (_, sources, _targets) in zip(widths, blocks, strict=True):
        assert width <= limit or len(sources) == 1
    assert counts["longer"] == sum(width > limit for width in widths)
    for before, after in pairwise(blocks):
        joint = [before[side] + after[side][:1] for side in (1, 2)]
        fits = max(sum(len(text.split()) + 1 for text in side) for side in joint) <= limit
        assert before[0] != after[0] or not fits


def test_a_word_spelt_like_the_separator_parts_nothing(tmp_path):
    blocks, _ = packed(tmp_path, [("a", "x <sep> y", "X"), ("a", "z", "Z")], 20)
    assert blocks == [("a", ["x sep y", "z"], ["X", "Z"])]
