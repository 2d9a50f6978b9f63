from __future__ import annotations

from attnbench.data.datasets.base import datasets

ENGLISH = "It &apos;s a story -- a long one .\nRachel Pike : The science\n"
VIETNAMESE = "Đó là một câu chuyện -- dài .\nKhoa học đằng sau\n"


def test_tokenised_files_keep_their_tokens(given, prepared) -> None:
    for name in ("train", "tst2012", "tst2013"):
        given.text(f"{name}.en", ENGLISH)
        given.text(f"{name}.vi.gz", VIETNAMESE)
    data = prepared("iwslt15-en-vi")
    assert list(data.split("train").source) == ENGLISH.splitlines()
    assert list(data.split("valid").target) == VIETNAMESE.splitlines()
    assert data.split("test").references[0] == "Đó là một câu chuyện -- dài."


def test_words_for_the_attention_figures(given, prepared) -> None:
    for name in ("train", "tst2012", "tst2013"):
        given.text(f"{name}.en", ENGLISH)
        given.text(f"{name}.vi", VIETNAMESE)
    data = prepared("iwslt15-en-vi", tokenizer={"kind": "word", "source_vocab": 17200, "target_vocab": 7800})
    assert (data.source_vocabulary.rows, data.target_vocabulary.rows) == (17200, 7800)
    assert data.source_vocabulary.decode(data.split("train").ids.source[0].tolist()) == ENGLISH.splitlines()[0]


def test_empty_lines_of_the_release_are_left_out(given, prepared) -> None:
    for name in ("train", "tst2012", "tst2013"):
        given.text(f"{name}.en", ENGLISH + "\n")
        given.text(f"{name}.vi", VIETNAMESE + "x\n")
    data = prepared("iwslt15-en-vi")
    assert data.manifest["splits"]["train"]["dropped"]["empty"] == 1


def test_the_mirror_publishes_archives() -> None:
    plain, packed = datasets.parse("iwslt15-en-vi").bundles()
    assert len(plain) == 6
    assert all(remote.checksum and remote.checksum.startswith("md5:") for remote in plain)
    assert [remote.name for remote in packed] == ["train-en-vi.tgz", "dev-2012-en-vi.tgz", "test-2013-en-vi.tgz"]
