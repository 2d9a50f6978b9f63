import random

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from attnbench.metrics.bleu import BLEU_KINDS
from attnbench.metrics.coverage import repetitions
from attnbench.metrics.significance import paired_bootstrap, paired_bootstrap_of_shares

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
def test_p_value_is_that_of_sacrebleu(kind, monkeypatch):
    monkeypatch.setenv("SACREBLEU_SEED", "77")
    references, baseline, system = corpus(120, 0.35, 0.32)
    _, results = PairedTest(
        [("baseline", baseline), ("system", system)], {"BLEU": SACREBLEU[kind]}, [references], "bs", n_samples=200
    )()
    theirs = results["BLEU"][1].p_value
    assert 0.01 < theirs < 0.9
    assert paired_bootstrap(system, baseline, references, kind, samples=200, seed=77) == pytest.approx(theirs)


def test_it_depends_on_its_arguments_alone():
    references, baseline, system = corpus(60, 0.3, 0.28)
    first = paired_bootstrap(system, baseline, references, samples=100, seed=1)
    random.seed(5)
    assert paired_bootstrap(system, baseline, references, samples=100, seed=1) == first
    assert paired_bootstrap(baseline, system, references, samples=100, seed=1) == first
    assert paired_bootstrap(system, baseline, references, samples=100, seed=2) != first


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
