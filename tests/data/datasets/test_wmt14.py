from __future__ import annotations

import pytest

from attnbench.core.errors import DataError
from attnbench.data.datasets.base import datasets


def sgml(text: str) -> str:
    return f'<srcset setid="x">\n<doc docid="1">\n<p>\n<seg id="1">{text}</seg>\n</p>\n</doc>\n</srcset>\n'


def give(given, news: str = "v9", pairs: int = 80) -> None:
    for stem, folder in (("europarl-v7", "training"), ("commoncrawl", "."), (f"news-commentary-{news}", "training")):
        for side in ("en", "de"):
            given.text(f"{folder}/{stem}.de-en.{side}", "".join(f"{stem} a-{side} {n}\n" for n in range(pairs)))
    for side, kind in (("en", "src"), ("de", "ref")):
        given.text(f"test-full/newstest2014-deen-{kind}.{side}.sgm", sgml(f"2014 {side}"))
        given.text(f"test/newstest2013-src.{side}.sgm", sgml(f"2013 {side}"))


def test_three_corpora_and_the_news_tests(given, prepared) -> None:
    give(given)
    data = prepared("wmt14-en-de")
    train = data.split("train")
    assert len(train) == 240
    assert train.source[0] == "europarl @-@ v7 a @-@ en 0"
    assert train.target[239] == "news @-@ commentary @-@ v9 a @-@ de 79"
    assert list(data.split("valid").references) == ["2013 de"]
    assert list(data.split("test").references) == ["2014 de"]
    assert data.detokenize([train.source[0]]) == ["europarl-v7 a-en 0"]


def test_every_100th_pair_of_the_whole_for_validation(given, prepared) -> None:
    give(given, news="v12")
    data = prepared({"kind": "wmt14-en-de", "valid": "every_100th", "news_commentary": "v12"})
    assert [line.split()[-1] for line in data.split("valid").source] == ["19", "39"]  # lines 100 and 200 of 240
    assert len(data.split("train")) == 238


def test_too_few_pairs_to_hold_any_are_told_without_options_that_it_has_not(given, prepared) -> None:
    give(given, news="v12", pairs=25)
    with pytest.raises(DataError, match=r"75 pairs, was held out for valid; give more, or files for valid$"):
        prepared({"kind": "wmt14-en-de", "valid": "every_100th", "news_commentary": "v12"})


def test_lines_that_are_left_out_count_and_held_ones_are_cleaned(given, prepared) -> None:
    """As prepare-wmt14en2de.sh does: lines are taken by their number, then both sets are cleaned."""
    give(given, news="v12")
    for side, words in (("en", 1), ("de", 9)):  # too unlike in length: the 5th line of all, and the 200th
        text = [f"europarl-v7 a-{side} {n}\n" for n in range(80)]
        text[4] = "x " * words + "\n"
        given.text(f"training/europarl-v7.de-en.{side}", "".join(text))
        text = [f"news-commentary-v12 a-{side} {n}\n" for n in range(80)]
        text[39] = "x " * words + "\n"
        given.text(f"training/news-commentary-v12.de-en.{side}", "".join(text))
    data = prepared({"kind": "wmt14-en-de", "valid": "every_100th", "news_commentary": "v12"})
    assert [line.split()[-1] for line in data.split("valid").source] == ["19"]
    assert len(data.split("train")) == 237


def test_text_joined_earlier_and_plain_tests(given, prepared) -> None:
    for name in ("train", "newstest2013", "newstest2014"):
        for side in ("en", "de"):
            given.text(f"{name}.{side}", f"the {name} {side}\n")
    data = prepared("wmt14-en-de")
    assert list(data.split("test").references) == ["the newstest2014 de"]


def test_the_tests_come_with_the_checksums_that_sacrebleu_ships() -> None:
    (bundle,) = datasets.parse("wmt14-en-de").bundles()
    full = next(remote for remote in bundle if remote.name == "test-full.tgz")
    assert full.checksum == "md5:a8cd784e006feb32ac6f3d9ec7eb389a"
    assert full.urls[0].endswith("wmt14/test-full.tgz")
    assert "test.tgz" in [remote.name for remote in bundle]
    (bundle,) = datasets.parse({"kind": "wmt14-en-de", "valid": "every_100th"}).bundles()
    assert "test.tgz" not in [remote.name for remote in bundle]


def test_the_hub_is_asked_only_for_the_training_set_that_it_has() -> None:
    assert datasets.parse("wmt14-en-de").hub() is not None
    for other in ({"news_commentary": "v12"}, {"valid": "every_100th"}):
        assert datasets.parse({"kind": "wmt14-en-de", **other}).hub() is None
