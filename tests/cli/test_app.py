"""The command itself: help at once, one way out for errors, exit codes, results and progress kept apart."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import attnbench
from attnbench.cli import app as module
from attnbench.core.errors import AttnbenchError, DataError, MissingExtraError, SpecError
from attnbench.core.lock import is_locked
from attnbench.models.base import models

ROOT = Path(attnbench.__file__).parents[1]
HEAVY = ("torch", "datasets", "numpy", "tokenizers", "sacrebleu", "sacremoses", "yaml")


def start(*arguments: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "attnbench", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,
    )  # fmt: skip


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["sweep-k", "--help"], ["prepare", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    program = (
        f"import sys; sys.argv = ['attnbench', *{arguments}]\n"
        "from attnbench.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        f"sys.stderr.write(' '.join(name for name in {HEAVY} if name in sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith(("Usage: attnbench", f"attnbench {attnbench.__version__}"))
    assert done.stderr == ""


def test_the_module_is_the_command(tmp_path, monkeypatch):
    """Reading what specs are made of brings no compiler of torch's: it takes two seconds."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    process = start("list", "models", "--json", cwd=tmp_path)
    out, err = process.communicate()
    assert process.returncode == 0
    assert [entry["name"] for entry in json.loads(out)] == models.kinds()
    told = err.splitlines()
    assert all(line.startswith("import time:") for line in told)
    imported = {line.rpartition("|")[2].strip() for line in told}
    assert "torch" in imported
    assert not imported & {"torch._dynamo", "torch._inductor"}


def test_no_command_shows_help(invoke):
    assert "Commands:" in invoke(code=2).output


@pytest.mark.parametrize(("arguments", "words"), [
    (["swep-k"], "Did you mean 'sweep-k'"),
    (["train", "--sed", "1"], "--seed"),
    (["train", "--seed", "x"], "--seed"),
    (["train", "a.yaml", "b.yaml"], "b.yaml"),
    (["list", "mechanism"], "mechanisms"),
    (["list", "mechanisms", "topkk"], "did you mean 'topk'"),
    (["eval"], "CELL"),
])  # fmt: skip
def test_bad_usage_is_told_with_the_nearest_name(invoke, arguments, words):
    result = invoke(*arguments, code=2)
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(("text", "place", "words"), [
    ("name: x\ntsk: {}\n", "spec.yaml:2: tsk", "did you mean 'task'"),
    ("name: x\n", "spec.yaml:1: task", "required"),
    ("name: x\ntask:\n  kind: translation\n  dataset: demmo\n", "spec.yaml:4: task.dataset", "did you mean 'demo'"),
    ("name: x\ntask: {kind: translation, dataset: demo}\ntrain:\n  max_steps: many\n", "spec.yaml:4: train.max_steps",
     "integer (given: 'many')"),
    ("name: x\ntask: {kind: translation, dataset: demo}\ntrain:\n  precision: fp61\n", "spec.yaml:4: train.precision",
     "known: fp32, bf16"),
    ("name: x\nname: y\n", "spec.yaml:2", "stands twice"),
    ("name: [\n", "spec.yaml:1", "not valid YAML"),
    ("- 1\n", "spec.yaml", "a spec is a mapping"),
    ("name: a/cells\ntask: {kind: translation, dataset: demo}\n", "spec.yaml:1: name", "keeps its own cells"),
    ("name: x\n1: 2\n", "spec.yaml:2: 1: unknown key", "1"),
    ("name: x y\ntask: {kind: translation, dataset: demo}\n", "spec.yaml:1: name", "cannot name a folder"),
    ("name: x\ntask: {kind: translation, dataset: demo}\nmodel: {kind: transformer}\n", "spec.yaml", "model.tie"),
])  # fmt: skip
def test_a_bad_spec_is_told_with_file_line_and_path(invoke, tmp_path, monkeypatch, text, place, words):
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(text)
    for command in ("train", "sweep-k", "ablate"):
        result = invoke(command, "spec.yaml", code=2)
        assert place in result.stderr
        assert words in result.stderr
        assert result.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spec.yaml"]


@pytest.mark.parametrize(("override", "words"), [
    ("train.max_step=3", "--set train.max_step=3: train.max_step: unknown key 'max_step'; did you mean 'max_steps'"),
    ("train.max_steps=many", "--set train.max_steps=many: train.max_steps: input should be a valid integer"),
    ("trian.max_steps=3", "did you mean 'train'"),
    ("train", "--set train: write it as key.path=value"),
    ("=3", "--set =3: write it as key.path=value"),
    ("train.max_steps=[", "--set train.max_steps=["),
    ("train.max_steps.more=1", "train.max_steps"),
    ("task.dataset.pairs=0", "task.dataset.pairs"),
])  # fmt: skip
def test_a_bad_override_is_told_as_such(invoke, tiny, override, words):
    result = invoke("train", *tiny, "--cell", "budget-1", "--set", override, "--dry-run", code=2)
    assert words in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["train", "gone.yaml"], 2, "gone.yaml: there is no such file"),
    (["train", "."], 2, "this is a folder"),
    (["train", "binary.yaml"], 2, "UTF-8"),
    (["eval", "gone"], 2, "gone: this is no cell"),
    (["report", "gone"], 4, "gone is no run folder"),
])  # fmt: skip
def test_files_that_are_not_there(invoke, tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert words in invoke(*arguments, code=code).stderr


@pytest.mark.parametrize(("device", "code", "words"), [
    ("potato", 2, "--device potato: no such kind of device"),
    ("meta", 2, "--device meta: no such kind of device"), ("cuda:99", 3, "--device cuda:99"),
])  # fmt: skip
def test_a_device_that_is_not_there_is_told_before_anything_is_done(invoke, tiny, device, code, words):
    assert words in invoke("sweep-k", *tiny, "--device", device, code=code).stderr
    assert not Path("runs").exists()


@pytest.mark.parametrize(("error", "code", "words"), [
    (AttnbenchError("it broke"), 1, "error: it broke"),
    (SpecError("a spec"), 2, "error: a spec"),
    (MissingExtraError("no package"), 3, "error: no package"),
    (DataError("no data"), 4, "error: no data"),
    (KeyboardInterrupt(), 130, "interrupted; run the same command again to go on"),
    (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 1, "error: runs/x: No space left on device"),
    (PermissionError(errno.EACCES, "Permission denied", "runs"), 1,
     "error: runs: Permission denied; give yourself the rights to it, or name another place"),
])  # fmt: skip
def test_exit_codes(invoke, monkeypatch, tiny, error, code, words):
    def raise_it(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("attnbench.cli.common.conduct", raise_it)
    result = invoke("train", *tiny, "--cell", "budget-1", code=code)
    assert result.stderr.strip() == words
    assert result.stdout == ""


def test_who_interrupts_a_fresh_run_is_not_told_to_begin_anew(invoke, monkeypatch, tiny):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnbench.cli.common.conduct", stop)
    said = invoke("train", *tiny, "--cell", "budget-1", "--fresh", code=130).stderr
    assert "to go on, without --fresh: cells that were not reached keep what stood there" in said


def test_a_fault_of_ours_is_not_hidden(invoke, monkeypatch, tiny):
    def raise_it(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("attnbench.cli.common.conduct", raise_it)
    with pytest.raises(ZeroDivisionError):
        invoke("train", *tiny, "--cell", "budget-1")


def test_the_signature_of_a_command_survives_the_guard():
    guard = module.guarded(module.train.train)
    assert guard.__doc__ == module.train.train.__doc__
    assert guard.__name__ == "train"


@pytest.mark.parametrize(("flag", "shown"), [([], True), (["--quiet"], False), (["--verbose"], True)])
def test_quiet_and_verbose(invoke, tiny, flag, shown):
    result = invoke(*flag, "train", *tiny, "--cell", "budget-1")
    assert ("evaluating" in result.stderr) == shown
    assert result.stdout


def test_no_colour_off_a_terminal(invoke, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b" not in invoke("--no-color", "list", "mechanisms").stdout
    assert os.environ.pop("NO_COLOR") == "1"


def test_a_reader_that_leaves_early_is_no_error():
    process = start("list", "mechanisms", "--json")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 0


@pytest.mark.parametrize("encoding", ["ascii", "koi8-r"])
def test_a_terminal_of_another_encoding(encoding, tmp_path):
    """Signs that it has not are no end of a command whose work is done."""
    code = (
        "from attnbench.cli.common import console, emit_json; "
        "console().print('1 \u00b1 2'); emit_json({'text': '\u00b1'})"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
    first, _, rest = done.stdout.decode(encoding).partition("\n")
    assert first == "1 ? 2"
    assert json.loads(rest) == {"text": "\u00b1"}


def test_a_closed_stdout():
    command = f'exec "{sys.executable}" -m attnbench list models >&-'
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_off_a_terminal_tables_are_whole(invoke, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    text = invoke("list", "datasets").stdout
    assert "europarl-ro-en" in text
    assert "\u2026" not in text


@pytest.mark.parametrize(("number", "command", "code"), [
    (signal.SIGINT, ("train", "--cell", "budget-1"), 130), (signal.SIGTERM, ("train", "--cell", "budget-1"), 143),
    (signal.SIGTERM, ("ablate", "--axis", "budget=1", "--seeds", "1,2", "--jobs", "2"), 143),
])  # fmt: skip
def test_an_interrupt_keeps_what_was_reached(number, command, code, tiny, tmp_path):
    """Ctrl-C in the middle of a training, or a batch system's end of it: one line, no traceback; the same command goes
    on from the checkpoint."""
    process = start(*command, *map(str, tiny), "--set", "train.max_steps=100000", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/demo/cells/*/checkpoints/step-*")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.strip().endswith("interrupted; run the same command again to go on")
    assert "Traceback" not in err
    assert "leaked" not in err
    assert out == ""
    cell = next(tmp_path.glob("runs/demo/cells/*/checkpoints/step-*")).parents[1]
    assert not (cell / "error.txt").exists()
    assert not is_locked(cell / "lock")  # a worker that was ended leaves the file
    assert list(cell.glob("checkpoints/step-*"))


def test_a_signal_that_is_to_be_ignored_is(monkeypatch):
    """As by `trap '' TERM` in a script."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(module, "app", lambda **given: None)
    try:
        for handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, handler)
            module.main()
            assert (signal.getsignal(signal.SIGTERM) is handler) == (handler is signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_encoding_that_lacks_a_sign_shows_another(tiny, tmp_path):
    words = ["--cell", "budget-1", *map(str, tiny)]
    process = start("train", *words, cwd=tmp_path)
    assert process.wait(120) == 0, process.communicate()[1]
    grid = next(tmp_path.glob("runs/demo/grid.json"))
    grid.write_text(grid.read_text().replace('"budget-1"', '"\u65e5\u672c"'))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    for form in ("md", "tex", "json"):
        command = [sys.executable, "-m", "attnbench", "report", "runs/demo", "--format", form]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
        assert (done.returncode, b"Traceback" in done.stderr) == (0, False)


def test_a_file_is_no_folder_of_runs(invoke, tmp_path):
    (tmp_path / "runs.txt").write_text("x")
    result = invoke("sweep-k", "--runs", str(tmp_path / "runs.txt"), code=2)
    assert "runs.txt: this is a file; name a folder" in result.stderr


def test_a_file_is_no_cache(invoke, tmp_path, monkeypatch):
    (tmp_path / "cache.txt").write_text("x")
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache.txt"))
    result = invoke("prepare", "demo", code=2)
    assert "cache.txt: this is a file; set ATTNBENCH_CACHE to a folder" in result.stderr


@pytest.mark.parametrize("arguments", [
    ("train", "--runs"), ("ablate", "--from"), ("report", "runs/demo", "--save"), ("speed", "--out"),
])  # fmt: skip
def test_an_empty_folder_is_not_the_working_directory(invoke, tmp_path, monkeypatch, arguments):
    """As of a variable of the shell that is not set."""
    monkeypatch.chdir(tmp_path)
    assert f"'{arguments[-1]}': this is empty; name a folder, . for" in invoke(*arguments, "", code=2).stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", ["\u0663", "1_0", "-1", "0x1", ""])
@pytest.mark.parametrize("arguments", [
    ("train", "--seed"), ("sweep-k", "--seeds"), ("sweep-k", "--k"), ("ablate", "--jobs"), ("eval", ".", "--step"),
    ("align", "a", "b", "--gold-first"), ("report", ".", "--most"), ("speed", "--threads"), ("speed", "--rounds"),
])  # fmt: skip
def test_numbers_are_of_ascii_digits(invoke, tmp_path, monkeypatch, arguments, number):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments, number, code=2)
    assert re.search(r"no whole number from [01]|write (a )?whole numbers? from [01] on", result.stderr)


def test_numbers_may_stand_between_spaces(invoke, tmp_path, monkeypatch):
    """As `wc -l` prints them."""
    monkeypatch.chdir(tmp_path)
    assert "no run folder" in invoke("report", ".", "--examples", "a", "b", "--most", " 3 ", code=4).stderr
