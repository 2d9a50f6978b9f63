import random

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU

from attnbench.metrics.bleu import BLEU_KINDS, paired_lines
from attnbench.metrics.rep_drop import repetitions
from attnbench.metrics.significance import bootstrap, paired_bootstrap, paired_bootstrap_of_shares

WORDS = ["a", "b", "c", "d", "e", "Cat", "well-known", ".", "it's"]
SACREBLEU = {
    "13a": BLEU(),
    "13a_lc": BLEU(lowercase=True),
    "tok": BLEU(tokenize="none", smooth_method="none", force=True),
    "tok_lc": BLEU(tokenize="none", smooth_method="none", force=True, lowercase=True),
}


def corpus(lines, *noises, seed=3):
    rng = random.Random(seed)
    references = [" ".join(rng.choices(WORDS, k=rng.randint(3, 20))) for _ in range(lines)]
    sides = [
        [" ".join(word if rng.random() > noise else rng.choice(WORDS) for word in line.split()) for line in references]
        for noise in noises
    ]
    return references, *sides


@pytest.mark.parametrize("kind", BLEU_KINDS)
def test_p_value_is_the_definition_over_scores_of_sacrebleu(kind):
    """Every draw scored by sacrebleu from its lines."""
    lines, samples = 40, 60
    references, baseline, system = corpus(lines, 0.36, 0.33)

    def bleu(side, picks):
        drawn, wanted = ([text[pick] for pick in picks] for text in (side, references))
        return SACREBLEU[kind].corpus_score(drawn, [wanted]).score

    def difference(picks):
        return bleu(system, picks) - bleu(baseline, picks)

    seen = difference(range(lines))
    drawn = [difference(draw) for draw in np.random.default_rng(77).choice(lines, (samples, lines))]
    mean = sum(drawn) / samples
    beyond = sum(abs(each - mean) > abs(seen) for each in drawn)
    assert 3 < beyond < 57
    assert paired_bootstrap(system, baseline, references, kind, samples, 77) == (beyond + 1) / (samples + 1)


def test_equal_systems_are_found_different_as_often_as_the_level_says():
    """In 5% of pairs, or little more with 100 lines; sacrebleu's rule finds 13% of these."""
    rng = np.random.default_rng(0)
    trials, lines, found = 300, 100, 0
    for trial in range(trials):
        words = rng.integers(8, 20, lines)
        ours, theirs = (np.stack([rng.poisson(1.0, lines), words], 1) for _ in range(2))
        found += paired_bootstrap_of_shares(ours, theirs, samples=150, seed=trial) < 0.05
    assert 0.02 * trials < found < 0.09 * trials


def test_it_depends_on_its_arguments_alone():
    references, baseline, system = corpus(60, 0.3, 0.28)
    first = paired_bootstrap(system, baseline, references, samples=100, seed=1)
    random.seed(5)
    assert paired_bootstrap(system, baseline, references, samples=100, seed=1) == first
    assert paired_bootstrap(baseline, system, references, samples=100, seed=1) == first
    assert paired_bootstrap(system, baseline, references, samples=100, seed=2) != first


def test_what_lies_as_far_lies_no_further():
    """Of two lines of which one differs, by one: two draws lie one from their mean, as is seen, or less."""
    better, worse = np.array([[1], [0]]), np.zeros((2, 1), np.int64)
    for seed in range(40):
        assert bootstrap(better, worse, lambda sums: float(sums[0]), 2, seed) == pytest.approx(1 / 3)


def test_equal_systems_do_not_differ_and_a_better_one_does():
    references, poor = corpus(80, 0.5)
    assert paired_bootstrap(poor, poor, references, samples=99) == 1.0
    assert paired_bootstrap(references, poor, references, samples=99) == pytest.approx(1 / 100)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="2 hypotheses cannot be scored against 1"):
        paired_bootstrap(["a"], ["a", "b"], ["a"])
    with pytest.raises(ValueError, match="at least one sample"):
        paired_bootstrap(["a"], ["a"], ["a"], samples=0)


def test_a_sentence_is_drawn_with_the_outputs_of_every_seed():
    """The same outputs three times over are no more evidence than once."""
    rng = random.Random(3)
    references = [" ".join(rng.choices("abcdefgh", k=8)) for _ in range(60)]
    ours = [line.replace("a", "b", 1) if rng.random() < 0.4 else line for line in references]
    theirs = [line.replace("c", "d", 1) if rng.random() < 0.5 else line for line in references]
    once = paired_bootstrap(ours, theirs, references, "tok")
    assert paired_bootstrap(ours * 3, theirs * 3, references * 3, "tok", blocks=3) == pytest.approx(once, abs=0.01)
    assert paired_bootstrap(ours * 3, theirs * 3, references * 3, "tok") < once
    with pytest.raises(ValueError, match="7 equal blocks"):
        paired_bootstrap(ours, theirs, references, "tok", blocks=7)


def test_shares_are_tested_like_bleu():
    """Three repetitions more in half of the sentences are no chance; a few in one may be."""
    references = [f"a b c d e f g h {i}" for i in range(40)]
    often = [f"{line} a b a b" if i % 2 else line for i, line in enumerate(references)]
    once = [f"{line} a b a b" if i == 7 else line for i, line in enumerate(references)]
    clean, much, little = (repetitions(side, references) for side in (references, often, once))
    assert paired_bootstrap_of_shares(clean, much) < 0.01
    assert paired_bootstrap_of_shares(clean, little) > 0.2
    assert paired_bootstrap_of_shares(much, much) == 1.0
    assert paired_bootstrap_of_shares(much, clean, samples=200) == paired_bootstrap_of_shares(clean, much, samples=200)
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_bootstrap_of_shares(clean, much[:-1])


def test_of_several_seeds_the_mean_of_their_scores_is_tested():
    """Every draw scored by sacrebleu, seed by seed; the outputs of a bad seed weigh as the table weighs them."""
    references, *sides = corpus(30, 0.1, 0.4, 0.2, 0.27)
    ours, theirs = sides[:2], sides[2:]

    def mean_bleu(outputs, picks):
        wanted = [references[pick] for pick in picks]
        return np.mean([SACREBLEU["tok"].corpus_score([side[pick] for pick in picks], [wanted]).score
                        for side in outputs])  # fmt: skip

    def difference(picks):
        return mean_bleu(ours, picks) - mean_bleu(theirs, picks)

    seen, samples = difference(range(30)), 60
    drawn = [difference(draw) for draw in np.random.default_rng(5).choice(30, (samples, 30))]
    beyond = sum(abs(each - np.mean(drawn)) > abs(seen) for each in drawn)
    found = paired_bootstrap(
        ours[0] + ours[1], theirs[0] + theirs[1], references * 2, "tok", samples=samples, seed=5, blocks=2
    )
    assert 3 < beyond < 57
    assert found == (beyond + 1) / (samples + 1)


def test_compounds_are_split_on_all_three_sides():
    references, baseline, system = corpus(60, 0.3, 0.27)
    texts = [[line.replace(" ", "-", 2) for line in side] for side in (system, baseline, references)]
    ours, refs = paired_lines(texts[0], texts[2], compound_split=True)
    theirs, _ = paired_lines(texts[1], texts[2], compound_split=True)
    wanted = paired_bootstrap(ours, theirs, refs, "tok", samples=200)
    assert paired_bootstrap(*texts, "tok", samples=200, compound_split=True) == wanted
    half = paired_bootstrap(ours, texts[1], refs, "tok", samples=200)
    assert half != wanted
