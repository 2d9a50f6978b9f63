"""Run: the folder of one cell. Claimed by a lock, read back from its files, finished by result.json written last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attnbench.core.errors import AttnbenchError
from attnbench.core.files import (
    append_jsonl,
    dump_yaml,
    jsonl,
    read_json,
    read_jsonl,
    remove_folder,
    sweep,
    write_atomic,
    write_json,
    write_lines,
)
from attnbench.core.lock import LockedError, locked
from attnbench.core.run_files import (
    CHECKPOINTS,
    ENVIRONMENT,
    ERROR,
    LOCK,
    LOG,
    OUTPUTS,
    RESULT,
    SPEC,
    TRACEBACK,
    cell_folder,
)
from attnbench.experiment.grid import Cell

RUN_AGAIN = "delete it and run the cell again"
"""What mends a damaged file of a cell."""


class Run:
    """A cell's folder, held by this process. Make one with `Run.claim`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / CHECKPOINTS

    @classmethod
    @contextmanager
    def claim(cls, root: Path, cell: Cell) -> Iterator[Run]:
        """Hold the cell's folder for the length of the block. Raises AttnbenchError while another process has it, or
        where a file is in its place.

        What a killed process left half-written is cleared away; so is the error of an earlier attempt.
        """
        folder = cell_folder(root, cell.folder)
        if folder.is_file():
            raise AttnbenchError(f"{folder} is a file where the cell's folder belongs; move it away")
        try:
            with locked(folder / LOCK):
                run = cls(folder)
                for place in (folder, run.checkpoints, folder / OUTPUTS):
                    sweep(place)
                write_atomic(folder / SPEC, dump_yaml(cell.spec.dump()))
                for name in (ERROR, TRACEBACK):
                    (folder / name).unlink(missing_ok=True)
                yield run
        except LockedError as error:
            raise AttnbenchError(f"{error}: the cell is being run there; wait for it, or end it") from None

    def log(self, record: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl."""
        append_jsonl(self.folder / LOG, record)

    @property
    def borrowed_seconds(self) -> float:
        """Of the training, made in another cell, as the log says since it was taken."""
        records = read_jsonl(self.folder / LOG)
        taken = [record["borrowed_seconds"] for record in records if "borrowed_seconds" in record]
        return taken[-1] if taken else 0.0

    def rewind(self, step: int) -> None:
        """Cut the lines of metrics.jsonl that lie past `step`."""
        path = self.folder / LOG
        kept = [record for record in read_jsonl(path) if record.get("step", 0) <= step]
        write_atomic(path, "".join(map(jsonl, kept)))

    def fresh(self) -> None:
        """Forget every checkpoint, log and output, whenever that is cut off: first what makes the cell a finished one,
        then what would make it go on, and only then what tells how it came there."""
        (self.folder / RESULT).unlink(missing_ok=True)
        for name in (CHECKPOINTS, OUTPUTS):
            remove_folder(self.folder / name)
        for name in (LOG, ENVIRONMENT):
            (self.folder / name).unlink(missing_ok=True)

    def output(self, name: str, lines: Iterable[str]) -> None:
        """hyps/<name>, a line each."""
        write_lines(self.folder / OUTPUTS / name, lines)

    def environment(self, content: Mapping[str, Any], step: int) -> list[dict[str, Any]]:
        """Note in env.json what goes on with this cell from `step` on; returns every such note, oldest first.

        An earlier attempt stays for the steps that it left; one that began at `step` or past it has left none.
        """
        path = self.folder / ENVIRONMENT
        earlier = environments(path) if path.is_file() else []
        attempts = [attempt for attempt in earlier if attempt["from_step"] < step]
        attempts.append({"from_step": step, **content})
        write_json(path, {"attempts": attempts})
        return attempts

    def finish(self, result: Mapping[str, Any]) -> None:
        """result.json: from now on the cell is done."""
        write_json(self.folder / RESULT, result)

    def fail(self, reason: str, traceback: str = "") -> None:
        """error.txt: from now on the cell has failed; running it again starts from its newest checkpoint.

        The reason is kept with the results and names no place of this machine; the traceback stays in the run folder.
        """
        if traceback:
            write_atomic(self.folder / TRACEBACK, traceback)
        for place, short in ((Path.cwd, ""), (Path.home, "~/")):
            with suppress(OSError, RuntimeError):  # a folder that is gone, a user who has none
                reason = reason.replace(f"{place()}/", short)
        write_atomic(self.folder / ERROR, reason.rstrip() + "\n")


def environments(path: Path) -> list[dict[str, Any]]:
    """The attempts of an env.json, oldest first; older files hold the last one alone."""
    content = read_json(path, "delete it; the attempts before this one are then not known")
    return content.get("attempts", [{"from_step": 0, **content}])


def read_result(folder: Path, digest: str = "") -> dict[str, Any]:
    """The result of a finished cell's folder. digest: of the cell, where it is known. Raises AttnbenchError, with what
    mends it, for one that is damaged, or belongs to another spec."""
    path = folder / RESULT
    try:
        result = read_json(path, RUN_AGAIN)
    except OSError as error:
        raise AttnbenchError(f"{path} cannot be read ({error.strerror}): check its permissions") from None
    if not isinstance(result.get("metrics"), dict) or not isinstance(result.get("data", {}), dict):
        raise AttnbenchError(f"{path} is damaged: {RUN_AGAIN}")
    found = result.get("digest")
    if digest and found and found != digest:
        raise AttnbenchError(f"{path} belongs to another spec ({found}, not {digest}): {RUN_AGAIN}")
    return result


def is_done(root: Path, cell: Cell) -> bool:
    """Whether there is a result, sound or not."""
    return (cell_folder(root, cell.folder) / RESULT).is_file()
