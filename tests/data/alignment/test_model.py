from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from attnbench.core.errors import DataError, SpecError
from attnbench.data.alignment.links import parse_links
from attnbench.data.alignment.model import Aligner, needed
from attnbench.data.alignment.symmetrize import METHODS, symmetrize
from attnbench.data.datasets.demo import sentences

DRAWN = [sentence for _, sentence in sentences(1, {"train": 600, "valid": 0, "test": 100})]
SOURCES = [" ".join(sentence.source) for sentence in DRAWN]
TARGETS = [" ".join(word.text for word in sentence.target) for sentence in DRAWN]
GOLD = [set(parse_links(sentence.links())) for sentence in DRAWN]


@pytest.fixture(scope="module")
def aligner() -> Aligner:
    return Aligner.train(SOURCES[100:], TARGETS[100:])


def error_rate(aligner: Aligner, method: str) -> float:
    found = [set(links) for links in aligner.align(SOURCES[:100], TARGETS[:100], method)]  # pyright: ignore
    both = sum(len(ours & gold) for ours, gold in zip(found, GOLD, strict=False))
    return 1 - 2 * both / (sum(map(len, found)) + sum(map(len, GOLD[:100])))


def test_known_alignments_of_new_text_are_found(aligner: Aligner):
    assert error_rate(aligner, "intersection") < 0.15
    assert error_rate(aligner, "grow-diag-final-and") < 0.2


def test_directions_and_what_is_made_of_them(aligner: Aligner):
    found = {method: aligner.align(SOURCES[:50], TARGETS[:50], method) for method in METHODS}
    for number, (forward, reverse) in enumerate(zip(found["forward"], found["reverse"], strict=True)):
        assert len({target for _, target in forward}) == len(forward)
        assert len({source for source, _ in reverse}) == len(reverse)
        for method in METHODS:
            assert found[method][number] == symmetrize(forward, reverse, method)


def test_reverse_is_forward_with_the_sides_exchanged(aligner: Aligner):
    other = Aligner.train(TARGETS[100:], SOURCES[100:], directions=["forward"])
    swapped = other.align(TARGETS[:50], SOURCES[:50], "forward")
    ours = aligner.align(SOURCES[:50], TARGETS[:50], "reverse")
    assert ours == [sorted((source, target) for target, source in links) for links in swapped]


def test_what_is_saved_is_what_is_loaded(aligner: Aligner, tmp_path: Path):
    for name in ("one", "two"):
        aligner.save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    loaded = Aligner.load(tmp_path / "one")
    assert loaded.source == aligner.source
    assert loaded.target == aligner.target
    for direction, table in aligner.directions.items():
        again = loaded.directions[direction]
        assert again[2:] == table[2:]
        assert again.keys.tobytes() == table.keys.tobytes()
        assert again.probabilities.tobytes() == table.probabilities.tobytes()
    assert loaded.align(SOURCES, TARGETS) == aligner.align(SOURCES, TARGETS)


def test_words_of_every_kind_are_saved(tmp_path: Path):
    sources = ["a\u3000b c\u2028d", "", "x\ty é 猫 \ud800"]
    aligner = Aligner.train(sources, ["1 2", "3", ""])
    aligner.save(tmp_path / "kept")
    assert list(Aligner.load(tmp_path / "kept").source) == ["a\u3000b", "c\u2028d", "x\ty", "é", "猫", "\ud800"]
    empty = Aligner.train([], [])
    empty.save(tmp_path / "kept")
    assert Aligner.load(tmp_path / "kept").align(["a b"], ["c d"]) == [[(0, 0), (1, 1)]]


def test_a_damaged_or_foreign_file_is_named(aligner: Aligner, tmp_path: Path):
    path = tmp_path / "kept"
    with pytest.raises(DataError, match="kept: cannot be read"):
        Aligner.load(path)
    aligner.save(path)
    whole = path.read_bytes()
    with np.load(path) as packed:
        arrays = dict(packed)
    facts = json.loads(arrays["facts"].tobytes())
    for content in (b"", b"text", whole[: len(whole) // 2], whole[:-40]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="kept: is no saved aligner, or damaged"):
            Aligner.load(path)
    for name, wrong in [
        ("facts", None), ("forward.keys", arrays["forward.keys"][1:]), ("source.sizes", arrays["source.sizes"][1:]),
        ("source.bytes", np.array([object()])),
    ]:  # fmt: skip
        np.savez(tmp_path / "other.npz", **{k: v for k, v in {**arrays, name: wrong}.items() if v is not None})
        with pytest.raises(DataError, match="is no saved aligner, or damaged"):
            Aligner.load(tmp_path / "other.npz")
    facts["format"] = "attnbench aligner 99"
    np.savez(tmp_path / "other.npz", **{**arrays, "facts": np.frombuffer(json.dumps(facts).encode(), np.uint8)})
    with pytest.raises(DataError, match="saved by another version"):
        Aligner.load(tmp_path / "other.npz")


def test_empty_sentences_single_words_repetitions_and_new_words(aligner: Aligner):
    sources = ["", "the dog", "", "dog", "never-seen", "new1 new2 new3", "dog dog dog"]
    targets = ["", "", "x", "y", "z", "n1 n2 n3", "y y y"]
    for method in METHODS:
        found = aligner.align(sources, targets, method)
        assert found[:3] == [[], [], []]
        assert found[4] == [(0, 0)]  # nothing speaks for null
        assert found[5] == [(0, 0), (1, 1), (2, 2)]
        assert len(found) == len(sources)


def test_new_source_words_do_not_borrow_from_known_ones(aligner: Aligner):
    """The unknown word has an id of its own: no pair with it is ever in the table."""
    for table in aligner.directions.values():
        given, generated = np.divmod(table.keys, table.columns)
        words = {len(aligner.source), len(aligner.target)}
        assert generated.max() == table.columns - 2
        assert {int(given.max()), int(generated.max())} <= words


def test_case_is_ignored_where_asked():
    sources, targets = ["The House", "the House a", "A car"], ["Das HAUS", "das haus ein", "EIN Auto"]
    aligner = Aligner.train(sources, targets, lowercase=True)
    assert list(aligner.source) == ["the", "house", "a", "car"]
    lower = Aligner.train([line.lower() for line in sources], [line.lower() for line in targets])
    assert aligner.align(["THE CAR"], ["DAS Auto"]) == lower.align(["the car"], ["das auto"])


def test_only_the_directions_needed(aligner: Aligner, tmp_path: Path):
    assert needed("forward") == ("forward",)
    assert needed("union") == ("forward", "reverse")
    one = Aligner.train(SOURCES[100:], TARGETS[100:], directions=["forward"])
    assert one.align(SOURCES[:9], TARGETS[:9], "forward") == aligner.align(SOURCES[:9], TARGETS[:9], "forward")
    one.save(tmp_path / "kept")
    with pytest.raises(SpecError, match="without the reverse direction, which union needs"):
        Aligner.load(tmp_path / "kept").align(["a"], ["b"], "union")


def test_bad_input_is_named(aligner: Aligner):
    with pytest.raises(ValueError, match="1 source lines cannot be aligned with 2"):
        Aligner.train(["a"], ["b", "c"])
    with pytest.raises(ValueError, match="2 source lines cannot be aligned with 1"):
        aligner.align(["a", "b"], ["c"])
    with pytest.raises(ValueError, match="unknown method 'both'"):
        aligner.align(["a"], ["c"], "both")  # pyright: ignore[reportArgumentType]
