"""What the WMT corpora share: evaluation sets by the table of URLs and checksums that sacrebleu ships."""

from __future__ import annotations

from pathlib import PurePosixPath

from attnbench.data.datasets.base import Remote
from attnbench.data.finder import Finder
from attnbench.data.markup import segments
from attnbench.data.parts import Part


def evaluation_archive(name: str, keep_as: str) -> Remote:
    """The archive of a test set of sacrebleu ("wmt14/full")."""
    from sacrebleu.dataset import DATASETS

    entry = DATASETS[name]
    checksum = None if entry.md5 is None else f"md5:{entry.md5[0]}"
    return Remote(keep_as, tuple(entry.data[:1]), checksum)


def evaluation_part(files: Finder, name: str, plain: str, languages: tuple[str, str]) -> Part:
    """Its two files, SGML as released or plain text called `plain`.LANGUAGE."""
    from sacrebleu.dataset import DATASETS

    sgml = [PurePosixPath(path).name for path in DATASETS[name].langpairs["-".join(languages)][:2]]
    if all(files.find(f"{plain}.{language}") for language in languages) and not all(files.find(path) for path in sgml):
        return Part(*files.pair(*([f"{plain}.{language}"] for language in languages)))
    return Part(*files.pair(*([path] for path in sgml)), select=segments)
