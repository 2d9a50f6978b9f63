from __future__ import annotations

from attnbench.data.datasets.base import datasets

ROMANIAN = "Aceşti oameni şi Țara."


def test_parliament_trains_and_news_tests(given, prepared) -> None:
    given.text("europarl-v7.ro-en.ro", f"{ROMANIAN}\n" * 5)
    given.text("europarl-v7.ro-en.en", "These people and the country.\n" * 5)
    for name in ("newsdev2016", "newstest2016"):
        for side, kind, text in (("ro", "src", ROMANIAN), ("en", "ref", "These people of the country.")):
            given.text(f"dev/{name}-roen-{kind}.{side}.sgm", f'<seg id="1">{text}</seg>\n')
    data = prepared("europarl-ro-en")
    assert [len(data.split(split)) for split in ("train", "valid", "test")] == [5, 1, 1]
    assert data.split("train").source[4] == "Acești oameni și Țara ."
    assert data.split("test").source[0] == "Acești oameni și Țara ."
    assert data.split("test").references[0] == "These people of the country."
    assert data.tokenize(["Aceşti."], "ro") == ["Acești ."]


def test_the_sets_of_sacrebleu() -> None:
    (bundle,) = datasets.parse("europarl-ro-en").bundles()
    assert [remote.name for remote in bundle] == ["ro-en.tgz", "dev.tgz", "test.tgz"]
    assert all(remote.checksum for remote in bundle[1:])
