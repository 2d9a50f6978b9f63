from __future__ import annotations

import pytest

from attnbench.core.errors import DataError
from attnbench.data.datasets.base import datasets

LINES = {
    "de": "Zwei junge Männer sind im Freien.\nEin Hund läuft.\n",
    "en": "Two young men are outside.\nA dog's running.\n",
    "fr": "Deux jeunes hommes sont dehors.\nUn chien court.\n",
}


@pytest.mark.parametrize("pattern", ["{}.gz", "{}", "data/task1/raw/{}.gz", "x/{}.xz"])
@pytest.mark.parametrize(("source", "target"), [("de", "en"), ("en", "fr")])
def test_released_files_in_any_form(given, prepared, pattern: str, source: str, target: str) -> None:
    for split in ("train", "val", "test_2016_flickr", "test_2017_flickr"):
        for language, text in LINES.items():
            given.text(pattern.format(f"{split}.{language}"), text)
    data = prepared(f"multi30k-{source}-{target}")
    assert data.languages == (source, target)
    assert {split: len(data.split(split)) for split in ("train", "valid", "test")} == dict.fromkeys(
        ("train", "valid", "test"), 2
    )
    assert list(data.split("test").references) == LINES[target].splitlines()
    assert data.split("train").source[0] == LINES[source].splitlines()[0].lower().replace(".", " .")


def test_each_missing_file_is_named(given, prepared) -> None:
    given.text("train.de.gz", LINES["de"])
    with pytest.raises(DataError) as caught:
        prepared("multi30k-de-en")
    wanted = [line.strip() for line in str(caught.value).splitlines() if "(plain" in line]
    assert wanted == [
        f"{name}.gz (plain, .gz or .xz)"
        for name in ("train.en", "val.de", "val.en", "test_2016_flickr.de", "test_2016_flickr.en")
    ]
    assert str(caught.value).endswith("attnbench prepare multi30k-de-en --from DIR")


@pytest.mark.parametrize("kind", ["multi30k-de-en", "multi30k-en-de", "multi30k-fr-en", "multi30k-en-fr"])
def test_every_download_is_pinned(kind: str) -> None:
    (bundle,) = datasets.parse(kind).bundles()
    assert len(bundle) == 6
    assert all(remote.checksum and remote.checksum.startswith("sha256:") and remote.size for remote in bundle)
    assert len({remote.checksum for remote in bundle}) == 6
