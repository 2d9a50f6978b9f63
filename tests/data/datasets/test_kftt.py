from __future__ import annotations

from attnbench.data.datasets.base import datasets

JAPANESE = "京都 は 古 い 都 で あ る 。\n寺 が 多 い 。\n"
ENGLISH = "Kyoto is an old capital -LRB- of Japan -RRB- .\nIt has many temples .\n"


def test_the_tokenised_files_are_taken_not_the_others_of_the_same_name(given, prepared) -> None:
    members = {}
    for name in ("train", "dev", "tune", "test"):
        members[f"kftt-data-1.0/data/orig/kyoto-{name}.ja"] = JAPANESE.replace(" ", "")
        members[f"kftt-data-1.0/data/orig/kyoto-{name}.en"] = ENGLISH
        members[f"kftt-data-1.0/data/tok/kyoto-{name}.ja"] = JAPANESE
        members[f"kftt-data-1.0/data/tok/kyoto-{name}.en"] = ENGLISH
    given.pack("kftt-data-1.0.tar.gz", members)
    data = prepared("kftt")
    for split in ("train", "valid", "test"):
        assert list(data.split(split).source) == JAPANESE.splitlines()
        assert list(data.split(split).target) == ENGLISH.splitlines()


def test_one_archive_holds_it() -> None:
    ((archive,),) = datasets.parse("kftt").bundles()
    assert archive.urls[0].endswith(archive.name)
