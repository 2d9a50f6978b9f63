"""One call for every way to align a text: with what it teaches itself, with other text, or with a saved aligner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from attnbench.core.errors import DataError, SpecError
from attnbench.core.spec import unknown
from attnbench.data.alignment.links import Links
from attnbench.data.alignment.symmetrize import METHODS, Method
from attnbench.data.parts import Part, read_pairs

Tool = Literal["ibm2", "eflomal"]


class Sides(NamedTuple):
    """Tokenised lines of a text and of its translation, as many of each."""

    source: Sequence[str]
    target: Sequence[str]


def method_of(name: str) -> Method:
    """The method of that name. Raises SpecError with the nearest one."""
    for method in METHODS:
        if method == name:
            return method
    raise SpecError(unknown("method", name, METHODS))


def read_sides(source: Path, target: Path) -> Sides:
    """The lines of two files. Raises DataError where they are not as many, or cannot be read."""
    pairs = list(read_pairs(Part(source, target)))
    return Sides([pair.source.text for pair in pairs], [pair.target.text for pair in pairs])


def _has_words(text: Sides) -> bool:
    """Whether some line has words on both sides."""
    return any(source.split() and target.split() for source, target in zip(*text, strict=True))


def align_text(
    text: Sides,
    method: Method = "grow-diag-final-and",
    *,
    tool: Tool = "ibm2",
    train: Sides | None = None,
    lowercase: bool = False,
    save: Path | None = None,
    load: Path | None = None,
) -> list[Links]:
    """The links of every pair of `text`.

    train: what to learn from in place of `text`; eflomal, which keeps nothing between texts, takes it along with it.
    save, load: a file that keeps what was learned, see Aligner.
    Raises SpecError for options that exclude each other, DataError for a file that is no aligner or lines to learn from
    that pair no words, and MissingExtraError if eflomal is asked for and absent.
    """
    taught = [train or text] if tool == "ibm2" else [text, *([train] if train else [])]
    if not load and not any(map(_has_words, taught)):
        where = "--train" if train else "the text"
        raise DataError(f"{where}: no line has words on both sides; nothing can be learned")
    if tool == "eflomal":
        if save or load:
            raise SpecError(f"{'--save' if save else '--load'}: eflomal keeps nothing; leave it out, or use ibm2")
        from attnbench.data.alignment.eflomal import align_eflomal

        return align_eflomal(*text, method, train=train or ((), ()), lowercase=lowercase)
    from attnbench.data.alignment.model import DIRECTIONS, Aligner, needed

    if load:
        given = {"--train": train is not None, "--lowercase": lowercase, "--save": save is not None}
        for option in (name for name, there in given.items() if there):
            raise SpecError(f"--load and {option} exclude each other: what was saved is used as it was learned")
        return Aligner.load(load).align(*text, method)
    directions = DIRECTIONS if save else needed(method)
    aligner = Aligner.train(*(train or text), directions=directions, lowercase=lowercase)
    if save:
        aligner.save(save)
    return aligner.align(*text, method)
