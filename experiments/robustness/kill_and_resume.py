"""Kill a training with SIGKILL again and again, resume it, and compare its end with that of one left in peace.

    python experiments/robustness/kill_and_resume.py --kills 50 --seed 1

Runs `attnbench train` on the packaged demo, made shorter by --set, in processes of its own. Each round begins with
an empty run folder and a cache that holds nothing but what was measured of the machine, so corpora are prepared,
trained on and scored under fire. A round is killed up to five times and then finished by the same command. Half of the
kills come at a random moment of the clock, half just before a random one of the file operations that the whole command
makes (so that the short moments in which checkpoints, results and prepared data are written are hit as often as their
number of operations says). Whatever is on disk must be readable after each kill. In the end the weights, the log but
for its times, the metrics but for speeds, the outputs and the prepared data of every round must equal those of the
uninterrupted run, byte for byte.

Writes kill_and_resume.json beside this file, or to --out. Exits with 1 where two rounds differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
SHORTER = (
    "grid.axes={}", "model.attention.default.budget=4", "task.dataset.pairs=1500", "task.dataset.held_out=30",
    "train.max_steps=40", "train.validate_every=5", "train.log_every=2", "train.average=3",
)  # fmt: skip
A_ROUND = 5
"""Kills of one round, at most."""
TIMED = {"elapsed_s", "train/tokens_per_s", "valid/seconds", "train/seconds", "decode/tokens_per_s"}
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "shutil.rmtree"}
"""Audit events of Python that change what is on disk, besides files opened for writing."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Places:
    """The folders of one round."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache"
        self.runs = root / "runs"

    def cells(self) -> list[Path]:
        return sorted(self.runs.glob("**/cells/*"))


def child(arguments: list[str], root: Path, limit: int, count_to: Path | None) -> None:
    """The command itself. It dies just before its file operation number `limit` below `root`; 0: it does not."""
    done = 0

    def watch(event: str, details: tuple[Any, ...]) -> None:
        nonlocal done
        written = event == "open" and isinstance(details[2], int) and bool(details[2] & WRITING)
        if (written or event in CHANGES) and str(details[0]).startswith(str(root)):
            done += 1
            if done == limit:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    sys.argv = ["attnbench", *arguments]
    from attnbench.cli.app import main

    try:
        main()
    finally:
        if count_to is not None:
            count_to.write_text(str(done))


@dataclass(frozen=True)
class Command:
    """`attnbench train ...` for the folders of a round. warm: forked from this process, which has imported all."""

    spec: Path | None
    warm: bool
    log: Path

    def start(self, places: Places, limit: int = 0, count_to: Path | None = None) -> Callable[[float | None], int]:
        """Start it; the answer waits for its end, or kills it after so many seconds, and returns how it ended."""
        arguments = ["train", *([str(self.spec)] if self.spec else []), "--seed", "1", "--runs", str(places.runs)]
        if self.spec is None:
            arguments += [word for change in SHORTER for word in ("--set", change)]
        environment = {"ATTNBENCH_CACHE": str(places.cache), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        if self.warm:
            process = self._fork(arguments, environment, places.root, limit, count_to)
        else:
            job = json.dumps([arguments, str(places.root), limit, str(count_to) if count_to else None])
            with self.log.open("ab") as log:
                process = subprocess.Popen(
                    [sys.executable, str(HERE), "--job", job], stdout=log, stderr=log, env={**os.environ, **environment}
                ).pid

        def wait(delay: float | None) -> int:
            end = None if delay is None else time.monotonic() + delay
            while True:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    return os.waitstatus_to_exitcode(status)
                if end is not None and time.monotonic() >= end:
                    os.kill(process, signal.SIGKILL)
                    end = None
                time.sleep(0.002)

        return wait

    def _fork(
        self, arguments: list[str], environment: dict[str, str], root: Path, limit: int, count_to: Path | None
    ) -> int:
        process = os.fork()
        if process:
            return process
        code = 70
        try:
            os.environ.update(environment)
            with self.log.open("ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            child(arguments, root, limit, count_to)
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 70
        finally:
            os._exit(code)


def end_of(places: Places) -> dict[str, str]:
    """Checksums of all that a finished round has left, times and speeds aside.

    A lock file that nobody holds does not count: it stays where the kill came after the last word.
    """
    (cell,) = places.cells()
    newest = max(cell.glob("checkpoints/step-*"), key=lambda path: int(path.name[5:]))
    result = json.loads((cell / "result.json").read_text())
    metrics = {name: value for name, value in result["metrics"].items() if not timed(name)}
    lines = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
    log = [{name: value for name, value in line.items() if not timed(name)} for line in lines]
    (prepared,) = (path.parent for path in places.cache.glob("**/manifest.json"))
    return {
        "weights": hashed(newest / "model.safetensors"),
        "checkpoints": ",".join(sorted(path.name for path in cell.glob("checkpoints/*"))),
        "log": hashlib.sha256(json.dumps(log).encode()).hexdigest(),
        "metrics": hashlib.sha256(json.dumps(metrics, sort_keys=True).encode()).hexdigest(),
        "outputs": hashed(*sorted(cell.glob("hyps/*"))),
        "data": hashed(*sorted(prepared.iterdir())),
        "files": ",".join(sorted({path.name for path in [*cell.iterdir(), *prepared.parent.iterdir()]} - {"lock"})),
    }


def timed(name: str) -> bool:
    return name in TIMED or "decode" in name


def hashed(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def phase(places: Places) -> str:
    """Where a process was when it died. Raises ValueError where it left something broken under a whole name."""
    if not list(places.cache.glob("prepared/*/*/manifest.json")):
        return "preparing"
    if not places.cells():
        return "between preparing and training"
    (cell,) = places.cells()
    for name in ("result.json", "env.json"):
        if (cell / name).exists():
            json.loads((cell / name).read_text())
    for checkpoint in cell.glob("checkpoints/step-*"):
        if {path.name for path in checkpoint.iterdir()} != {"model.safetensors", "state.pt", "SHA256SUMS"}:
            raise ValueError(f"{checkpoint.name} is not whole")
    if list(cell.glob(".result.json.*")) or (cell / "result.json").exists():
        return "writing the result, or after it"
    if list(cell.glob("checkpoints/.step-*")):
        return "writing or removing a checkpoint"
    if (cell / "hyps").exists():
        return "scoring"
    return "training" if list(cell.glob("checkpoints/step-*")) else "before the first checkpoint"


def main() -> int:
    options = parse()
    if options.job:
        arguments, root, limit, count_to = json.loads(options.job)
        child(arguments, Path(root), limit, Path(count_to) if count_to else None)
        return 0
    if options.warm:
        import attnbench.cli.app
        import attnbench.experiment.session
        import attnbench.report.table
        from attnbench.core import native

        for source in sorted(Path(attnbench.__file__).parent.rglob("_*.cpp")):
            native.load(source)  # or most moments of the clock would lie in the compiler
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        command = Command(options.spec, options.warm, work / "log")
        calm = Places(work / "calm")
        started = time.monotonic()
        code = command.start(calm, count_to=work / "count")(None)
        seconds, operations = time.monotonic() - started, int((work / "count").read_text())
        if code:
            sys.stderr.write((work / "log").read_text())
            raise SystemExit("the uninterrupted run failed")
        expected = end_of(calm)
        say(f"uninterrupted: {seconds:.1f} s, {operations} file operations, weights {expected['weights'][:16]}")
        phases: Counter[str] = Counter()
        ways: Counter[str] = Counter()
        rounds, equal = 0, True
        while sum(phases.values()) < options.kills:
            rounds += 1
            places = Places(work / f"round-{rounds}")
            if (measured := calm.cache / "machine").is_dir():  # which library multiplies: under load another might win
                shutil.copytree(measured, places.cache / measured.name)
            for _ in range(min(A_ROUND, options.kills - sum(phases.values()))):
                by_clock = rng.random() < 0.5
                limit = 0 if by_clock else rng.randint(1, operations)
                delay = rng.uniform(0.0 if options.warm else 2.0, seconds) if by_clock else None
                code = command.start(places, limit)(delay)
                if code == 0:
                    break
                if code != -signal.SIGKILL:
                    sys.stderr.write((work / "log").read_text())
                    raise SystemExit(f"round {rounds}: a resumed run failed with {code}")
                phases[phase(places)] += 1
                ways["at a random time" if by_clock else "before a random file operation"] += 1
            code = command.start(places)(None)
            if code:
                sys.stderr.write((work / "log").read_text())
            found = end_of(places) if code == 0 else {}
            same = found == expected
            equal = equal and same
            say(f"round {rounds}: {sum(phases.values())} kills so far, {'equal' if same else 'DIFFERENT'}")
            for name in expected:
                if found.get(name) != expected[name]:
                    say(f"  {name}: {found.get(name)} instead of {expected[name]}")
            with suppress(OSError):
                shutil.rmtree(places.root)
        report = {
            "kills": sum(phases.values()), "rounds": rounds, "seed": options.seed, "equal": equal,
            "overrides": list(SHORTER) if options.spec is None else [], "killed": dict(ways), "while": dict(phases),
            "end": expected, "python": sys.version.split()[0], "torch": version_of_torch(),
        }  # fmt: skip
        options.out.write_text(json.dumps(report, indent=2) + "\n")
        say(json.dumps({name: report[name] for name in ("kills", "rounds", "equal", "while")}, indent=2))
        return 0 if equal else 1


def version_of_torch() -> str:
    from importlib.metadata import version

    return version("torch")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--spec", type=Path, help="another spec than the packaged demo; it must have one cell")
    parser.add_argument(
        "--warm", action="store_true", help="fork the commands from one process: faster, nothing compiled under fire"
    )
    parser.add_argument("--out", type=Path, default=HERE.with_suffix(".json"))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
