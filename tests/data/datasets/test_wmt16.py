from __future__ import annotations

import pytest

from attnbench.data.datasets.base import datasets
from attnbench.data.datasets.wmt16 import comma_below, without_diacritics

ROMANIAN = "Aceşti oameni şi Țara în câmp.\n"  # the first two letters of their kind with cedilla, the third with comma


def give(given) -> None:
    for stem in ("europarl-v7.ro-en", "SETIMES.en-ro"):
        given.text(f"{stem}.en", "These people and the country.\n" * 5)
        given.text(f"{stem}.ro", ROMANIAN * 5)
    for name in ("newsdev2016", "newstest2016"):
        for side, kind, text in (("en", "src", "These people"), ("ro", "ref", ROMANIAN.strip())):
            given.text(f"dev/{name}-enro-{kind}.{side}.sgm", f'<seg id="1">{text}</seg>\n')


@pytest.mark.parametrize(
    ("diacritics", "line"),
    [("keep", "Acești oameni și Țara în câmp ."), ("remove", "Acesti oameni si Tara in camp .")],
)
def test_diacritics_are_one_thing_on_both_training_and_test(given, prepared, diacritics: str, line: str) -> None:
    give(given)
    data = prepared({"kind": "wmt16-en-ro", "diacritics": diacritics})
    assert len(data.split("train")) == 10
    assert data.split("train").target[9] == line
    assert data.split("test").references[0] == line.replace(" .", ".")
    assert data.tokenize([ROMANIAN.strip()], "ro") == [line]
    assert data.tokenize(["Naïve."], "en") == ["Naïve ."]


def test_letters() -> None:
    assert comma_below("ŞşŢţ") == "ȘșȚț"
    assert without_diacritics("ăâîșțşţ ĂÂÎȘȚ") == "aaistst AAIST"
    assert without_diacritics("Orbán Müller Peña Чайковский") == "Orbán Müller Peña Чайковский"


def test_the_sets_of_sacrebleu() -> None:
    (bundle,) = datasets.parse("wmt16-en-ro").bundles()
    sums = {remote.name: remote.checksum for remote in bundle}
    assert sums["dev.tgz"] == "md5:4a3dc2760bb077f4308cce96b06e6af6"
    assert sums["test.tgz"] == "md5:3d809cd0c2c86adb2c67034d15c4e446"
