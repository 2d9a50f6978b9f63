"""Texts with the bounds of their documents, however these are marked: both sides read together, written out plain."""

from __future__ import annotations

import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from attnbench.core.errors import DataError
from attnbench.data.lines import Line, open_bytes, read_lines
from attnbench.data.text import spaced

Form = Literal["auto", "xml", "marked", "blank", "names", "chat"]
"""xml: TED and NIST files, `<doc>` and `<seg>`, or talks that begin with a `<url>` line. marked: a line `<d>` opens a
document. blank: an empty line ends one. names: a file beside it has the name of each line's document. chat: the JSON
of BConTrasT, an agent who writes English, and both sides in one file."""

_XML = re.compile(r"<(?:\?xml|!DOCTYPE|mteval|srcset|refset|tstset|doc\b|url>)", re.IGNORECASE)
_TAG = re.compile(
    r"""(?P<opens><doc\b|<url>)|docid="(?P<id>[^"]*)"|<talkid>\s*(?P<talk>\S+?)\s*</talkid>"""
    r"""|<seg\b[^>]*>(?P<segment>.*?)</seg>|(?P<unended><seg\b)""",
    re.IGNORECASE,
)
_MARKUP = re.compile(r"\s*</?[a-zA-Z?!]")
_STYLED = re.compile(r"\s*</?(?:[ibu]|em|strong)>", re.IGNORECASE)
"""What may begin a line of text in a talk."""


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

    Raises DataError for a file that is not of this form, has no document, or names one again after another.
    """
    chosen = _form(path, names) if form == "auto" else form
    if chosen == "names":
        if names is None:
            raise DataError(f"{path}: the form `names` needs the file that names each line's document; give `names`")
        found = _named(path, names)
    elif chosen == "chat":
        found = _chat(path, language)
    elif chosen == "xml":
        found = _xml(path)
    else:
        found = _marked(path) if chosen == "marked" else _blank(read_lines(path))
    seen: set[str] = set()
    last: str | None = None
    for sentence in found:
        if sentence.document != last:
            if sentence.document in seen:
                raise DataError(
                    f"{path}:{sentence.line.number}: document {sentence.document} goes on after another one began; put "
                    "its sentences together, or give it another name"
                )
            last = sentence.document
            seen.add(last)
        yield sentence
    if last is None:
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
    head = next((line.text.strip() for line in read_lines(path) if line.text.strip()), "")
    if head.startswith("{"):
        return "chat"
    if head.startswith("[") and ".json" in path.suffixes:
        raise DataError(f'{path}: begins with a JSON list; conversations are an object, {{"id": [utterances]}}')
    if head == "<d>":
        return "marked"
    if _XML.match(head):
        return "xml"
    if _MARKUP.match(head):
        raise DataError(f"{path}: begins with {head[:40]!r}, a mark-up that is not known; say its form, or remove it")
    return "blank"


def _xml(path: Path) -> Iterator[Sentence]:
    """Segments, and lines that are no mark-up. A line may hold any number of tags; each is taken in its turn."""
    number, name, started = 0, "", True
    for line in read_lines(path):
        tags = list(_TAG.finditer(line.text))
        is_text = not _MARKUP.match(line.text) or bool(_STYLED.match(line.text))
        if is_text and not any(tag["segment"] is not None or tag["unended"] for tag in tags):
            if number and (text := line.text.strip()):
                started = True
                yield Sentence(name or str(number), Line(line.number, text))
            continue
        for tag in tags:
            if tag["unended"]:
                raise DataError(f"{path}:{line.number}: a <seg> does not end on its line; put each on one of its own")
            if tag["opens"] and started:
                number, name, started = number + 1, "", False
            if (said := tag["id"] or tag["talk"]) and not started:
                name = said
            if tag["segment"] is not None:
                if not number:
                    raise DataError(f"{path}:{line.number}: a <seg> stands before the first <doc>; put it into one")
                started = True
                yield Sentence(name or str(number), Line(line.number, tag["segment"].strip()))


def _marked(path: Path) -> Iterator[Sentence]:
    number = 0
    for line in read_lines(path):
        if line.text.strip() == "<d>":
            number += 1
        else:
            yield Sentence(str(number), line)
    if not number:
        raise DataError(
            f"{path}: no line `<d>` opens a document, and it was read as `marked`; is it the file it should be?"
        )


def _blank(lines: Iterable[Line]) -> Iterator[Sentence]:
    number, open_ = 0, False
    for line in lines:
        if not line.text.strip():
            open_ = False
            continue
        number, open_ = number + (not open_), True
        yield Sentence(str(number), line)


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
    try:
        with open_bytes(path) as file:
            chats = json.loads(file.read().decode("utf-8-sig"))
        if any(len(name.splitlines()) > 1 for name in chats):
            raise ValueError("the name of a conversation holds the end of a line")
        utterances = [(name, said) for name, chat in chats.items() for said in chat]
        if other := {said["speaker"] for _, said in utterances} - {"agent", "customer"}:
            raise ValueError(f"its speakers are agent and customer, not {', '.join(sorted(map(str, other)))}")
        own = language == "en"
        texts = [spaced(said["source" if (said["speaker"] == "agent") == own else "target"]) for _, said in utterances]
        "".join([*chats, *texts]).encode()  # half a character, which JSON can say, is no text
    except (
        ValueError, KeyError, AttributeError, TypeError, EOFError, OSError, RecursionError, zlib.error, lzma.LZMAError
    ) as error:  # fmt: skip
        raise DataError(f"{path}: is not a file of chats ({error!r}); {mend}") from None
    for number, ((name, _), text) in enumerate(zip(utterances, texts, strict=True), 1):
        yield Sentence(name, Line(number, text))
