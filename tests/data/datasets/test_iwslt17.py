from __future__ import annotations

import pytest

from attnbench.core.errors import DataError

YEARS = ("dev2010", "tst2010", "tst2011", "tst2012", "tst2013", "tst2014", "tst2015")


def members() -> dict[str, str]:
    found = {}
    for side, word in (("fr", "L'histoire"), ("en", "The story")):
        lines = "".join(f"{word} {number}.\n" for number in range(10))
        found[f"fr-en/train.tags.fr-en.{side}"] = f"<url>x</url>\n<reviewer href='x'>Y</reviewer>\n{lines}"
        for year in YEARS:
            found[f"fr-en/IWSLT17.TED.{year}.fr-en.{side}.xml"] = f'<seg id="1"> {word} of {year}. </seg>\n'
    return found


@pytest.mark.parametrize("nested", [False, True])
def test_the_release_alone_or_inside_the_whole_archive(given, prepared, nested: bool) -> None:
    data = given.pack("fr-en.tgz", members())
    if nested:
        (given.folder / "fr-en.tgz").unlink()
        given.pack("2017-01-trnted.tgz", {"2017-01-trnted/texts/fr/en/fr-en.tgz": data})
    found = prepared("iwslt17-fr-en")
    assert next(iter(found.split("train").source)) == "L&apos; histoire 0 ."
    assert list(found.split("valid").references) == ["The story of dev2010."]
    assert list(found.split("test").references) == [f"The story of {year}." for year in YEARS[1:]]


def test_other_years_can_be_asked_for(given, prepared) -> None:
    given.pack("fr-en.tgz", members())
    found = prepared({"kind": "iwslt17-fr-en", "valid": ["dev2010", "tst2010"], "test": ["tst2015"]})
    assert len(found.split("valid")) == 2
    assert list(found.split("test").references) == ["The story of tst2015."]


def test_the_hubs_splits_are_the_usual_ones_alone(given, prepared) -> None:
    for name in ("train", "validation", "test"):
        for side in ("fr", "en"):
            given.text(f"{name}.{side}", f"une {name}\n")
    assert list(prepared("iwslt17-fr-en").split("valid").source) == ["une validation"]
    with pytest.raises(DataError, match="leave both keys out"):
        prepared({"kind": "iwslt17-fr-en", "test": ["tst2015"]})
