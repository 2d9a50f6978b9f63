"""Texts with the bounds of their documents, however these are marked: both sides read together, written out plain."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from attnbench.core.errors import DataError
from attnbench.data.lines import Line, open_bytes, read_lines

Form = Literal["auto", "xml", "marked", "blank", "names", "chat"]
"""xml: TED and NIST files, `<doc>` and `<seg>`, or talks that begin with a `<url>` line. marked: a line `<d>` opens a
document. blank: an empty line ends one. names: a file beside it has the name of each line's document. chat: the JSON
of BConTrasT, an agent who writes English, and both sides in one file."""

_OPENS = re.compile(r"\s*<(?:doc\b|url>)")
_NAME = re.compile(r'docid="([^"]*)"|<talkid>\s*(\S+?)\s*</talkid>')
_SEGMENT = re.compile(r"\s*<seg\b[^>]*>\s*(.*?)\s*</seg>")
_MARKUP = re.compile(r"\s*</?[a-zA-Z?!]")
_ENGLISH = "en"


class Sentence(NamedTuple):
    """document: its name, or its number from 1 where it has none."""

    document: str
    line: Line


class Written(NamedTuple):
    """Three files, aligned line by line: the sentences of both sides, and the name of each one's document."""

    source: Path
    target: Path
    names: Path


def read_documents(path: Path, language: str, form: Form = "auto", names: Path | None = None) -> Iterator[Sentence]:
    """The sentences of a file in their order. names: with the form `names`, the file of names.

    Raises DataError for a file that is not of this form, or has no document.
    """
    chosen = _form(path, names) if form == "auto" else form
    if chosen == "names":
        if names is None:
            raise DataError(f"{path}: the form `names` needs the file that names each line's document; give `names`")
        found = _named(path, names)
    elif chosen == "chat":
        found = _chat(path, language)
    else:
        found = _LINED[chosen](read_lines(path))
    empty = True
    for sentence in found:
        empty = False
        yield sentence
    if empty:
        raise DataError(
            f"{path}: no sentence found (read as `{chosen}`); say its form: {', '.join(get_args(Form)[1:])}"
        )


def write_aligned(
    source: Iterable[Sentence], target: Iterable[Sentence], at: tuple[Path, Path], into: Path, stem: str
) -> Written:
    """Write both sides and the names of their documents to `into`, checked against each other.

    at: the files that the sentences are of, for the message. Raises DataError where a document has more sentences on
    one side, or other documents stand there.
    """
    written = Written(*(into / f"{stem}.{ending}" for ending in ("source", "target", "names")))
    with (
        written.source.open("w", encoding="utf-8") as sources,
        written.target.open("w", encoding="utf-8") as targets,
        written.names.open("w", encoding="utf-8") as names,
    ):
        for ours, theirs in zip_longest(source, target):
            if ours is None or theirs is None or ours.document != theirs.document:
                raise _apart(ours, theirs, at)
            sources.write(ours.line.text + "\n")
            targets.write(theirs.line.text + "\n")
            names.write(f"{stem}/{ours.document}\n")  # two files may number their documents alike
    return written


def _apart(ours: Sentence | None, theirs: Sentence | None, at: tuple[Path, Path]) -> DataError:
    places = [
        f"{path} ends" if each is None else f"{path}:{each.line.number} is in document {each.document}"
        for path, each in zip(at, (ours, theirs), strict=True)
    ]
    return DataError(f"{' and '.join(places)}: both sides need the same documents, with as many sentences in each")


def _form(path: Path, names: Path | None) -> Form:
    """Told by the first line that holds anything."""
    if names is not None:
        return "names"
    with open_bytes(path) as file:
        head = file.read(1 << 12).decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if head.startswith("{"):
        return "chat"
    if head.startswith("<d>"):
        return "marked"
    return "xml" if re.match(r"<(?:\?xml|!DOCTYPE|mteval|srcset|refset|doc\b|url>)", head, re.IGNORECASE) else "blank"


def _xml(lines: Iterable[Line]) -> Iterator[Sentence]:
    """Segments where there are any in the document, else every line that is no mark-up."""
    number, name, started = 0, "", True
    for line in lines:
        if _OPENS.match(line.text) and started:
            number, name, started = number + 1, "", False
        said = _NAME.search(line.text)
        if said and not started:
            name = said[1] or said[2]
        segment = _SEGMENT.match(line.text)
        text = segment[1] if segment else None if _MARKUP.match(line.text) else line.text.strip()
        if number and text is not None and (segment or text):
            started = True
            yield Sentence(name or str(number), Line(line.number, text))


def _marked(lines: Iterable[Line]) -> Iterator[Sentence]:
    number = 0
    for line in lines:
        if line.text.strip() == "<d>":
            number += 1
        else:
            yield Sentence(str(max(1, number)), line)


def _blank(lines: Iterable[Line]) -> Iterator[Sentence]:
    number, open_ = 0, False
    for line in lines:
        if not line.text.strip():
            open_ = False
            continue
        number, open_ = number + (not open_), True
        yield Sentence(str(number), line)


_LINED: dict[str, Callable[[Iterable[Line]], Iterator[Sentence]]] = {"xml": _xml, "marked": _marked, "blank": _blank}


def _named(path: Path, names: Path) -> Iterator[Sentence]:
    """A name may have columns behind it; it is what stands before the first tab."""
    for line, name in zip_longest(read_lines(path), read_lines(names)):
        if line is None or name is None:
            longer, shorter = (names, path) if line is None else (path, names)
            raise DataError(f"{longer} has more lines than {shorter}: each line needs the name of its document")
        yield Sentence(name.text.partition("\t")[0].strip(), line)


def _chat(path: Path, language: str) -> Iterator[Sentence]:
    """Conversations by name; the agent writes English, the customer the other language, and each has a translation."""
    mend = "expected conversations by name, each a list of utterances with speaker, source and target"
    with open_bytes(path) as file:
        try:
            chats = json.loads(file.read().decode("utf-8"))
            utterances = [(name, said) for name, chat in chats.items() for said in chat]
            for number, (name, said) in enumerate(utterances, 1):
                original = (said["speaker"] == "agent") == (language == _ENGLISH)
                yield Sentence(name, Line(number, said["source" if original else "target"]))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DataError(f"{path}: is not a file of chats ({error!r}); {mend}") from None
