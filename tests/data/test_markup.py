from __future__ import annotations

from pathlib import Path

import pytest
from sacrebleu.dataset.fake_sgml import FakeSGMLDataset

from attnbench.core.errors import DataError
from attnbench.data.lines import Line, read_lines
from attnbench.data.markup import merged_subwords, segments, tagged_talks, talk_segments
from attnbench.data.parts import Part, read_pairs


def lines(text: str) -> list[Line]:
    return [Line(number, line) for number, line in enumerate(text.splitlines(), 1)]


def test_talks_lose_their_data_and_keep_titles() -> None:
    text = """<doc docid="1">
<url>http://www.ted.com/talks/x</url>
<speaker>Al Gore</speaker>
<talkid>1</talkid>
<keywords>talks, climate</keywords>
<title>Al Gore: On averting</title>
<description>TED Talk Subtitles</description>
Thank you so much , Chris .
<reviewer href="x">A B</reviewer>
<translator href="x">C D</translator>
</doc>"""
    assert list(tagged_talks(lines(text))) == [
        Line(6, "Al Gore: On averting"),
        Line(7, "TED Talk Subtitles"),
        Line(8, "Thank you so much , Chris ."),
    ]


SGML = """<refset setid="newstest2014" srclang="any" trglang="de">
<doc sysid="ref" docid="1">
<p>
<seg id="1">Spektakulärer Sprung &amp; mehr</seg>
<seg id="2">  «Gestern»  </seg>
</p>
<hl><seg id="3">not at the start</seg></hl>
</doc>
</refset>
"""


def test_segments_are_those_that_sacrebleu_reads(tmp_path: Path) -> None:
    (tmp_path / "in.sgm").write_text(SGML, encoding="utf-8")
    FakeSGMLDataset("x")._convert_format(str(tmp_path / "in.sgm"), str(tmp_path / "out.txt"))
    expected = (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()
    found = list(segments(read_lines(tmp_path / "in.sgm")))
    assert [line.text for line in found] == [line.strip() for line in expected]
    assert [line.number for line in found] == [4, 5]


@pytest.mark.parametrize("line", ['<seg id="1">a</seg> <seg id="2">b</seg>', '  <SEG id="1">begun'])
def test_segments_that_share_a_line_or_do_not_end_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.sgm"
    path.write_text(f"<doc>\n{line}")
    with pytest.raises(DataError, match=r"a\.sgm: line 2: a <seg> that begins a line ends there, alone"):
        list(read_pairs(Part(path, path, select=segments)))


def test_a_segment_that_does_not_end_is_told_however_long_its_line_is() -> None:
    """Where white space around a segment was a part of the pattern, this took the cube of its length."""
    with pytest.raises(ValueError, match="line 1: a <seg> that begins a line ends there"):
        list(segments([Line(1, "<seg id=1>" + " " * 100_000 + "x")]))
    assert list(segments([Line(1, "<seg> \t a  b \u3000</seg>"), Line(2, "<seg> </seg>")])) == [
        Line(1, "a  b"), Line(2, ""),
    ]  # fmt: skip


def test_talk_segments_have_straight_apostrophes() -> None:
    text = '<seg id="12">  It’s <b>fine</b>.  </seg>\n<talkid>3</talkid>\n <seg id="13"> So. </seg>'
    assert list(talk_segments(lines(text))) == [Line(1, "It's <b>fine</b>."), Line(3, "So.")]


def test_subwords_are_joined() -> None:
    assert [line.text for line in merged_subwords(lines("ein haus@@ tier@@ chen .\nend@@"))] == [
        "ein haustierchen .",
        "end",
    ]
