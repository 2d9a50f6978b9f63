import math
from collections import Counter

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from attnbench.metrics.bleu import BLEU_KINDS, corpus_bleu, corpus_chrf, kind_of, split_compounds

HYPOTHESES = ["The cat sat on a mat, didn't it?", "A well-known dog barked loudly at night."]
REFERENCES = ["The cat sat on the mat, didn't it?", "a Well-known dog barked at night."]


def multi_bleu(hypotheses, references, lowercase):
    """The formula of multi-bleu.perl: clipped n-gram precisions to order 4, brevity penalty, no smoothing."""
    matched, total, lengths = [0] * 4, [0] * 4, [0, 0]
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        sides = [(line.lower() if lowercase else line).split() for line in (hypothesis, reference)]
        lengths = [length + len(side) for length, side in zip(lengths, sides, strict=True)]
        for n in range(4):
            ours, right = (Counter(tuple(side[i : i + n + 1]) for i in range(len(side) - n)) for side in sides)
            matched[n] += (ours & right).total()
            total[n] += ours.total()
    if not all(matched):
        return 0.0
    brevity = min(1.0, math.exp(1 - lengths[1] / lengths[0]))
    return 100 * brevity * math.exp(sum(math.log(m / t) for m, t in zip(matched, total, strict=True)) / 4)


word = st.sampled_from(["a", "b", "A", "Kuh", "kuh", ".", "e-mail", "&apos;s", "@-@"])
line = st.lists(word, max_size=9).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(line, line), min_size=1, max_size=6), st.booleans())
def test_tokenised_kinds_are_multi_bleu(pairs, lowercase):
    hypotheses, references = map(list, zip(*pairs, strict=True))
    score = corpus_bleu(hypotheses, references, "tok_lc" if lowercase else "tok")
    assert score.value == pytest.approx(multi_bleu(hypotheses, references, lowercase), abs=1e-9)


def test_tokenised_kind_is_not_smoothed():
    assert corpus_bleu(["a b c x"], ["a b c d"], "tok").value == 0.0  # no 4-gram is right
    assert corpus_bleu(["a b c x"], ["a b c d"], "13a").value > 0.0


@pytest.mark.parametrize(("kind", "lowercase"), [("13a", False), ("13a_lc", True)])
def test_13a_kinds_are_the_defaults_of_sacrebleu(kind, lowercase):
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], lowercase=lowercase)
    assert corpus_bleu(HYPOTHESES, REFERENCES, kind).value == pytest.approx(expected.score)


def test_a_signature_names_its_kind():
    for kind in BLEU_KINDS:
        for compound_split in (False, True):
            score = corpus_bleu(HYPOTHESES, REFERENCES, kind, compound_split=compound_split)
            assert kind_of(score.signature) == kind
    assert kind_of(corpus_chrf(HYPOTHESES, REFERENCES).signature) is None
    assert kind_of("") is None


def test_the_four_kinds_differ_and_their_signatures_say_how():
    scores = [corpus_bleu(HYPOTHESES, REFERENCES, kind) for kind in BLEU_KINDS]
    assert len({round(score.value, 6) for score in scores}) == 4
    facts = [dict(part.split(":") for part in score.signature.split("|")) for score in scores]
    assert [(fact["tok"], fact["case"], fact["smooth"]) for fact in facts] == [
        ("13a", "mixed", "exp"),
        ("13a", "lc", "exp"),
        ("none", "mixed", "none"),
        ("none", "lc", "none"),
    ]
    assert all(fact["version"] == sacrebleu.__version__ for fact in facts)


def test_text_that_ends_in_tokenised_periods_brings_no_warning(caplog):
    corpus_bleu(["a b c d ."] * 150, ["a b c d ."] * 150, "13a")
    assert not caplog.records


def test_a_hyphen_that_moses_split_is_a_compounds():
    assert split_compounds("a well @-@ known x") == split_compounds("a well-known x")
    lines, references = ["a well @-@ known man"], ["a well-known man"]
    assert corpus_bleu(lines, references, "tok", compound_split=True).value == pytest.approx(100)


def test_compound_split():
    assert split_compounds("a well-known two-year-old - x -y") == (
        "a well ##AT##-##AT## known two ##AT##-##AT## year ##AT##-##AT## old - x -y"
    )
    assert split_compounds("a-b-c") == "a ##AT##-##AT## b-c"  # the b is taken once, as by the published script
    hypotheses, references = ["he is well known for it now"], ["he is well-known for it now"]
    plain = corpus_bleu(hypotheses, references, "tok")
    split = corpus_bleu(hypotheses, references, "tok", compound_split=True)
    both = [[split_compounds(text) for text in side] for side in (hypotheses, references)]
    assert split.value == pytest.approx(corpus_bleu(*both, "tok").value)
    assert split.value != pytest.approx(plain.value)
    assert split.signature == plain.signature + "|split:compounds"


def test_chrf_is_that_of_sacrebleu():
    score = corpus_chrf(HYPOTHESES, REFERENCES)
    assert score.value == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    assert "nc:6" in score.signature


@pytest.mark.parametrize("kind", BLEU_KINDS)
def test_nothing_is_better_than_perfect(kind):
    """By rounding, sacrebleu's own score of it is 100.00000000000004."""
    assert corpus_bleu(REFERENCES, REFERENCES, kind).value == 100.0


def test_order_of_lines_does_not_matter():
    backwards = corpus_bleu(HYPOTHESES[::-1], REFERENCES[::-1], "13a")
    assert backwards.value == pytest.approx(corpus_bleu(HYPOTHESES, REFERENCES, "13a").value)


def test_chrf_of_lower_case_says_so():
    score = corpus_chrf(["A small Cat"], ["a small CAT"], lowercase=True)
    assert score.value == pytest.approx(100)
    assert "case:lc" in score.signature
    assert corpus_chrf(["A small Cat"], ["a small CAT"]).value < 100


@pytest.mark.parametrize("score", [corpus_bleu, corpus_chrf])
def test_bad_input_is_named(score):
    with pytest.raises(ValueError, match="1 hypotheses cannot be scored against 2 references"):
        score(["a"], ["a", "b"])
    with pytest.raises(ValueError, match="no lines"):
        score([], [])
    assert score([""], ["a b"]).value == 0.0


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match=r"unknown BLEU 'intl'.*13a"):
        corpus_bleu(["a"], ["a"], "intl")


def test_more_references_are_sacrebleus():
    second = ["The cat sat on a mat.", "A well-known dog barked."]
    for kind in BLEU_KINDS:
        found = corpus_bleu(HYPOTHESES, REFERENCES, kind, more=[second])
        assert found.value >= corpus_bleu(HYPOTHESES, REFERENCES, kind).value
        assert "nrefs:2" in found.signature
    wanted = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES, second])
    assert corpus_bleu(HYPOTHESES, REFERENCES, more=[second]).value == pytest.approx(wanted.score)
    chrf = sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES, second])
    assert corpus_chrf(HYPOTHESES, REFERENCES, more=[second]).value == pytest.approx(chrf.score)
    with pytest.raises(ValueError, match="1 references"):
        corpus_bleu(HYPOTHESES, REFERENCES, more=[second[:1]])
