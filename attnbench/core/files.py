"""Files that are either whole or absent: atomic writes, JSON lines, safe YAML that remembers its lines."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

import attnbench
from attnbench.core.errors import AttnbenchError, SpecError

YamlPath = tuple[str | int, ...]
_UNSYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}~")
"""Names of what is being written, as `_hidden` makes them: nobody's own files are called so."""
_EARLIER = re.compile(r"\.(.+)\.[a-z0-9_]{8}")
"""As earlier versions made them; some of one's own may be called so, too."""
_OLD = ".replaced"
"""Under this name a folder waits, hidden, for another to take its place."""
_GONE = "gone"
"""Under this one it is removed."""
_DEEPEST = 64
_LONGEST = 1_000_000
"""Characters of a YAML text once every alias is spelt out; the longest of ours has some ten thousand."""


def cache_root() -> Path:
    """`$ATTNBENCH_CACHE`, else `$XDG_CACHE_HOME/attnbench`, else `~/.cache/attnbench`. Raises SpecError where that is
    below the home folder of somebody unknown."""
    own, usual = os.environ.get("ATTNBENCH_CACHE"), Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if not usual.is_absolute():  # which the specification of XDG leaves out: each working directory had its own
        usual = Path("~/.cache")
    named = Path(own) if own else usual / "attnbench"
    try:
        return named.expanduser()
    except RuntimeError:  # as in a container whose user has no entry
        raise SpecError(f"{named}: this home folder is not known; set ATTNBENCH_CACHE to a folder") from None


def packaged_specs() -> Path:
    """The folder of the specs that come with the package."""
    return Path(attnbench.__file__).parent / "specs"


def require_writable(path: Path, option: str, *, folder: bool) -> None:
    """Raise SpecError where a folder (else a file) `path`, which need not be there, cannot be written: said before
    work that would be lost. option: what named the path."""
    there = os.path.exists(path)  # where Path.exists raises, nothing can be written either
    if there and os.path.isdir(path) != folder:
        mend = "this is a file; name a folder, which is made if need be" if folder else "this is a folder; name a file"
        raise SpecError(f"{option} {path}: {mend}")
    broken = next((each for each in [path] * folder + list(path.parents) if _leads_nowhere(each)), None)
    if broken is not None:
        raise SpecError(f"{option} {path}: {broken} is a link to what is not there; mend it, or name another place")
    at, rights = path, os.W_OK
    if not there or os.path.isfile(path):  # it is made, or another takes its place: in its folder
        at = next(each for each in path.resolve().parents if os.path.exists(each))
    if at.is_dir():
        rights |= os.X_OK
    elif at != path:
        raise SpecError(f"{option} {path}: {at} is a file; name another place")
    if not os.access(at, rights):
        raise SpecError(f"{option} {path}: nothing can be written to {at}; name another place")


def _leads_nowhere(path: Path) -> bool:
    return os.path.islink(path) and not os.path.exists(path)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` to `path`: a reader sees the old file or the whole new one, never a part.

    A file that was there keeps its rights; a new one has those that the umask leaves. A link stays one, and a device or
    a pipe is written to, as nothing can take its place.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content  # of names that are not
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            file.write(data)
        return
    path = path.resolve() if path.is_symlink() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    work = _hidden(path)
    handle = os.open(work, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if path.exists() else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            _keep_rights(path, work)  # before there is anything to read
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(work, path)
    except BaseException:
        work.unlink(missing_ok=True)
        raise


@contextmanager
def folder_atomic(path: Path) -> Iterator[Path]:
    """Yield an empty folder that is renamed to `path` when the block ends well, and removed when it does not.

    An existing `path` is replaced by one of its rights; where a kill came just then it is there again after `sweep`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    work = _made(path)
    try:
        _keep_rights(path, work)
        yield work
        for file in work.rglob("*"):
            if not file.is_symlink():
                sync(file)
        sync(work)
        if path.exists():
            aside = _made(path)
            os.replace(path, aside / _OLD)
            try:
                os.replace(work, path)
            except BaseException:
                os.replace(aside / _OLD, path)
                os.rmdir(aside)
                raise
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.replace(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove `path` if it is there. A kill on the way leaves it whole or gone: never a part under its own name."""
    if path.exists():
        aside = _made(path)
        os.replace(path, aside / _GONE)
        shutil.rmtree(aside, ignore_errors=True)


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove what killed writers of `name` (None: of anything) left in `folder`, but for a folder that had not been
    replaced yet. Only for one who knows that nobody is writing it."""
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        written = _written(entry, name)
        if written is not None:
            if entry.is_dir():
                if (entry / _OLD).exists() and not (folder / written).exists():
                    os.replace(entry / _OLD, folder / written)
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


def _written(entry: Path, name: str | None) -> str | None:
    """Under which name that was to be found; None for what nobody was writing, or (if `name` is given) not so."""
    found = _TEMPORARY.fullmatch(entry.name)
    if found is None and (earlier := _EARLIER.fullmatch(entry.name)) and entry.is_dir():
        ours = earlier[1] == name or re.fullmatch(r"step-\d+", earlier[1])  # checkpoints
        found = earlier if ours or any((entry / kept).exists() for kept in (_OLD, _GONE)) else None
    return found[1] if found and name in (None, found[1]) else None


def _hidden(path: Path) -> Path:
    """A name beside `path` that nobody has."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}~")


def _made(path: Path) -> Path:
    work = _hidden(path)
    work.mkdir()
    return work


def _keep_rights(old: Path, new: Path) -> None:
    """Give `new` the rights of what it is to replace, if that is there."""
    with suppress(OSError):  # some disks have no rights to give
        os.chmod(new, stat.S_IMODE(old.stat().st_mode))


def sync(path: Path) -> None:
    """A rename may reach the disk before the content it names: a power cut would leave an empty file.

    What some file systems refuse for a folder is left out.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if not (path.is_dir() and error.errno in _UNSYNCED):
            raise


def write_json(path: Path, value: Any) -> None:
    """As `write_atomic`, indented."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, mend: str) -> dict[str, Any]:
    """The object of a JSON file. Raises AttnbenchError, with what mends it, for a damaged one, OSError for none."""
    with suppress(ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict):
            return found
    raise AttnbenchError(f"{path} is damaged: {mend}")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """A text file, a line each; see write_atomic."""
    write_atomic(path, "".join(f"{line}\n" for line in lines))


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Append one object as one line; see jsonl."""
    with path.open("a", encoding="utf-8") as file:
        file.write(jsonl(record))


def jsonl(record: Mapping[str, Any]) -> str:
    """One object as one line; numbers that JSON does not know become null."""
    known = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
    return json.dumps(known, ensure_ascii=False) + "\n"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every whole line of the file; a last line cut off by a kill is left out.

    Raises AttnbenchError for a line that is no JSON.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                records.append(json.loads(line))
        except ValueError:
            raise AttnbenchError(f"{path}:{number}: damaged, this is no JSON; remove the line") from None
    return records


_Safe: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""By libyaml, where PyYAML comes with it: a tenth of the time, which tables of many cells wait for."""


class _Loader(_Safe):
    """Safe YAML with the numbers and truth values of YAML 1.2: `1e-3` is a float, `no` a string. But `1e3` is 1000."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # PyYAML's own, of a scalar that its tag cannot hold
            raise yaml.constructor.ConstructorError(
                problem=f"'{str(node.value)[:40]}' is no {node.tag.rpartition(':')[2]}", problem_mark=node.start_mark
            ) from None


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in {"tag:yaml.org,2002:bool",
            "tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:timestamp"}]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}  # fmt: skip
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9][0-9_]*$"), "-+0123456789")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    "-+.0123456789",
)


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)).replace("_", ""))  # PyYAML reads 010 as octal


def _real(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    """`1e5` is a whole number, as who writes `max_steps: 1e5` means; fields of floats take it too."""
    whole = re.fullmatch(r"([-+]?[0-9_]+)[eE]\+?([0-9]|1[0-5])", str(loader.construct_scalar(node)))
    return int(whole[1].replace("_", "")) * 10 ** int(whole[2]) if whole else loader.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:float", _real)


def _length(node: yaml.Node | None, known: dict[int, int]) -> int:
    """About as many characters as the node has with its aliases spelt out; each node is looked at once."""
    if node is None:
        return 0
    if id(node) not in known:
        known[id(node)] = 0  # met again inside itself: told by _lines
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        else:
            parts = node.value if isinstance(node, yaml.SequenceNode) else []
        own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        known[id(node)] = 1 + own + sum(_length(part, known) for part in parts)
    return known[id(node)]


_PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null")}


def _lines(
    loader: _Loader, node: yaml.Node | None, path: YamlPath, into: dict[YamlPath, int], name: str, both: bool = True
) -> None:
    """both: enter what lies under a number, a truth value or null below its text as well, as a path may hold either."""
    if node is None:
        return
    into.setdefault(path, node.start_mark.line + 1)
    if len(path) > _DEEPEST:  # an anchor inside its own node never ends
        raise SpecError(f"{name}:{node.start_mark.line + 1}: nested more than {_DEEPEST} deep; is `&` inside its `*`?")
    if isinstance(node, yaml.MappingNode):
        seen: set[Any] = set()
        for key, value in node.value:
            where = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode):
                held = loader.construct_object(key) if key.tag in _PLAIN else key.value
                if seen & {key.value, held}:  # 2 and 02 are one, and so are 2 and "2" wherever labels are meant
                    raise SpecError(f"{name}:{where}: the key '{key.value}' stands twice; remove one of them")
                seen |= {key.value, held}
                ways = [held, key.value] if held != key.value and both else [held]
                for each in ways:
                    into[(*path, each)] = where
                    _lines(loader, value, (*path, each), into, name, both and len(ways) == 1)  # or it doubles each time
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            into[(*path, index)] = value.start_mark.line + 1
            _lines(loader, value, (*path, index), into, name, both)


def parse_yaml(text: str, name: str = "<text>") -> tuple[Any, dict[YamlPath, int]]:
    """The value of a YAML text, and the line (1-based) on which each path of it begins.

    Raises SpecError for what is not YAML, for a key that stands twice, and for aliases that make a small text huge.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if _length(node, {}) > _LONGEST:  # before anything walks it: nine aliases of nine aliases and so on never end
            raise SpecError(f"{name}: with every `*` spelt out this has more than {_LONGEST:,} characters; shorten it")
        lines: dict[YamlPath, int] = {}
        _lines(loader, node, (), lines, name)
        return None if node is None else loader.construct_document(node), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        last = text.rstrip("\n").count("\n")  # libyaml names the line behind it
        place = f"{name}:{min(mark.line, last) + 1}" if mark else name
        problem = getattr(error, "problem", None) or str(error)
        raise SpecError(f"{place}: this is not valid YAML: {problem}") from None
    except RecursionError:
        raise SpecError(f"{name}: this is nested too deeply to be read") from None


def dump_yaml(value: Any) -> str:
    """YAML text in the order given, which parse_yaml reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that our loader would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    breaks = any(mark in text for mark in "\x85\u2028\u2029")  # PyYAML escapes them in double quotes only
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if breaks else None)


_Dumper.add_representer(str, _text)
_Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *_Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}
