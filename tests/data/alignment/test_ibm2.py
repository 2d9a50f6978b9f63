from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import digamma

from attnbench.data.alignment.cells import PairCells, Text
from attnbench.data.alignment.ibm2 import UNKNOWN, Ibm2, Ibm2Settings, decode, train

Pairs = list[tuple[list[int], list[int]]]
COLUMNS = 7
NULL = 0.08

PAIRS = [
    ("the house is small .", "das Haus ist klein ."),
    ("the small house .", "das kleine Haus ."),
    ("a house", "ein Haus"),
    ("the book is small and old .", "das Buch ist klein und alt ."),
    ("a book .", "ein Buch ."),
    ("old books are not read by anyone any more .", "alte Bücher liest niemand mehr ."),
    ("yes", "ja , das stimmt"),
    ("the old house is not a small house .", "das alte Haus ist kein kleines Haus ."),
    ("read the book !", "lies das Buch !"),
    ("is the house old ?", "ist das Haus alt ?"),
]


def texts(pairs: Pairs) -> tuple[Text, Text]:
    return text([source for source, _ in pairs]), text([target for _, target in pairs])


def text(sentences: list[list[int]]) -> Text:
    ids = np.array([word for sentence in sentences for word in sentence], np.int32)
    return Text(ids, np.array([len(sentence) for sentence in sentences], np.int64))


def prior(n: int, m: int, j: int, tension: float) -> list[float]:
    """Of null and of each source word, for target word j from 1."""
    weights = [math.exp(-tension * abs(i / n - j / m)) for i in range(1, n + 1)]
    return [NULL, *((1 - NULL) * weight / sum(weights) for weight in weights)]


def slow_expected(pairs: Pairs, tension: float) -> float:
    """The distance that fast_align expects: the sum it divides by has n and m exchanged, and no end where j > n."""
    total, words = 0.0, 0
    for source, target in pairs:
        n, m = len(source), len(target)
        for j in range(1, m + 1) if n else ():
            apart = [abs(i / n - j / m) for i in range(1, n + 1)]
            last = m if j <= n else 400 * m
            divisor = sum(math.exp(-tension * abs(i / m - j / n)) for i in range(1, last + 1))
            total += sum(math.exp(-tension * each) * each for each in apart) / divisor
            words += 1
    return total / words


def slow_train(pairs: Pairs, known: Ibm2Settings) -> tuple[dict[tuple[int, int], float], float]:
    """EM with dictionaries and loops, straight from the formulas."""
    table: dict[tuple[int, int], float] = {}
    tension = known.tension
    for iteration in range(known.iterations - 1):
        counts: dict[tuple[int, int], float] = defaultdict(float)
        distance, words = 0.0, 0
        for source, target in pairs:
            n, m = len(source), len(target)
            for j, word in enumerate(target, 1) if n else ():
                chances = prior(n, m, j, tension)
                joint = [p * table.get((s, word), UNKNOWN) for p, s in zip(chances, [0, *source], strict=True)]
                for i, s in enumerate([0, *source]):
                    counts[s, word] += joint[i] / sum(joint)
                    distance += joint[i] / sum(joint) * abs(i / n - (j - 1) / m) if i else 0.0
                words += 1
        if known.optimize_tension and iteration and words:
            for _ in range(8):
                tension += 20 * (slow_expected(pairs, tension) - distance / words)
                tension = min(max(tension, 0.1), 14.0)
        added = 0.01 if known.variational_bayes else 0.0
        sums: dict[int, float] = defaultdict(float)
        for (s, _), count in counts.items():
            sums[s] += count + added
        if known.variational_bayes:
            table = {(s, w): math.exp(digamma(c + added) - digamma(sums[s])) for (s, w), c in counts.items()}
        else:
            table = {(s, w): c / sums[s] for (s, w), c in counts.items()}
    return table, tension


def as_table(model: Ibm2) -> dict[tuple[int, int], float]:
    keys = [divmod(key, model.columns) for key in model.keys.tolist()]
    return dict(zip(keys, model.probabilities.tolist(), strict=True))


sentence = st.lists(st.integers(1, COLUMNS - 1), max_size=6)
corpora = st.lists(st.tuples(sentence, sentence), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(corpora, st.booleans(), st.booleans(), st.integers(1, 5), st.sampled_from([0.5, 4.0]))
def test_training_is_that_of_the_formulas(pairs, optimize, bayes, iterations, tension):
    known = Ibm2Settings(iterations, tension, NULL, optimize, bayes)
    for each in (pairs, [(target, source) for source, target in pairs]):
        expected, climbed = slow_train(each, known)
        model = train(*texts(each), COLUMNS, known)
        assert model.tension == pytest.approx(climbed, rel=1e-9)
        if iterations > 1:
            assert as_table(model) == pytest.approx(expected, rel=1e-9, abs=1e-300)


@settings(max_examples=60, deadline=None)
@given(corpora, corpora, st.booleans())
def test_decoding_takes_the_most_likely_word_of_known_and_new_text(pairs, other, bayes):
    model = train(*texts(pairs), COLUMNS, Ibm2Settings(variational_bayes=bayes))
    table = as_table(model)
    for known in (pairs, other):
        found = iter(decode(model, *texts(known)).tolist())
        for source, target in known:
            for j, word in enumerate(target, 1):
                origin = next(found)
                if not source:
                    assert origin == -1
                    continue
                chances = prior(len(source), len(target), j, model.tension)
                joint = [p * table.get((s, word), UNKNOWN) for p, s in zip(chances, [0, *source], strict=True)]
                assert joint[origin + 1] >= max(joint) * (1 - 1e-12)
                assert origin == -1 or max(joint[: origin + 1]) < joint[origin + 1]


def test_null_wins_ties_then_the_first_source_word():
    source, target = texts([([1, 1, 1], [2, 2, 2])])
    model = Ibm2(np.array([1 * COLUMNS + 2]), np.array([0.5]), COLUMNS, 0.0, NULL)
    assert decode(model, source, target).tolist() == [0, 0, 0]
    for count in range(2, 60):  # the word before the middle is as near as the word after it
        middle = texts([([1] * 2 * count, [2, 2])])
        near = decode(model._replace(tension=3.0), *middle)
        assert near.tolist() == [count - 1, 2 * count - 1]
    even = model._replace(null=0.5, keys=np.array([2, COLUMNS + 2]), probabilities=np.array([0.25, 0.25]))
    assert decode(even, *texts([([1], [2])])).tolist() == [-1]


@pytest.mark.parametrize(("bayes", "forward", "reverse"), [
    (True, [1.75564, 1.72509, 1.71676], [3.81441, 4.31556, 6.35264]),
    (False, [1.58259, 1.63641, 1.72077], [2.82757, 3.28552, 3.75708]),
])  # fmt: skip
def test_tensions_are_those_of_fast_align(bayes: bool, forward: list[float], reverse: list[float]):
    """`final tension` in the log of systran-align 3.5.0, a fast_align, on one thread: -d -o, with and without -v."""
    numbers: dict[str, int] = defaultdict(lambda: len(numbers) + 1)
    sides = [text([[numbers[word] for word in pair[side].split()] for pair in PAIRS]) for side in (0, 1)]
    for (origin, made), expected in ((sides, forward), (sides[::-1], reverse)):
        found = [
            train(origin, made, len(numbers) + 1, Ibm2Settings(iterations, variational_bayes=bayes)).tension
            for iterations in (3, 4, 5)
        ]
        assert found == pytest.approx(expected, rel=4e-6)


@settings(max_examples=30, deadline=None)
@given(corpora, st.integers(1, 30), st.sampled_from([0, 1 << 20]))
def test_blocks_and_what_is_remembered_change_nothing(pairs, block, kept):
    whole = train(*texts(pairs), COLUMNS)
    parts = train(*texts(pairs), COLUMNS, block=block, kept=kept)
    assert parts.keys.tolist() == whole.keys.tolist()
    assert parts.tension == pytest.approx(whole.tension, rel=1e-9)
    np.testing.assert_allclose(parts.probabilities, whole.probabilities, rtol=1e-9)
    assert decode(whole, *texts(pairs), block=block).tolist() == decode(whole, *texts(pairs)).tolist()


def test_blocks_are_bounded_and_rows_whole():
    pairs: Pairs = [([1] * n, [1] * m) for n, m in ((3, 4), (0, 9), (5, 0), (9, 2), (1, 1), (2, 30))]
    cells = PairCells(*texts(pairs), COLUMNS, block=20)
    blocks = list(cells.blocks())
    assert cells.rows == sum(m for n, m in ((3, 4), (9, 2), (1, 1), (2, 30)))
    assert sum(block.cells for block in blocks) == cells.total == 16 + 20 + 2 + 90
    assert max(block.cells for block in blocks) < 20 + 10
    assert [row for block in blocks for row in range(block.rows.start, block.rows.stop)] == list(range(cells.rows))


def test_training_is_a_function_of_its_arguments():
    rng = np.random.default_rng(0)
    source, target = (Text(rng.integers(1, 50, 600).astype(np.int32), np.full(60, 10)) for _ in range(2))
    first, second = (train(source, target, 50) for _ in range(2))
    assert first.tension == second.tension
    assert first.probabilities.tobytes() == second.probabilities.tobytes()


def test_nothing_to_learn_from():
    for pairs in ([], [([], [])], [([1], []), ([], [1, 2])]):
        model = train(*texts(pairs), COLUMNS)
        assert (len(model.keys), model.tension) == (0, 4.0)
        assert decode(model, *texts(pairs)).tolist() == [-1] * sum(len(target) for _, target in pairs)
    assert decode(model, *texts([([1, 2], [3, 4])])).tolist() == [0, 1]  # nothing is known: the diagonal


@pytest.mark.parametrize(
    "wrong", [{"iterations": 0}, {"null": 0.0}, {"null": 1.0}, {"tension": -1.0}, {"tension": math.nan}]
)
def test_bad_settings_are_named(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        Ibm2Settings(**wrong)
