from __future__ import annotations

import errno
import json
import math
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.core import files
from attnbench.core.errors import AttnbenchError, SpecError
from attnbench.core.files import (
    append_jsonl,
    cache_root,
    dump_yaml,
    folder_atomic,
    packaged_specs,
    parse_yaml,
    read_json,
    read_jsonl,
    remove_folder,
    require_writable,
    sweep,
    write_atomic,
    write_json,
)


def value_of(text: str):
    return parse_yaml(f"key: {text}")[0]["key"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("2E5", 200_000),
        ("1e3", 1000),
        ("1_0e+2", 1000),
        ("1e99", 1e99),
        ("1.0e3", 1000.0),
        ("+.5", 0.5),
        ("5.", 5.0),
        ("-1.25e+2", -125.0),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("inf", "inf"),
        ("010", 10),
        ("1_000", 1000),
        ("-7", -7),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("null", None),
    ],
)
def test_numbers_and_truth_values_are_those_of_yaml_1_2_and_whole_ones_are_whole(text: str, value: object):
    found = value_of(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["no", "yes", "on", "off", "y", "2024-01-02", "1:30", "1e", "e5", ".", "1.2.3", "-"])
def test_words_that_yaml_1_1_would_turn_into_something_else_stay_words(text: str):
    if text == "-":
        assert parse_yaml("key: '-'")[0]["key"] == "-"
    else:
        assert value_of(text) == text


def test_nan_is_a_float():
    assert math.isnan(value_of(".nan"))


YAML = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)
    | st.sampled_from(
        ["no", "1e3", "010", "0x1F", "0o7", "true", "~", "null", ".inf", "<<", "=", "2024-01-02", "1:30"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc~.1e", max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(YAML)
def test_what_is_dumped_is_read_back_equal(value: object):
    text = dump_yaml({"value": value})
    found = parse_yaml(text)[0]["value"]
    assert found == value
    assert repr(found) == repr(value)  # 1, 1.0 and True are equal, and not the same


def test_the_order_of_keys_is_kept():
    assert list(parse_yaml(dump_yaml({"b": 1, "a": 2}))[0]) == ["b", "a"]


def test_lines_of_every_path():
    _, lines = parse_yaml("a: 1\nb:\n  c: [x,\n      y]\n  d.e:\n    - f: 2\n")
    assert lines == {
        (): 1, ("a",): 1, ("b",): 2, ("b", "c"): 3, ("b", "c", 0): 3, ("b", "c", 1): 4, ("b", "d.e"): 5,
        ("b", "d.e", 0): 6, ("b", "d.e", 0, "f"): 6,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "'a' stands twice"),
        ("a:\n  b: 1\n  b: 1\n", 3, "'b' stands twice"),
        ("a: [{b: 1, b: 2}]\n", 1, "'b' stands twice"),
        ("1: a\n01: b\n", 2, "'01' stands twice"),
        ("1.0: a\n1: b\n", 2, "'1' stands twice"),
        ("true: a\nTrue: b\n", 2, "'True' stands twice"),
        ('8: a\n"8": b\n', 2, "'8' stands twice"),  # a label either way
        ("a: 1\nb: !!bool maybe\n", 2, "'maybe' is no bool"),
        ('a: !!float ""\n', 1, "'' is no float"),
        ("a: !!int x\n", 1, "'x' is no int"),
        ("a: !!timestamp x\n", 1, "'x' is no timestamp"),
        ("a: 1\n b: 2\n", 2, "not valid YAML"),
        ("a: [1, 2\n", 1, "not valid YAML"),  # not the line behind its end
        ("a: !!python/object:os.system x\n", 1, "not valid YAML"),
        ("a: 1\nb: *nothing\n", 2, "not valid YAML"),
        ("b: 1\na: &x\n  - *x\n", 2, "deep"),
    ],
)
def test_a_fault_names_its_line(text: str, line: int, word: str):
    with pytest.raises(SpecError, match=word) as caught:
        parse_yaml(text, "spec.yaml")
    assert str(caught.value).startswith(f"spec.yaml:{line}: ")


@pytest.mark.parametrize("text", ["a: !!int x", "[" * 400 + "]" * 400, "a: !!float x"])
def test_what_cannot_be_read_is_a_spec_error(text: str):
    with pytest.raises(SpecError, match=r"spec\.yaml"):
        parse_yaml(text, "spec.yaml")


def test_without_libyaml_the_same_is_read(monkeypatch: pytest.MonkeyPatch):
    texts = ["a: 1e-3\nb: [no, 010, 1_000, .inf]\n? - c\n: &x {d: *y}\n", "a: &x {b: 1}\nc: [*x, {<<: *x, d: 2}]\n",
             "a: [1\n", "- 'it''s'\n- \"\\u00e9\\n\"\n- |\n  two\n  lines\n- 2020-01-01\n"]  # fmt: skip

    def read() -> list[Any]:
        found: list[Any] = []
        for text in texts:
            try:
                found.append(parse_yaml(text, "spec.yaml"))
            except SpecError as error:
                found.append(str(error).split(": ")[0])
        return found

    fast = read()
    plain = type("Plain", (yaml.SafeLoader,), {
        "yaml_implicit_resolvers": files._Loader.yaml_implicit_resolvers,
        "yaml_constructors": files._Loader.yaml_constructors,
    })  # fmt: skip
    monkeypatch.setattr(files, "_Loader", plain)
    assert read() == fast


def test_an_empty_text_is_nothing():
    assert parse_yaml("# only a remark\n") == (None, {})


def test_write_atomic_replaces_whole_and_leaves_nothing_beside(tmp_path: Path):
    path = tmp_path / "sub" / "file"
    write_atomic(path, "old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["file"]


@pytest.fixture
def private() -> Iterator[None]:
    """A umask by which nothing is for others."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_has_the_rights_that_the_umask_leaves(tmp_path: Path, private: None):
    write_atomic(tmp_path / "file", "x")
    with folder_atomic(tmp_path / "folder") as work:
        assert rights(work) == 0o700
    assert (rights(tmp_path / "file"), rights(tmp_path / "folder")) == (0o600, 0o700)
    os.umask(0o002)  # of people who work in a group
    write_atomic(tmp_path / "shared", "x")
    with folder_atomic(tmp_path / "ours"):
        pass
    assert (rights(tmp_path / "shared"), rights(tmp_path / "ours")) == (0o664, 0o775)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770])
def test_what_is_replaced_keeps_its_rights(tmp_path: Path, mode: int):
    (tmp_path / "folder").mkdir()
    write_atomic(tmp_path / "file", "old")
    for name in ("file", "folder"):
        (tmp_path / name).chmod(mode)
    write_atomic(tmp_path / "file", "new")
    with folder_atomic(tmp_path / "folder") as work:
        assert rights(work) == mode  # while it is made, too
    assert [rights(tmp_path / name) for name in ("file", "folder")] == [mode, mode]
    assert (tmp_path / "file").read_text() == "new"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "file"
    write_atomic(path, "old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_folder_atomic_appears_whole_and_replaces(tmp_path: Path):
    path = tmp_path / "sub" / "folder"
    for content in ("one", "two"):
        with folder_atomic(path) as work:
            (work / "deep").mkdir()
            (work / "deep" / content).write_text(content)
            assert not (path / "deep" / content).exists()
        assert [entry.name for entry in (path / "deep").iterdir()] == [content]
        assert os.listdir(path.parent) == ["folder"]


def test_folder_atomic_leaves_nothing_when_the_block_fails(tmp_path: Path):
    (tmp_path / "kept").mkdir()
    for name in ("new", "kept"):
        with pytest.raises(FileNotFoundError), folder_atomic(tmp_path / name) as work:
            (work / "part").write_text((work / "absent").read_text())
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(tmp_path / "kept") == []


def make_and_remove(path: Path, rename: int) -> None:
    """Make a folder and remove it again in another process, which is killed before its rename number `rename`."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        return
    try:
        real, left = os.replace, rename

        def replace(*arguments: Any) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*arguments)

        os.replace = replace
        with folder_atomic(path) as work:
            (work / "part").write_text("new")
            if rename == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        remove_folder(path)
    finally:
        os._exit(1)


@pytest.mark.parametrize("rename", [0, 1, 2])
def test_a_kill_leaves_a_folder_whole_or_absent_and_sweep_clears_the_rest(tmp_path: Path, rename: int):
    make_and_remove(tmp_path / "folder", rename)
    shown = [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith(".")]
    if rename == 2:  # made, and killed before its removal
        assert shown == ["folder"]
        assert (tmp_path / "folder" / "part").read_text() == "new"
    else:
        assert shown == []
    sweep(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == shown


def test_sweep_of_one_name_leaves_what_is_written_beside_it(tmp_path: Path):
    for name in ("a", "a.b"):
        (tmp_path / f".{name}.01234567~").mkdir()
    sweep(tmp_path, "a")
    assert os.listdir(tmp_path) == [".a.b.01234567~"]


def test_sweep_clears_what_earlier_versions_left_where_it_is_theirs(tmp_path: Path):
    for name in (".step-20.q1w2e3r_", ".data.q1w2e3r_/.replaced/part", ".old.abcdefgh/gone", ".named.abcdefgh"):
        (tmp_path / name).mkdir(parents=True)
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".named.abcdefgh", "data"]  # which was moved aside
    assert os.listdir(tmp_path / "data") == ["part"]
    sweep(tmp_path, "other")
    sweep(tmp_path, "named")
    assert os.listdir(tmp_path) == ["data"]


def test_sweep_leaves_what_is_hidden_and_someones_own(tmp_path: Path):
    own = [".hidden", ".notes.markdown", ".data.parquet_", ".x.01234567"]
    for name in own:
        (tmp_path / name).write_text("someone's own")
    (tmp_path / ".cache.packages").mkdir()
    sweep(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([*own, ".cache.packages"])


@pytest.mark.parametrize(("rename", "content"), [(0, "old"), (1, "old"), (2, "old"), (3, "new")])
def test_a_kill_leaves_the_folder_that_was_or_the_new_one(tmp_path: Path, rename: int, content: str):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "part").write_text("old")
    make_and_remove(folder, rename)
    sweep(tmp_path)
    assert os.listdir(tmp_path) == ["folder"]
    assert (folder / "part").read_text() == content


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, real = tmp_path / "folder", os.replace
    folder.mkdir()
    (folder / "part").write_text("old")

    def refuse(source: Path, target: Path) -> None:
        if target == folder and source.name != ".replaced":
            raise PermissionError(errno.EACCES, "no")
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError), folder_atomic(folder) as work:
        (work / "part").write_text("new")
    assert os.listdir(tmp_path) == ["folder"]
    assert (folder / "part").read_text() == "old"


def test_remove_folder(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("x")
    remove_folder(tmp_path / "folder")
    remove_folder(tmp_path / "folder")
    assert os.listdir(tmp_path) == []
    sweep(tmp_path / "absent")


def test_a_link_stays_one_and_what_is_no_file_is_written_to(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "there")
    for content in ("one", "two"):
        write_atomic(tmp_path / "link", content)
        assert (tmp_path / "folder" / "there").read_text() == content
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(tmp_path / "pipe", "through")
    assert os.read(reader, 99) == b"through"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    reader, writer = os.pipe()
    write_atomic(Path(f"/dev/fd/{writer}"), "through")  # as /dev/stdout is, before a pipe
    assert os.read(reader, 99) == b"through"
    os.close(reader)
    os.close(writer)


def test_a_place_is_tried_before_anything_is_written_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "made" / "there")
    reader, writer = os.pipe()
    for folder, name in [
        (True, "."), (True, "not/yet"), (False, "file"), (False, "not/yet"), (False, "link"),
        (False, f"/dev/fd/{writer}"), (False, "/dev/null"),
    ]:  # fmt: skip
        require_writable(tmp_path / name, "--out", folder=folder)
    os.close(reader)
    os.close(writer)
    assert sorted(os.listdir(tmp_path)) == ["file", "link"]
    for folder, name, said in [
        (True, "file", "file: this is a file; name a folder, which is made if need be"),
        (True, "file/below", "file is a file; name another place"),
        (False, "file/below/it", "file is a file; name another place"),
        (True, "link", "link is a link to what is not there; mend it, or name another place"),
        (False, "link/below", "link is a link to what is not there; mend it, or name another place"),
        (False, ".", ": this is a folder; name a file"),
    ]:
        with pytest.raises(SpecError, match=f"--out .*{said}$"):
            require_writable(tmp_path / name, "--out", folder=folder)
    tried: list[tuple[Path, int]] = []
    monkeypatch.setattr("os.access", lambda at, rights: tried.append((at, rights)))
    for folder, name in ((True, "not/yet"), (False, "file"), (False, "/dev/null")):
        with pytest.raises(SpecError, match=r"nothing can be written to /.*; name another place$"):
            require_writable(tmp_path / name, "--out", folder=folder)
    rights = os.W_OK | os.X_OK
    assert tried == [(tmp_path, rights), (tmp_path, rights), (Path("/dev/null"), os.W_OK)]


def test_damaged_json_is_named_with_its_mend(tmp_path: Path):
    for content in (b"\xff{", b"", b"[]"):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(AttnbenchError, match=r"a\.json is damaged: bury it"):
            read_json(tmp_path / "a.json", "bury it")
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "b.json", "")


def test_json_is_written_for_people(tmp_path: Path):
    write_json(tmp_path / "a.json", {"b": [1, "ü"]})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"b": [1, "ü"]}
    assert "ü" in text
    assert text.endswith("}\n")


def test_jsonl_drops_a_line_cut_off_by_a_kill(tmp_path: Path):
    path = tmp_path / "log.jsonl"
    assert read_jsonl(path) == []
    records = [{"step": 1, "text": "a\u2028b\x85c\r"}, {"step": 2, "loss": None}]
    append_jsonl(path, records[0])
    append_jsonl(path, {"step": 2, "loss": math.nan})
    with path.open("a") as file:
        file.write('{"step": 3, "te')
    assert read_jsonl(path) == records


def test_a_damaged_line_is_named(tmp_path: Path):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n\x00\x00\n{"step": 2}\n')
    with pytest.raises(AttnbenchError, match=r"log\.jsonl:2: damaged"):
        read_jsonl(tmp_path / "log.jsonl")


BOMBS = {
    "lists": "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]\n" for n in range(1, 12)),
    "mappings": "".join(f"x{n}: &x{n} {{{', '.join(f'k{i}: *x{n - 1}' for i in range(9))}}}\n" for n in range(1, 12)),
    "merges": "".join(f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * 9)}]}}\n" for n in range(1, 12)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_aliases_that_explode_are_refused_at_once(kind: str):
    with pytest.raises(SpecError, match=r"bomb\.yaml: with every `\*` spelt out this has more than 1,000,000"):
        parse_yaml("x0: &x0 {a: b}\n" + BOMBS[kind], "bomb.yaml")


def test_a_key_is_found_by_its_text_and_by_what_it_is():
    """A path of pydantic's holds the text; one of ours what a mapping holds."""
    _, lines = parse_yaml("a:\n  0.5: [x]\n  true: 1\n  ~: 2\n  8: 3\n")
    for key, line in (("0.5", 2), (0.5, 2), ("true", 3), (True, 3), ("~", 4), (None, 4), ("8", 5), (8, 5)):
        assert lines["a", key] == line
    assert lines["a", "0.5", 0] == 2


def test_whole_numbers_in_whole_numbers_are_read_in_no_time():
    _, lines = parse_yaml("a: " + "{1: " * 60 + "x" + "}" * 60)
    assert len(lines) == 122  # twice as many as keys, and not twice for each


def test_aliases_in_measure_are_read():
    value, _ = parse_yaml("a: &a {b: [1, 2]}\nc: [*a, *a]\nd: {<<: *a, e: 3}\n")
    assert value == {"a": {"b": [1, 2]}, "c": [{"b": [1, 2]}] * 2, "d": {"b": [1, 2], "e": 3}}


def test_disks_without_rights_or_folders_that_cannot_be_synced_are_written_to(tmp_path: Path, monkeypatch):
    whole = os.fsync

    def refused(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        whole(handle)

    def forbidden(*given: object, **named: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fsync", refused)
    monkeypatch.setattr(os, "chmod", forbidden)
    write_atomic(tmp_path / "file", "text")
    with folder_atomic(tmp_path / "folder") as work:
        (work / "a").write_text("a")
    assert (tmp_path / "file").read_text() == "text"
    assert (tmp_path / "folder" / "a").read_text() == "a"


def test_a_file_that_cannot_be_synced_is_a_fault(tmp_path: Path, monkeypatch):
    def refused(handle: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(OSError, match="Invalid argument"), folder_atomic(tmp_path / "folder") as work:
        (work / "a").write_text("a")
    assert not (tmp_path / "folder").exists()


def test_a_name_that_is_no_text_can_be_noted(tmp_path: Path):
    write_json(tmp_path / "a.json", {"command": "runs\udce4"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"command": "runs\udce4"}


def test_a_cache_that_is_named_from_here_is_not_the_systems(monkeypatch):
    monkeypatch.delenv("ATTNBENCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "here/cache")
    assert cache_root() == Path("~/.cache/attnbench").expanduser()
    monkeypatch.setenv("ATTNBENCH_CACHE", "here/cache")  # one that is asked for by name
    assert cache_root() == Path("here/cache")


def test_the_specs_of_the_package_are_found_from_anywhere(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert {"demo.yaml", "copy.yaml"} <= {path.name for path in packaged_specs().iterdir()}


def test_a_home_that_nobody_knows_is_told(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("ATTNBENCH_CACHE", "~nobody-of-that-name/cache")
    with pytest.raises(SpecError, match="home folder is not known; set ATTNBENCH_CACHE"):
        cache_root()
