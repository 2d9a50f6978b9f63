"""A table as Markdown, LaTeX (booktabs) or on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnbench.report.layout import Column, Entry, Sheet


@dataclass(frozen=True)
class Document:
    """The sheets of one experiment and the notes under them."""

    name: str
    sheets: tuple[Sheet, ...]
    notes: tuple[str, ...]


def markdown(document: Document) -> str:
    """Tables with their notes as a list below."""
    parts = []
    for sheet in document.sheets:
        rows = [
            "| " + " | ".join(escape_markdown(column.title) for column in sheet.columns) + " |",
            "| " + " | ".join("---" if column.left else "---:" for column in sheet.columns) + " |",
            *("| " + " | ".join(_md_entry(entry) for entry in line) + " |" for line in sheet.lines),
        ]
        parts.append(f"### {escape_markdown(sheet.title)}\n\n" + "\n".join(rows) + "\n")
    if document.notes:
        parts.append("".join(f"- {escape_markdown(note)}\n" for note in document.notes))
    return "\n".join(parts)


def escape_markdown(text: str) -> str:
    """Text on one line that Markdown shows as it is."""
    return re.sub(r"([\\|*_<>`\[\]&~])", r"\\\1", " ".join(text.split()))


def _md_entry(entry: Entry) -> str:
    text = escape_markdown(entry.text)
    if not text:
        return text
    return {"best": f"**{text}**", "tied": f"<ins>{text}</ins>", "paper": f"*{text}*", "": text}[entry.mark]


_TEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
}


def tex(document: Document) -> str:
    """Tables by booktabs; the notes stand under the last one."""
    return "% needs \\usepackage{booktabs}\n" + "\n".join(
        _tex_table(sheet, document.notes if sheet is document.sheets[-1] else ()) for sheet in document.sheets
    )


def _tex_table(sheet: Sheet, notes: Sequence[str]) -> str:
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_tex(sheet.title)}}}",
        rf"\begin{{tabular}}{{{''.join('l' if column.left else 'r' for column in sheet.columns)}}}",
        r"\toprule",
        " & ".join(_tex(column.title) for column in sheet.columns) + r" \\",
        r"\midrule",
        *(_tex_line(line) for line in sheet.lines),
        r"\bottomrule",
        r"\end{tabular}",
        *(rf"\par{{\footnotesize {_tex(note)}\par}}" for note in notes),
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _tex_line(line: Sequence[Entry]) -> str:
    text = " & ".join(_tex_entry(entry) for entry in line)
    guard = "{}" if text.startswith(("[", "*")) else ""  # the command before it would read either as its own
    return rf"{guard}{text} \\"


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in " ".join(text.split()))


def _tex_entry(entry: Entry) -> str:
    text = _tex(entry.text)
    if not text:
        return text
    command = {"best": r"\textbf", "tied": r"\underline", "paper": r"\emph", "": ""}[entry.mark]
    return f"{command}{{{text}}}" if command else text


_STYLES = {"best": "bold", "tied": "underline", "paper": "italic", "": ""}


def terminal(document: Document, console: Console) -> None:
    """Print the document; on a narrow terminal the columns that matter least give way, and a note says so."""
    hidden: list[str] = []
    for sheet in document.sheets:
        kept, width = _fitting(sheet, console.width if console.is_terminal else 10**6)
        hidden += [column.title.replace("\n", " ") for column in sheet.columns if column not in kept]
        table = Table(
            title=Text(sheet.title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for column in kept:
            table.add_column(Text(column.title), justify="left" if column.left else "right")
        for line in sheet.lines:
            chosen = [entry for column, entry in zip(sheet.columns, line, strict=True) if column in kept]
            table.add_row(*(Text(entry.text, style=_STYLES[entry.mark]) for entry in chosen))
        if not console.is_terminal:
            console.width = max(console.width, width)  # a pipe has no width to keep to
        console.print(table, soft_wrap=False)
    for note in document.notes:
        console.print(Text(note), soft_wrap=True)
    if hidden:
        console.print(
            Text(f"no room for: {', '.join(dict.fromkeys(hidden))}; results.md has every column"), soft_wrap=True
        )


def _fitting(sheet: Sheet, width: int) -> tuple[list[Column], int]:
    """The columns that fit, and how wide they are together."""
    widths = {
        index: max(len(text) for text in [*column.title.split("\n"), *(line[index].text for line in sheet.lines)])
        for index, column in enumerate(sheet.columns)
    }
    kept = list(widths)
    for level in sorted({column.shed for column in sheet.columns if column.shed}):
        if _width(widths[index] for index in kept) <= width:
            break
        kept = [index for index in kept if sheet.columns[index].shed != level]
    whole = max(_width(widths[index] for index in kept), len(sheet.title))
    return [sheet.columns[index] for index in kept], whole


def _width(columns: Iterable[int]) -> int:
    return 1 + sum(column + 2 for column in columns)
