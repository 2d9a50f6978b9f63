from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.core.errors import DataError
from attnbench.data.special import EOS, SPECIALS, UNK
from attnbench.data.tokenizers.bpe import BpeSpec

TEXT = [
    "die alte katze schläft im garten hinter dem haus .",
    "der alte hund sieht die katze im garten .",
    "die kinder spielen hinter dem alten haus &amp; lachen .",
    "eine frau liest dem kind eine geschichte vor .",
    "schöne gärten und größere häuser gibt es überall .",
] * 3
LETTERS = sorted(set("".join(TEXT)) - {" "})
VOCABULARY = BpeSpec().learn(lambda: TEXT, 120)


def merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def symbols(word: str) -> tuple[str, ...]:
    return (*word[:-1], word[-1] + "</w>")


def merges_of(vocabulary) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(vocabulary._tokenizer.to_str())["model"]["merges"]]


def test_each_merge_is_a_most_frequent_pair() -> None:
    """Algorithm 1 of Sennrich et al. 2016, in plain loops."""
    words = Counter(symbols(word) for text in TEXT for word in text.split())
    merges = merges_of(VOCABULARY)
    assert len(merges) == 120 - len(SPECIALS) - 2 * len(LETTERS)
    for pair in merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for both in itertools.pairwise(word):
                pairs[both] += times
        assert pairs[pair] == max(pairs.values())
        words = Counter({merged(word, pair): times for word, times in words.items()})


def test_encoding_applies_the_merges_in_order() -> None:
    for text in [*TEXT[:5], "hundegarten schafe hausfrau"]:
        expected = []
        for word in text.split():
            pieces = symbols(word)
            for pair in merges_of(VOCABULARY):
                pieces = merged(pieces, pair)
            expected += pieces
        assert [VOCABULARY.token(index) for index in VOCABULARY.encode(text)] == expected


@settings(max_examples=80, deadline=None)
@given(st.lists(st.text(LETTERS, min_size=1), max_size=8))
def test_decode_undoes_encode(words: list[str]) -> None:
    text = " ".join(words)
    ids = VOCABULARY.encode(text)
    assert VOCABULARY.decode(ids) == text
    assert all(UNK < index < VOCABULARY.filled for index in ids)


def test_unknown_characters_and_special_ids() -> None:
    ids = VOCABULARY.encode("katze € hund")
    assert UNK in ids
    assert VOCABULARY.decode(ids) == "katze <unk> hund"
    assert VOCABULARY.decode([1, *VOCABULARY.encode("katze"), EOS, 0]) == "katze"
    assert VOCABULARY.decode([119 + 500]) == "<unk>"
    assert min(VOCABULARY.encode("<s> </s> <pad>")) >= UNK


def test_the_same_in_every_process(tmp_path: Path) -> None:
    """The trainer's hash tables are seeded anew in each process."""
    VOCABULARY.save(tmp_path / "here.json")
    code = (
        "import sys, pathlib; from attnbench.data.tokenizers.bpe import BpeSpec; "
        "text = pathlib.Path(sys.argv[1]).read_text().split(chr(10)); "
        "BpeSpec().learn(lambda: text, 120).save(pathlib.Path(sys.argv[2]))"
    )
    (tmp_path / "text").write_text("\n".join(TEXT))
    for name in ("one.json", "two.json"):
        subprocess.run([sys.executable, "-c", code, tmp_path / "text", tmp_path / name], check=True)
        assert (tmp_path / name).read_bytes() == (tmp_path / "here.json").read_bytes()


def test_saved_and_loaded(tmp_path: Path) -> None:
    VOCABULARY.save(tmp_path / "bpe.json")
    again = BpeSpec().load(tmp_path / "bpe.json", 120)
    assert again.encode_batch(TEXT) == VOCABULARY.encode_batch(TEXT)
    assert (again.rows, again.filled) == (120, 120)


def test_rows_that_a_small_text_cannot_fill_stay_unused() -> None:
    vocabulary = BpeSpec(vocab=5000).learn(lambda: TEXT, 5000)
    assert vocabulary.rows == 5000
    assert vocabulary.filled < 1000


def test_too_few_rows_for_the_alphabet() -> None:
    least = len(SPECIALS) + 2 * len(LETTERS)
    with pytest.raises(DataError, match=f"ask for {least} rows or more"):
        BpeSpec().learn(lambda: TEXT, least - 1)
    assert BpeSpec().learn(lambda: TEXT, least).filled == least


def test_a_huge_alphabet_keeps_its_most_frequent_characters() -> None:
    rare = "".join(chr(0x4E00 + i) for i in range(300))
    texts = [*TEXT, *TEXT, rare]
    vocabulary = BpeSpec().learn(lambda: texts, 1000)  # room for 128 characters
    assert vocabulary.decode(vocabulary.encode(TEXT[0])) == TEXT[0]
    assert UNK in vocabulary.encode(rare[-1])


def test_no_merges_are_learned_of_an_endless_word(caplog: pytest.LogCaptureFixture) -> None:
    lines = ["aa ab aa ab"] * 3
    wanted = BpeSpec(vocab=150).learn(lambda: lines, 150)
    found = BpeSpec(vocab=150).learn(lambda: [*lines, "ba" * 1500, "aa"], 150)
    assert "1 lines hold words of more than 2,000 characters" in caplog.text
    assert found.encode("aa ab") == wanted.encode("aa ab")
    assert found.decode(found.encode("ba" * 1500)) == "ba" * 1500


def test_no_merge_is_spelt_like_a_special_token_or_an_end() -> None:
    texts = ["<s>a <s>b <pad>c a</w>z b</w>z a </w>"] * 9
    vocabulary = BpeSpec().learn(lambda: texts, 150)
    assert not {"".join(pair) for pair in merges_of(vocabulary)} & {"<s>", "<pad>", "a</w>", "b</w>"}
    for word in ("<s>z", "<pad>", "a</w>z", "</w>"):
        assert vocabulary.decode(vocabulary.encode(word)) == word


def test_what_an_alphabet_has_no_room_for_parts_its_neighbours() -> None:
    rare = [f"x{chr(0x4E00 + i)}y" for i in range(300)]
    vocabulary = BpeSpec().learn(lambda: [*rare, *map(chr, range(0x100, 0x180)), "ab"] * 2, 1000)
    assert ("x", "y</w>") not in merges_of(vocabulary)
