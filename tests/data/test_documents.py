"""Documents are found in every form, and both sides are held against each other."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from attnbench.core.errors import DataError
from attnbench.data.documents import read_documents, write_aligned

TED = """<?xml version="1.0" encoding="UTF-8"?>
<mteval>
<srcset setid="x" srclang="german">
<doc docid="1666" genre="lectures">
<url>http://example.com/a</url>
<description>Not a sentence</description>
<talkid>1666</talkid>
<title>Not one, either</title>
<seg id="1"> Als ich 11 war. </seg>
<seg id="2"> < 5 &amp; mehr </seg>
</doc>
<doc docid="7" genre="lectures">
<seg id="1"> Zweiter. </seg>
</doc>
</srcset>
</mteval>
"""
TALKS = """<url>http://example.com/1</url>
<keywords>a, b</keywords>
<talkid>1</talkid>
<title>One</title>
First of one.

Second of one.
<reviewer href="x">N</reviewer>
<url>http://example.com/2</url>
<talkid>22</talkid>
First of two.
"""
CHAT = {
    "a": [
        {"utteranceID": 0, "speaker": "customer", "source": "Hallo,", "target": "Hello."},
        {"utteranceID": 1, "speaker": "agent", "source": "Hi.", "target": "Tag."},
    ],
    "b": [{"utteranceID": 0, "speaker": "agent", "source": "Yes?", "target": "Ja?"}],
}


def found(path: Path, *args, **named) -> list[tuple[str, str]]:
    return [(sentence.document, sentence.line.text) for sentence in read_documents(path, *args, **named)]


def text(folder: Path, content: str, name: str = "a.txt") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    return path


@pytest.mark.parametrize("form", ["auto", "xml"])
def test_segments_of_ted_and_nist_files(tmp_path, form):
    wanted = [("1666", "Als ich 11 war."), ("1666", "< 5 &amp; mehr"), ("7", "Zweiter.")]
    assert found(text(tmp_path, TED, "a.xml.gz"), "de", form) == wanted


@pytest.mark.parametrize("form", ["auto", "xml"])
def test_talks_of_a_training_file(tmp_path, form):
    wanted = [("1", "First of one."), ("1", "Second of one."), ("22", "First of two.")]
    assert found(text(tmp_path, TALKS), "en", form) == wanted


@pytest.mark.parametrize("form", ["auto", "marked"])
def test_marked_lines_keep_empty_sentences(tmp_path, form):
    wanted = [("1", "a"), ("1", ""), ("1", "b"), ("2", "c")]
    assert found(text(tmp_path, "<d>\na\n\nb\n<d>\nc\n"), "en", form) == wanted


@pytest.mark.parametrize("form", ["auto", "blank"])
def test_empty_lines_end_a_document(tmp_path, form):
    assert found(text(tmp_path, "\na\nb\n\n \nc\n"), "en", form) == [("1", "a"), ("1", "b"), ("2", "c")]


@pytest.mark.parametrize("form", ["auto", "names"])
def test_names_beside_the_lines(tmp_path, form):
    names = text(tmp_path, "x.1\tnews\nx.1\tnews\ny\n", "ids.tsv")
    assert found(text(tmp_path, "a\n\nc\n"), "en", form, names) == [("x.1", "a"), ("x.1", ""), ("y", "c")]


@pytest.mark.parametrize("form", ["auto", "chat"])
def test_an_agent_writes_english(tmp_path, form):
    path = text(tmp_path, json.dumps(CHAT), "chat.json.gz")
    assert found(path, "en", form) == [("a", "Hello."), ("a", "Hi."), ("b", "Yes?")]
    assert found(path, "de", form) == [("a", "Hallo,"), ("a", "Tag."), ("b", "Ja?")]


@pytest.mark.parametrize(
    ("content", "form", "why"),
    [
        ("\n\n", "auto", "no sentence found"),
        ("a\nb\n", "xml", "no sentence found"),
        ("{", "chat", "is not a file of chats"),
        ('{"a": [{"speaker": "agent"}]}', "chat", "KeyError"),
        ("[1]", "chat", "is not a file of chats"),
        (
            '{"a": [{"speaker": "Agent", "source": "a", "target": "b"}]}',
            "chat",
            "speakers are agent and customer, not Agent",
        ),
        ("a\n", "names", "give `names`"),
        ('{"a": [{"speaker": "agent", "source": null, "target": "b"}]}', "chat", "is not a file of chats"),
        ('<doc docid="1">\n<seg>a\n</seg>\n', "xml", r"a\.txt:2: a <seg> does not end on its line"),
        ("<mteval><seg>a</seg>\n", "xml", r"a\.txt:1: a <seg> stands before the first <doc>"),
        ("<tei>\na\n", "auto", "begins with '<tei>', a mark-up that is not known"),
        ("<d id=3>\na\n", "auto", "a mark-up that is not known"),
    ],
)
def test_what_is_no_document_is_refused(tmp_path, content, form, why):
    with pytest.raises(DataError, match=why):
        found(text(tmp_path, content), "en", form)


def test_a_list_of_json_is_no_plain_text(tmp_path):
    path = tmp_path / "chats.json"
    path.write_text('[{"speaker": "agent"}]\n')
    with pytest.raises(DataError, match=r"chats\.json: begins with a JSON list; conversations are an object"):
        found(path, "en", "auto")


def test_what_stands_before_the_first_mark_is_a_document_of_its_own(tmp_path):
    assert found(text(tmp_path, "a\n<d>\nb\n"), "en", "marked") == [("0", "a"), ("1", "b")]


def test_a_page_is_no_marked_text(tmp_path):
    with pytest.raises(DataError, match="no line `<d>` opens a document"):
        found(text(tmp_path, "<html>\nsign in\n</html>\n"), "en", "marked")


def test_a_mark_at_the_end_opens_a_document_though_none_follows(tmp_path):
    assert found(text(tmp_path, "a\n<d>\n"), "en", "marked") == [("0", "a")]


def test_a_line_of_a_talk_may_begin_in_italics(tmp_path):
    talk = "<url>x</url>\n<i>Hi</i> there\n<br>\n<talkid>7</talkid>\n<title>T</title>\n"
    assert found(text(tmp_path, talk), "en", "xml") == [("1", "<i>Hi</i> there")]
    with pytest.raises(DataError, match="a mark-up that is not known"):
        found(text(tmp_path, "<b>Sign in</b>\n"), "en", "auto")


def test_chats_of_half_a_character_and_names_of_two_lines_are_refused(tmp_path):
    chat = [{"speaker": "agent", "source": "hi", "target": "hallo"}]
    path = tmp_path / "chats.json"
    for chats in ({"a\nb": chat}, {"a": [{**chat[0], "source": "\ud83d"}]}, {"\ud83d": chat}):
        path.write_text(json.dumps(chats))
        with pytest.raises(DataError, match="is not a file of chats"):
            found(path, "en", "chat")


def test_segments_in_capitals_or_side_by_side(tmp_path):
    wanted = [("x", "a"), ("x", "b"), ("y", "c")]
    given = '<DOC docid="x">\n<p><seg id="1">a</seg> <SEG>b </SEG></p>\n</DOC>\n<DOC docid="y"><seg>c</seg>\n'
    assert found(text(tmp_path, given), "en") == wanted


@pytest.mark.parametrize("given", [
    '<doc docid="a">\n<seg>1</seg>\n</doc><doc docid="b">\n<seg>2</seg>\n</doc>\n',
    '<?xml version="1.0"?>\n<refset><doc docid="a"><seg>1</seg>\n</doc>\n<doc docid="b">\n<seg>2</seg></doc>\n',
    '<doc docid="a"><seg>1</seg></doc><doc docid="b"><seg>2</seg></doc>\n',
])  # fmt: skip
def test_a_document_may_begin_anywhere_on_a_line(tmp_path, given):
    assert found(text(tmp_path, given), "en", "xml") == [("a", "1"), ("b", "2")]


def test_an_utterance_is_one_line(tmp_path):
    chat = json.dumps({"a": [{"speaker": "agent", "source": "one\ntwo", "target": "eins"}]})
    assert found(text(tmp_path, "\ufeff" + chat), "en") == [("a", "one two")]


def test_a_cut_off_archive_of_chats_is_told(tmp_path):
    path = tmp_path / "chat.json.gz"
    path.write_bytes(gzip.compress(json.dumps(CHAT).encode())[:-20])
    with pytest.raises(DataError, match=r"chat\.json\.gz"):
        found(path, "en", "chat")


def test_damaged_chats_are_told_whatever_the_damage(tmp_path):
    packed = bytearray(lzma.compress(json.dumps({"a": CHAT["a"] * 999}).encode()))
    packed[len(packed) // 2] ^= 255
    deep = b'{"a":' * 200_000
    for name, data in (("chat.json.xz", bytes(packed)), ("chat.json", deep)):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}: is not a file of chats"):
            found(path, "en", "chat")


def test_a_segment_that_does_not_end_is_told_however_long_its_line_is(tmp_path):
    """Where white space around a segment was a part of the pattern, this took the cube of its length."""
    path = text(tmp_path, "<doc>\n<seg>" + " " * 100_000 + "x\n")
    with pytest.raises(DataError, match=r"a\.txt:2: a <seg> does not end on its line"):
        found(path, "en", "xml")
    assert found(text(tmp_path, "<doc>\n<seg> \t a  b \u3000</seg><seg> </seg>\n"), "en", "xml") == [
        ("1", "a  b"), ("1", ""),
    ]  # fmt: skip


def test_a_document_that_goes_on_later_is_refused(tmp_path):
    names = text(tmp_path, "x\ny\nx\n", "ids.tsv")
    with pytest.raises(DataError, match=r"a\.txt:3: document x goes on after another one began"):
        found(text(tmp_path, "a\nb\nc\n"), "en", "auto", names)


def test_names_and_lines_must_be_as_many(tmp_path):
    with pytest.raises(DataError, match=r"ids.tsv has more lines than .*a.txt"):
        found(text(tmp_path, "a\n"), "en", "names", text(tmp_path, "x\nx\n", "ids.tsv"))
    with pytest.raises(DataError, match=r"a.txt has more lines than .*ids.tsv"):
        found(text(tmp_path, "a\nb\n"), "en", "names", text(tmp_path, "x\n", "ids.tsv"))


def aligned(tmp_path: Path, ours: str, theirs: str):
    paths = text(tmp_path, ours, "a.de"), text(tmp_path, theirs, "a.en")
    sides = [read_documents(path, language, "marked") for path, language in zip(paths, ("de", "en"), strict=True)]
    return write_aligned(sides[0], sides[1], paths, tmp_path, "train-0")


def test_both_sides_are_written_with_the_names(tmp_path):
    written = aligned(tmp_path, "<d>\na\nb\n<d>\nc\n", "<d>\nA\nB\n<d>\nC\n")
    assert [path.read_text() for path in written] == ["a\nb\nc\n", "A\nB\nC\n", "train-0/1\ntrain-0/1\ntrain-0/2\n"]


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        ("<d>\na\nb\n<d>\nc\n", "<d>\nA\n<d>\nB\nC\n", r"a.de:3 is in document 1 and .*a.en:4 is in document 2"),
        ("<d>\na\nb\n", "<d>\nA\n", r"a.de:3 is in document 1 and .*a.en ends"),
        ("<d>\na\n", "<d>\nA\nB\n", r"a.de ends and .*a.en:3 is in document 1"),
    ],
)
def test_documents_that_do_not_match_are_named(tmp_path, ours, theirs, why):
    with pytest.raises(DataError, match=why):
        aligned(tmp_path, ours, theirs)
