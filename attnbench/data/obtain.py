"""Gets the released files of a corpus: a folder of the user's, the cache, the mirrors, the hub, in this order."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attnbench.core.errors import DataError
from attnbench.data.archives import is_archive, unpack
from attnbench.data.datasets.base import DatasetSpec, Remote
from attnbench.data.download import Fetched, Unavailable, fetch, matches
from attnbench.data.finder import Finder, files_below
from attnbench.data.hub import from_hub

log = logging.getLogger("attnbench")


class Obtained(NamedTuple):
    """files: where to look. fetched: name and url of each download, and its hash, or in what a hub's copy differs."""

    files: Finder
    fetched: list[dict[str, Any]]


def obtain(dataset: DatasetSpec, cache: Path, source: Path | None, *, offline: bool = False) -> Obtained:
    """The folders that hold the released files, archives unpacked.

    source: the user's folder; nothing else is looked at then. Raises DataError with all that was tried.
    """
    raw = cache / "raw" / dataset.kind
    bundles = dataset.bundles()
    if source is not None:
        finder = Finder([source])
        released = {remote.name: remote.checksum for bundle in bundles for remote in bundle}
        known: dict[str, str | None] = {**dict.fromkeys(dataset.wrappers), **released}
        _unpack_known(source, finder, known, raw)
        return Obtained(finder, [])
    if not bundles:
        return Obtained(Finder([]), [])
    offline = offline or os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    tried: list[tuple[str, str]] = []
    for bundle in bundles:
        try:
            return _downloaded(bundle, cache, raw, offline)
        except Unavailable as error:
            tried += error.tried
    hub = dataset.hub()
    if hub is not None:
        folder = raw / "hub"
        try:
            if offline and not folder.exists():
                raise DataError("offline, and not in the cache")
            files = Finder([from_hub(hub, dataset.pair(), folder)])
            if hub.note:
                log.warning("%s: the hub's copy is used: %s", dataset.kind, hub.note)
            note = {"note": hub.note} if hub.note else {}
            return Obtained(files, [{"name": split, "url": url, **note} for split, url in hub.files.items()])
        except DataError as error:
            tried += [(url, str(error)) for url in hub.files.values()]
    raise DataError(advice(dataset, "cannot be had. Tried:", tried, [remote.name for remote in bundles[0]]))


def _downloaded(bundle: list[Remote], cache: Path, raw: Path, offline: bool) -> Obtained:
    fetched: list[Fetched] = [fetch(remote, cache, offline=offline) for remote in bundle]
    finder = Finder([])
    for item in fetched:
        finder.add(unpack(item.path, raw) if is_archive(item.path.name) else item.path.parent)
    records = [{"name": item.path.name, "url": item.url, "sha256": item.sha256} for item in fetched]
    return Obtained(finder, records)


def _unpack_known(folder: Path, finder: Finder, known: Mapping[str, str | None], raw: Path) -> None:
    """Unpack the released archives in a folder, and those inside them. known: their names, and checksums or None."""
    for path in sorted(files_below(folder)):
        if path.name in known and is_archive(path.name):
            checksum = known[path.name]
            if checksum is not None and not matches(path, checksum):
                log.warning("%s is not the released archive; its results cannot be set beside others'", path)
            inside = unpack(path, raw)
            finder.add(inside)
            _unpack_known(inside, finder, {name: known[name] for name in known.keys() - {path.name}}, raw)


def advice(dataset: DatasetSpec, what: str, tried: list[tuple[str, str]], names: list[str]) -> str:
    """The message of a corpus that is not there: what was tried, what is wanted, where to get it, what to run."""
    rows = [f"{dataset.kind}: {what}", *(f"  {url}: {why}" for url, why in tried)]
    rows += ["Wanted:", *(f"  {name}" for name in names)]
    if dataset.by_hand:
        rows.append(f"Get them by hand from {dataset.by_hand}")
    return "\n".join([*rows, "then run:", f"  attnbench prepare {dataset.kind} --from DIR"])


def not_found(dataset: DatasetSpec, files: Finder) -> DataError:
    """The same advice for files that a folder lacks."""
    tried = [(str(folder), "looked here and in every folder below") for folder in files.folders]
    names = [f"{name} (plain, .gz or .xz)" for name in files.missing]
    archives = [[remote.name for remote in bundle if is_archive(remote.name)] for bundle in dataset.bundles()]
    names += ["or the archives " + ", ".join(bundle) for bundle in archives if bundle]
    return DataError(advice(dataset, "files are missing. Looked in:", tried, names))
