from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.data.text import cleaner, moses_detokenize, moses_normalize, printing, spaced

PLAIN = {"moses": True, "normalize": False, "split_hyphens": False, "lowercase": False}


@pytest.mark.parametrize(
    ("language", "raw", "tokenized"),
    [
        # tokenizer.perl of Moses, by hand
        ("en", "It's \"fine\", isn't it?", "It &apos;s &quot; fine &quot; , isn &apos;t it ?"),
        ("de", "Ein Haus & ein [Hof].", "Ein Haus &amp; ein &#91; Hof &#93; ."),
        ("fr", "L'homme qu'il voit.", "L&apos; homme qu&apos; il voit ."),
        ("en", "1,000 cats, Mr. Smith...", "1,000 cats , Mr. Smith ..."),
    ],
)
def test_moses_tokens_and_back(language: str, raw: str, tokenized: str) -> None:
    assert cleaner(language, **PLAIN)(raw) == tokenized
    assert moses_detokenize(language, [tokenized]) == [raw]


def test_steps_of_a_recipe() -> None:
    assert cleaner("en", **PLAIN | {"lowercase": True})("A  Well-Known\tDog.") == "a well-known dog ."
    assert cleaner("en", **PLAIN | {"split_hyphens": True})("well-known") == "well @-@ known"
    assert cleaner("en", **PLAIN | {"moses": False})(" a, b ") == "a, b"
    assert cleaner("en", **PLAIN | {"normalize": True})("a\u201cb\u201d\u0007c") == "a &quot; b &quot; c"


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(blacklist_categories=["Cs"])))
def test_spaced_leaves_single_spaces_alone(text: str) -> None:
    out = spaced(text)
    assert out == spaced(out)
    assert out.split(" ") == (text.split() or [""])


def test_what_does_not_print_is_a_space() -> None:
    """As remove-non-printing-char.perl has it."""
    clean = moses_normalize("en")
    assert clean("a\tb") == "a b"
    assert clean("price\x85more 5\x966") == "price more 5 6"
    assert clean("foo\xadbar \u200dx") == "foo bar  x"
    assert printing("naïve “日本”  x") == "naïve “日本”  x"
