from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.data.text import cleaner, moses_detokenize, spaced

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
