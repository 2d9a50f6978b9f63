"""C++ sources become libraries where a compiler can make them, once, and nothing breaks where none can."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from attnbench.core import lock, native

SOURCE = 'extern "C" int answer() { return 42; }\n'
compiled = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source of its own and a cache of its own; nothing is remembered from one test to the next."""
    monkeypatch.setenv("ATTNBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(native.SWITCH, raising=False)
    native._load.cache_clear()
    native.compiler.cache_clear()
    monkeypatch.setattr(native, "_tried", {})
    monkeypatch.setattr(native, "_without", [])
    path = tmp_path / "_answer.cpp"
    path.write_text(SOURCE)
    yield path
    native._load.cache_clear()
    native.compiler.cache_clear()


@pytest.fixture
def compile_by(tmp_path, monkeypatch):
    """Makes a script the C++ compiler."""

    def take(script):
        compiler = tmp_path / "c++"
        compiler.write_bytes(script if isinstance(script, bytes) else script.encode())
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))

    return take


@compiled
def test_compiled_once_and_again_when_the_source_changes(source, tmp_path):
    assert native.load(source).answer() == 42
    (made,) = (tmp_path / "cache" / "native").glob("answer-*.so")
    before = made.stat().st_mtime_ns
    native._load.cache_clear()
    assert native.load(source).answer() == 42
    assert made.stat().st_mtime_ns == before
    source.write_text(SOURCE.replace("42", "43"))
    native._load.cache_clear()
    assert native.load(source).answer() == 43


@compiled
def test_another_processor_or_other_options_make_another(source, monkeypatch):
    """A cache may lie on a disk that several share: another's instructions end who runs them."""
    folder = source.parent / "cache" / "native"
    native.load(source)
    for change in (
        lambda: monkeypatch.setattr(native.processor, "identity", lambda: b"another"),
        lambda: monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-DOTHER")),
    ):
        before = len(list(folder.glob("*.so")))
        change()
        native._load.cache_clear()
        assert native.load(source).answer() == 42
        assert len(list(folder.glob("*.so"))) == before + 1


@compiled
def test_what_a_source_includes_is_part_of_it(source):
    number = source.with_name("_number.hpp")
    number.write_text("#define NUMBER 1\n")
    source.write_text('#include "_number.hpp"\n' + SOURCE.replace("42", "NUMBER"))
    assert native.load(source).answer() == 1
    number.write_text("#define NUMBER 2\n")
    native._load.cache_clear()
    assert native.load(source).answer() == 2


@compiled
def test_what_cannot_be_compiled_is_told_and_left(source, caplog):
    source.write_text("this is no program\n")
    with caplog.at_level(logging.WARNING):
        assert native.load(source) is None
    assert "_answer.cpp is left to torch" in caplog.text
    assert "error" in caplog.text


@compiled
def test_a_compiler_that_has_compiled_nothing_is_not_named(source):
    assert native.engine() == native.compiler()
    good = source.with_name("_good.cpp")
    good.write_text(SOURCE)
    source.write_text("this is no program\n")
    assert native.load(source) is None
    assert native.engine() is None
    assert native.load(good).answer() == 42
    assert native.engine() == native.compiler()


@compiled
def test_the_time_of_compiling_is_counted_once(source):
    before = native.compiling_seconds()
    native.load(source)
    taken = native.compiling_seconds() - before
    assert taken > 0
    native._load.cache_clear()
    native.load(source)
    assert native.compiling_seconds() - before == taken


def test_a_fault_of_the_source_goes_before_one_of_an_option(source, compile_by, caplog):
    compile_by(
        """#!/bin/sh
case "$*" in
*--version*) echo picky 1; exit;;
*-march=native*) echo "error: unknown value 'native'" >&2;;
*) echo "_answer.cpp:1:1: error: this is no program" >&2;;
esac
exit 1
"""
    )
    with caplog.at_level(logging.WARNING):
        assert native.load(source) is None
    assert "this is no program" in caplog.text


@compiled
def test_a_compiler_without_threads_makes_vectors_all_the_same_and_says_so(
    source, compile_by, tmp_path, monkeypatch, caplog
):
    said = tmp_path / "said"
    compile_by(
        f"""#!/bin/sh
for word; do test "$word" = -fopenmp && echo "error: no threads here" >&2 && exit 1; done
echo "$*" >> {said}
exec {" ".join(native._command())} "$@"
"""
    )
    source.write_text("#ifdef _OPENMP\n#error threads\n#endif\n" + SOURCE)
    assert native.load(source).answer() == 42
    assert "-fopenmp-simd" in said.read_text().splitlines()[-1].split()
    for _ in range(2):  # made, and found
        assert "makes code without threads, which is slower" in caplog.text
        assert native.engine() == f"{native.compiler()}, without threads"
        caplog.clear()
        monkeypatch.setattr(native, "_without", [])
        native._load.cache_clear()
        assert native.load(source).answer() == 42


@compiled
def test_a_disk_without_room_is_done_without(source, compile_by, tmp_path):
    cache = tmp_path / "cache"
    compile_by(
        f"""#!/bin/sh
case "$*" in *{cache}*) echo "error: No space left on device" >&2; exit 1;; esac
exec {" ".join(native._command())} "$@"
"""
    )
    assert native.load(source).answer() == 42
    assert not list((cache / "native").glob("*.so"))


@compiled
def test_a_broken_file_that_cannot_be_made_anew_is_done_without(source, monkeypatch):
    library = broken_in_another_cache(source, monkeypatch)
    monkeypatch.setattr(native, "making", lambda path: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))
    assert native.load(source).answer() == 42
    assert library.read_text() == "broken"


@compiled
def test_a_broken_file_where_there_is_no_room_is_done_without(source, monkeypatch):
    library = broken_in_another_cache(source, monkeypatch)
    run = native._run

    def full(command):
        if command[-1].startswith(str(library.parent)):
            return subprocess.CompletedProcess(command, 1, "", "error: No space left on device")
        return run(command)

    monkeypatch.setattr(native, "_run", full)
    assert native.load(source).answer() == 42
    assert library.read_text() == "broken"


def broken_in_another_cache(source, monkeypatch):
    """A file that does not load where the library is looked for; what was loaded by its path would be found again."""
    native.load(source)
    (made,) = (Path(os.environ["ATTNBENCH_CACHE"]) / "native").glob("*.so")
    broken = source.parent / "other" / "native" / made.name
    broken.parent.mkdir(parents=True)
    broken.write_text("broken")
    monkeypatch.setenv("ATTNBENCH_CACHE", str(source.parent / "other"))
    native._load.cache_clear()
    return broken


@compiled
def test_a_folder_that_cannot_be_entered_is_done_without(source, monkeypatch):
    def refuse(*given):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(native, "_made", refuse)
    monkeypatch.setattr(Path, "is_file", refuse)
    assert native.load(source).answer() == 42


@compiled
def test_a_compiler_that_was_killed_leaves_no_slower_library(source, compile_by, tmp_path):
    count = tmp_path / "count"
    compile_by(f"#!/bin/sh\n[ $1 = --version ] && echo it && exit 0\necho >> {count}\nkill -9 $$\n")
    assert native.load(source) is None
    assert len(count.read_text()) == 1
    assert not list((tmp_path / "cache" / "native").glob("*.refused"))


@compiled
def test_what_a_compiler_started_ends_with_its_time(source, compile_by, tmp_path, monkeypatch):
    """As g++ has others work for it."""
    child = tmp_path / "child"
    compile_by(f"#!/bin/sh\n[ $1 = --version ] && echo it && exit 0\nsleep 60 & echo $! > {child}\nwait\n")
    monkeypatch.setattr(native, "_PATIENCE", 1)
    assert native.load(source) is None
    state = Path(f"/proc/{child.read_text().strip()}/stat")
    patience = time.monotonic() + 20  # the system ends it when it comes to it
    while runs(state) and time.monotonic() < patience:
        time.sleep(0.01)
    assert not runs(state)


def runs(state):
    try:
        return state.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@compiled
def test_a_compiler_that_takes_too_long_is_asked_again_after_a_pause(source, compile_by, tmp_path, monkeypatch):
    count = tmp_path / "count"
    compile_by(f"#!/bin/sh\n[ $1 = --version ] && echo it && exit 0\necho >> {count}\nsleep 60\n")
    monkeypatch.setattr(native, "_PATIENCE", 1)
    assert native.load(source) is None
    (refused,) = (tmp_path / "cache" / "native").glob("*.refused")
    for passed, asked in (
        (native._PAUSE / 2, 1),
        (native._PAUSE, 2),
    ):  # those who waited for it meanwhile go on at once
        os.utime(refused, (0, refused.stat().st_mtime - passed))
        native._load.cache_clear()
        assert native.load(source) is None
        assert len(count.read_text()) == asked


@compiled
def test_a_cache_that_cannot_be_written_to_is_done_without(source, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file stands where the folder should")
    assert native.load(source).answer() == 42


def test_the_switch(source, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.load(source) is None


def test_no_compiler_is_told_where_it_is_asked_for(source, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native.compiler() is None
    assert native.load(source) is None
    assert not caplog.text  # a process of many would say it, too
    assert "no C++ compiler is here, and everything is left to torch" in (native.lacking() or "")
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.lacking() is None  # who switches it off knows
    monkeypatch.delenv(native.SWITCH)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.lacking() is None


def test_a_compiler_that_is_named_and_is_not_there_is_told(source, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.load(source) is None
    assert "no-such-compiler is no C++ compiler that runs, everything is left to torch" in caplog.text


def test_a_compiler_that_does_not_answer(source, compile_by):
    compile_by("#!/bin/sh\nexit 3\n")
    assert native.compiler() is None
    assert native.load(source) is None


@compiled
def test_a_block_without(source):
    with native.off():
        assert native.load(source) is None
    assert native.load(source).answer() == 42


@compiled
def test_what_was_refused_once_is_not_tried_again(source, monkeypatch, caplog):
    source.write_text("this is no program\n")
    assert native.load(source) is None
    native._load.cache_clear()
    monkeypatch.setattr(native, "_compile", lambda *given: pytest.fail("tried again"))
    with caplog.at_level(logging.WARNING):
        assert native.load(source) is None
    assert "error" in caplog.text


@compiled
def test_a_broken_file_is_made_anew(source, monkeypatch):
    library = broken_in_another_cache(source, monkeypatch)
    assert native.load(source).answer() == 42
    assert library.read_bytes() != b"broken"


@compiled
def test_a_cache_of_before_that_cannot_be_written_to_is_believed(source, monkeypatch):
    """One that several share, which holds no lengths yet."""
    native.load(source)
    (size,) = (source.parent / "cache" / "native").glob("*.size")
    size.unlink()
    native._load.cache_clear()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **more: mode != os.W_OK and real(path, mode, **more))
    monkeypatch.setattr(native, "_compile", lambda *given: pytest.fail("made anew"))
    assert native.load(source).answer() == 42


@compiled
@pytest.mark.parametrize("length", [100, 4096, 8192])
def test_a_file_that_was_cut_off_is_made_anew(source, monkeypatch, length):
    """Behind its first page the system ends who loads it."""
    library = broken_in_another_cache(source, monkeypatch)
    (made,) = (source.parent / "cache" / "native").glob("*.so")
    library.write_bytes(made.read_bytes()[:length])
    library.with_suffix(".size").write_text(made.with_suffix(".size").read_text())
    assert native.load(source).answer() == 42
    assert library.stat().st_size == made.stat().st_size > length


@compiled
def test_what_another_made_while_one_waited_is_taken(source, monkeypatch):
    native.load(source)
    folder = source.parent / "cache" / "native"
    shutil.copytree(folder, source.parent / "made")
    shutil.rmtree(folder)

    @contextlib.contextmanager
    def waited(target):
        shutil.copytree(source.parent / "made", folder)
        yield

    native._load.cache_clear()
    monkeypatch.setattr(native, "making", waited)
    monkeypatch.setattr(native, "_compile", lambda *given: pytest.fail("made twice"))
    assert native.load(source).answer() == 42


@compiled
def test_words_after_the_compiler_are_part_of_it(source, monkeypatch):
    source.write_text(SOURCE.replace("42", "NUMBER"))
    command = " ".join(native._command())
    for number in (3, 4):
        monkeypatch.setenv("CXX", f"{command} -DNUMBER={number}")
        native._load.cache_clear()
        native.compiler.cache_clear()
        assert native.load(source).answer() == number


def test_what_is_no_plain_tensor_is_not_read():
    assert native.readable(torch.ones(2), torch.nn.Parameter(torch.ones(2)))
    assert not native.readable(torch._neg_view(torch.ones(2)))
    with FakeTensorMode():
        assert not native.readable(torch.ones(2))


@pytest.mark.parametrize(
    "said",
    [
        "g++: fatal error: Killed signal terminated program cc1plus",
        "No space left on device",
        "final link failed: Disk quota exceeded",
        "Cannot create temporary file in /tmp/: Read-only file system",
        "virtual memory exhausted: Cannot allocate memory",
    ],
)
def test_a_compiler_that_wanted_for_memory_is_asked_again(source, compile_by, tmp_path, said):
    compile_by(f"#!/bin/sh\n[ $1 = --version ] && echo short && exit 0\necho '{said}' >&2\nexit 1\n")
    assert native.load(source) is None
    assert not list((tmp_path / "cache" / "native").glob("*.refused"))


@compiled
def test_a_passing_fault_does_not_leave_a_slower_library(source, compile_by, tmp_path):
    """Nor are other options tried after it."""
    once, count = tmp_path / "once", tmp_path / "count"
    compile_by(
        f"""#!/bin/sh
[ $1 = --version ] && echo flaky && exit 0
echo >> {count}
[ ! -f {once} ] && touch {once} && echo "g++: fatal error: Killed" >&2 && exit 1
exec {" ".join(native._command())} "$@"
"""
    )
    assert native.load(source) is None
    assert len(count.read_text()) == 1
    native._load.cache_clear()
    assert native.load(source).answer() == 42


@compiled
def test_threads_whose_library_is_not_found_are_done_without(source, compile_by, tmp_path, monkeypatch):
    """As of a clang++ whose OpenMP lies where the system does not look for it."""
    absent = tmp_path / "libabsent.so"
    command = " ".join(native._command())
    subprocess.run([*native._command(), "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o", absent], check=True)
    compile_by(
        f"""#!/bin/sh
case " $* " in *" -fopenmp "*) [ -f {absent} ] && {command} "$@" -Wl,--no-as-needed {absent}; exit $?;; esac
exec {command} "$@"
"""
    )
    compile_, tried = native._run, []

    def run(command):
        done = compile_(command)
        if "-fopenmp" in command:
            tried.append(done.returncode)
            absent.rename(tmp_path / "gone")
        return done

    monkeypatch.setattr(native, "_run", run)
    assert native.load(source).answer() == 42
    assert tried == [0]
    monkeypatch.setattr(native, "_compile", lambda *given: pytest.fail("compiled again"))
    native._load.cache_clear()
    assert native.load(source).answer() == 42


@compiled
def test_the_clock_stands_while_a_library_is_made_or_waited_for(source, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(native.time, "perf_counter", lambda: now[0])
    make = native._compile

    def slow(*given):
        now[0] += 7.0
        make(*given)

    monkeypatch.setattr(native, "_compile", slow)
    before = native.clock()
    assert native.load(source).answer() == 42
    assert native.clock() == before
    now[0] += 2.0
    assert native.clock() == before + 2.0


@compiled
def test_a_home_that_nobody_knows_leaves_it_to_torch(source, monkeypatch, caplog):
    monkeypatch.setenv("ATTNBENCH_CACHE", "~nobody-of-that-name/cache")
    assert native.load(source) is None
    assert "home folder is not known" in caplog.text


@compiled
def test_a_cache_that_keeps_no_locks_is_told(source, tmp_path, monkeypatch, caplog):
    def refused(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refused)
    native._warn_uncached.cache_clear()
    assert native.load(source).answer() == 42
    assert f"{tmp_path / 'cache' / 'native'} cannot be written to, or keeps no locks" in caplog.text
    assert "ATTNBENCH_CACHE" in caplog.text


@compiled
def test_what_was_refused_is_tried_again_another_day(source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", f"{' '.join(native._command())} -include {tmp_path}/later.h")
    assert native.load(source) is None
    (refused,) = (tmp_path / "cache" / "native").glob("*.refused")
    (tmp_path / "later.h").touch()
    native._load.cache_clear()
    assert native.load(source) is None
    os.utime(refused, (0, 0))
    native._load.cache_clear()
    assert native.load(source).answer() == 42


@compiled
def test_a_cache_that_nothing_can_be_run_from(source, tmp_path, monkeypatch):
    """As on a disk mounted noexec: the library is loaded from elsewhere, and not compiled again."""
    native.load(source)
    native._load.cache_clear()
    load = ctypes.CDLL

    def refuse(name: str) -> ctypes.CDLL:
        if name.startswith(str(tmp_path / "cache")):
            raise OSError("failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(native.ctypes, "CDLL", refuse)
    monkeypatch.setattr(native, "_compile", lambda *given: pytest.fail("compiled again"))
    assert native.load(source).answer() == 42


def test_an_interrupt_is_no_fault_of_the_compiler(source, compile_by, monkeypatch):
    """It may come when the compiler has just ended, and there is nothing to kill."""

    def interrupted(started, timeout=None):
        started.wait()
        raise KeyboardInterrupt

    compile_by("#!/bin/sh\nexit 0\n")
    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        native.load(source)


def test_a_compiler_that_speaks_another_encoding(source, compile_by, caplog):
    compile_by(b"#!/bin/sh\nprintf 'f\\344llt aus\\n' >&2\n[ $1 = --version ] && echo foreign && exit 0\nexit 1\n")
    assert native.load(source) is None
    assert "llt aus" in caplog.text


def test_the_compiler_is_asked_in_english(source, compile_by, monkeypatch, caplog):
    compile_by('#!/bin/sh\n[ $1 = --version ] && echo polyglot && exit 0\necho "locale $LC_ALL" >&2\nexit 1\n')
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert native.load(source) is None
    assert "locale C" in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_torch_follows_is_not_read():
    x, seen = torch.ones(2), []

    def look(given: torch.Tensor) -> torch.Tensor:
        seen.append(native.readable(given))
        return given * 2

    torch.jit.trace(look, x, check_trace=False)
    make_fx(look)(x)
    with forward_ad.dual_level():
        look(forward_ad.make_dual(x, x))
    assert seen == [False, False, False]
    assert native.readable(x)
