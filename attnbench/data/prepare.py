"""`prepare`: a recipe becomes a folder in the cache, whole or not at all. Needs no torch."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from pathlib import Path
from typing import Any

import attnbench
from attnbench.core.errors import DataError
from attnbench.core.files import folder_atomic, sweep, write_json
from attnbench.core.lock import NO_LOCKS, making
from attnbench.core.provenance import changed_members, member_files
from attnbench.data.build import build
from attnbench.data.datasets.base import SPLITS, DatasetSpec, datasets
from attnbench.data.download import matches
from attnbench.data.finder import bare
from attnbench.data.obtain import not_found, obtain
from attnbench.data.parts import Part
from attnbench.data.recipe import Recipe

log = logging.getLogger("attnbench")
_UNREAD = "%s is generated: no file of %s was read"

MANIFEST = "manifest.json"
CODE = "code"
"""Of the manifest: the files of the corpus and of the tokenizer that it was made with."""
SCHEMA_VERSION = 1
_TOLERANCE = 0.002
"""sacremoses is close to tokenizer.perl, not equal: published counts are met within 0.2%."""


def prepared_path(recipe: Recipe, cache: Path) -> Path:
    """The folder of a prepared recipe, whether it is there or not."""
    recipe = recipe.plain()
    return cache / "prepared" / recipe.dataset.kind / recipe.digest()


def prepare(recipe: Recipe, *, cache: Path, source: Path | None = None, offline: bool = False) -> Path:
    """The folder of prepared data, made now unless it is there. Equal files and recipe give equal bytes.

    source: a folder with the released files; None: they are downloaded (or taken from the cache).
    offline: make no request.
    Raises DataError: files absent or broken, checksum wrong, disk full, or prepared already from other files than
    those of `source`. Nothing half-prepared is left behind.
    """
    recipe = recipe.plain()
    path = prepared_path(recipe, cache)
    if source is not None and not source.is_dir():
        raise DataError(f"{source}: no such folder, or a file; name a folder with the files of {recipe.dataset.kind}")
    try:
        ready = _ready(path, recipe, source)
        if not ready:
            with making(path):
                ready = _ready(path, recipe, source, tell=False)  # another process may have made it meanwhile
                if not ready:
                    _make(recipe, path, cache, source, offline)
        if ready and source is not None:
            _require_made_from(path, recipe, cache, source)
    except DataError as error:
        file = Path(str(error).partition(":")[0])  # what is said of a file begins with its place
        if not (file.is_relative_to(cache / "downloads") and file.is_file()):
            raise
        raise DataError(f"{error}: delete {file.parent} and run again") from None
    except OSError as error:
        raise _explain(error, cache) from error
    return path


def _make(recipe: Recipe, path: Path, cache: Path, source: Path | None, offline: bool) -> None:
    dataset = recipe.dataset
    sweep(path.parent, path.name)
    if dataset.licence:
        log.info("%s: licence %s", dataset.kind, dataset.licence)
    files, fetched = obtain(dataset, cache, source, offline=offline)
    # what changes while it is read must not pass for what was read: files are hashed before, and their sizes and dates
    # tell afterwards, as a second hash would cost seconds a gigabyte and a writer sets the date
    own = dataset.local_files(source)
    states = _states(own)
    digests = [_digest_of(file) for file in own]
    with folder_atomic(path) as work:
        temporary = work / "work"
        temporary.mkdir()
        found = dataset.sources(files, temporary)
        if files.missing:
            raise not_found(dataset, files)
        _require_splits(dataset, found)
        read = _released(found, temporary)
        states = {**_states(read), **states}
        sources = _sources(read)
        built = build(recipe, found, work)
        for file, state in _states(states).items():
            if state != states[file]:
                raise DataError(f"{file}: changed while it was read; run again")
        _compare_checksums(dataset, read)
        if source is not None and not read:
            log.info(_UNREAD, dataset.kind, source)
        shutil.rmtree(temporary)
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "dataset": dataset.kind,
            "languages": list(dataset.pair()),
            "digest": recipe.digest(),
            "recipe": recipe.dump(),
            "licence": dataset.licence,
            "downloads": fetched,
            "sources": sources,
            "local_files": digests,
            **built,
            "expected": dict(dataset.expected),
            "files": {file.name: file_facts(file) for file in sorted(work.iterdir())},
            "tools": _tools(),
            CODE: member_files(recipe),
        }
        _compare(manifest)
        write_json(work / MANIFEST, manifest)


def _require_splits(dataset: DatasetSpec, found: Mapping[str, list[Part]]) -> None:
    if "train" not in found or not set(found) <= set(SPLITS):
        raise DataError(
            f"the corpus '{dataset.kind}' has the splits {', '.join(found) or '(none)'}: "
            f"`{type(dataset).__name__}.sources` has to give train, and may give {' and '.join(SPLITS[1:])}"
        )


def _ready(path: Path, recipe: Recipe, source: Path | None, *, tell: bool = True) -> bool:
    if not (path / MANIFEST).exists():
        return False
    gone = [file for file in recipe.dataset.local_files(source) if not file.exists()]
    manifest, fault = _manifest(path)
    changed = [] if fault is not None else _changed(manifest, recipe, source)
    fault = fault or files_fault(path, manifest["files"])
    if tell:
        if fault is not None:
            log.warning("%s; preparing again", fault)
        for file in gone:
            log.warning("%s is not here; what was prepared from files of these names before serves: %s", file, path)
        for file in changed:
            log.warning("%s is not what it was when it was prepared; preparing again", file)
        serves = not changed and fault is None
        for name in changed_members(member_files(recipe), manifest.get(CODE)) if serves else ():
            log.warning("%s: prepared before %s changed, and used as it is; delete that folder to prepare it anew",
                        path, name)  # fmt: skip
    return not changed and fault is None


def changed_files(recipe: Recipe, cache: Path, source: Path | None) -> list[Path]:
    """The user's own files that are not what they were when the recipe was prepared; none where it was not.

    A file that is gone has not changed: once it is prepared it is not needed.
    """
    recipe = recipe.plain()
    path = prepared_path(recipe, cache)
    return _changed(read_manifest(path), recipe, source) if (path / MANIFEST).exists() else []


def _changed(manifest: Mapping[str, Any], recipe: Recipe, source: Path | None) -> list[Path]:
    files = recipe.dataset.local_files(source)
    noted = manifest.get("local_files") or [None] * len(files)  # older ones do not say which file was which
    return [file for file, digest in zip(files, noted, strict=True) if file.exists() and _digest_of(file) != digest]


def _require_made_from(path: Path, recipe: Recipe, cache: Path, source: Path) -> None:
    """Raise DataError where `source` holds other files than those that `path` was prepared from."""
    dataset = recipe.dataset
    if named := dataset.local_files(source):  # they are prepared again when they have changed
        for file in named:
            if not file.exists():
                raise DataError(f"{file}: is not there; leave --from out to use what was prepared of it before")
        return
    mend = f"leave --from out to use it as it is, or delete it, or set ATTNBENCH_CACHE to another folder ({path})"
    files, _ = obtain(dataset, cache, source)
    with tempfile.TemporaryDirectory() as temporary:
        found = dataset.sources(files, Path(temporary))
        if files.missing:
            raise DataError(f"{dataset.kind} is prepared already, and {source} lacks {files.missing[0]}; {mend}")
        here = {(item["name"], item["sha256"]) for item in _sources(_released(found, Path(temporary)))}
    other = here ^ {(item["name"], item["sha256"]) for item in read_manifest(path)["sources"]}
    if other:
        names = ", ".join(sorted({name for name, _ in other}))
        raise DataError(
            f"{dataset.kind} is prepared already, from other files than {source} holds ({names} differ); {mend}"
        )
    log.info("%s: prepared already, from the same files as in %s" if here else _UNREAD, dataset.kind, source)


def is_prepared(recipe: Recipe, cache: Path) -> bool:
    """Whether the prepared folder is there."""
    return (prepared_path(recipe, cache) / MANIFEST).exists()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a prepared folder. Raises DataError if there is none, it is damaged, or of another version."""
    try:
        manifest, fault = _manifest(path)
    except FileNotFoundError:
        raise DataError(f"{path}: not prepared data (no {MANIFEST}); run attnbench prepare") from None
    if fault is not None:
        raise DataError(f"{fault}; delete {path} and run attnbench prepare again")
    return manifest


def _manifest(path: Path) -> tuple[dict[str, Any], str | None]:
    """The manifest of a prepared folder, and what is wrong with it."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["schema_version"] != SCHEMA_VERSION:
            return {}, f"{path}: prepared by another version of attnbench"
        Recipe.model_validate(manifest["recipe"])
        for part, entries, read in (
            ("files", manifest["files"], itemgetter("bytes", "sha256")),
            ("splits", SPLITS, itemgetter("pairs", "wide_tokens", "widest")),
            ("vocabulary", ("source", "target"), itemgetter("file", "rows")),
        ):
            for entry in entries:
                read(manifest[part][entry])
    except (ValueError, KeyError, AttributeError, TypeError):
        return {}, f"{path / MANIFEST}: of another version of attnbench, or damaged"
    return manifest, None


def require_same(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise DataError where `path` has been prepared anew since this manifest of it was read."""
    if read_manifest(path) != manifest:
        raise prepared_anew(path)


def prepared_anew(path: Path) -> DataError:
    """What to raise where the data in `path` went while they were in use."""
    return DataError(f"{path}: the data were prepared anew while they were in use; run again")


def files_fault(folder: Path, files: Mapping[str, Any]) -> str | None:
    """What is wrong with the files in `folder`, of which `file_facts` said this when they were written."""
    for name, facts in files.items():
        file = folder / name
        if not file.exists():
            return f"{file}: is gone"
        if file.stat().st_size != facts.get("bytes"):
            return f"{file}: has another size"
        # a spoilt id trains another model, or is none of the vocabulary
        if file_facts(file)["sha256"] != facts.get("sha256"):
            return f"{file}: holds other bytes than were prepared"
    return None


def _sources(read: Iterable[Path]) -> list[dict[str, Any]]:
    """Name, size and hash of each released file that was read."""
    return [{"name": path.name, **file_facts(path)} for path in read]


def _states(files: Iterable[Path]) -> dict[Path, tuple[int, int] | None]:
    """Size and date of each file; None where there is none."""
    found = {file: file.stat() if file.exists() else None for file in files}
    return {file: None if stat is None else (stat.st_size, stat.st_mtime_ns) for file, stat in found.items()}


def _released(found: Mapping[str, list[Part]], temporary: Path) -> list[Path]:
    """The files that were read, but for those written on the way."""
    parts = [part for split in found.values() for part in split]
    named = ((part.source, part.target, part.alignment, part.documents, *part.made_from) for part in parts)
    paths = {path for group in named for path in group if path is not None}
    given = [path for path in paths if not path.is_relative_to(temporary)]
    return sorted(given, key=lambda path: (path.name, str(path)))


def file_facts(path: Path) -> dict[str, Any]:
    """Size and hash of a file; plain data."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _digest_of(path: Path) -> str | None:
    return file_facts(path)["sha256"] if path.exists() else None


def _tools() -> dict[str, str]:
    tools = {"attnbench": attnbench.__version__}
    for name in ("sacremoses", "tokenizers"):
        try:
            tools[name] = version(name)
        except PackageNotFoundError:
            tools[name] = "unknown"
    return tools


def _compare(manifest: dict[str, Any]) -> None:
    """Tell how the counts lie to the published ones."""
    for split, expected in manifest["expected"].items():
        pairs = manifest["splits"][split]["pairs"]
        level = logging.WARNING if abs(pairs - expected) > _TOLERANCE * expected else logging.INFO
        log.log(level, "%s: %s has %s pairs, published: %s", manifest["dataset"], split, f"{pairs:,}", f"{expected:,}")


def _compare_checksums(dataset: DatasetSpec, read: list[Path]) -> None:
    """Warn of files that carry a released name and are not the released ones: downloads were checked, others not.

    One that is packed otherwise than the released file has no checksum to be held against.
    """
    known = {remote.name: remote.checksum for bundle in dataset.bundles() for remote in bundle if remote.checksum}
    packed = {bare(name): name for name in known}
    for path in read:
        checksum = known.get(path.name)
        if checksum is not None and not matches(path, checksum):
            log.warning(
                "%s: %s is not the released file (%s); its results cannot be set beside others'",
                dataset.kind, path, checksum,
            )  # fmt: skip
        elif checksum is None and bare(path.name) in packed:
            log.info(
                "%s: %s could not be compared with the released %s, which is packed otherwise",
                dataset.kind, path, packed[bare(path.name)],
            )  # fmt: skip


def _explain(error: OSError, cache: Path) -> DataError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DataError(
            f"{cache}: no space left while writing ({error.strerror}); free some, or set ATTNBENCH_CACHE to a folder "
            "on a larger disk. Nothing half-prepared was left behind"
        )
    place = f"{error.filename or cache}: {error.strerror or error}"
    if error.errno in NO_LOCKS:
        return DataError(place)
    if error.errno == errno.EEXIST and os.path.islink(error.filename or ""):  # no folder can be made where it stands
        return DataError(
            f"{error.filename}: is a link to what is not there; mend it, or set ATTNBENCH_CACHE to another folder"
        )
    refused = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    within = Path(error.filename or cache).is_relative_to(cache)
    other = ", or set ATTNBENCH_CACHE to a folder of your own" if refused and within else ""
    return DataError(f"{place}; check the path and its permissions{other}")


def describe_datasets() -> list[dict[str, Any]]:
    """What `prepare --list` and `list datasets` show: name, title, size, licence, languages, sources; plain data."""
    return [datasets.get(kind).describe() for kind in datasets.kinds()]
