from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from attnbench.data.corpus import Data
from attnbench.data.datasets.base import SPLITS
from attnbench.data.datasets.demo import Sentence, sentences
from attnbench.data.prepare import prepare
from attnbench.data.recipe import Recipe

ADJECTIVES = {"old", "young", "big", "small", "red", "green", "quiet", "happy", "heavy", "strange", "cold", "bright"}
VERBS = {"see", "find", "hear", "follow", "paint", "carry", "buy", "lose", "draw", "build", "want", "forget"}
TENSES = {"a": {"yesterday", "once"}, "e": {"today", "now"}, "o": {"tomorrow", "soon"}}
COUNTS = {"train": 3000, "valid": 200, "test": 200}


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[Sentence]]:
    found: dict[str, list[Sentence]] = {split: [] for split in SPLITS}
    for split, sentence in sentences(1, COUNTS):
        found[split].append(sentence)
    return found


def source(sentence: Sentence) -> str:
    return " ".join(sentence.source)


def target(sentence: Sentence) -> list[str]:
    return [word.text for word in sentence.target]


def test_as_many_as_asked_and_short(drawn: dict[str, list[Sentence]]) -> None:
    assert {split: len(found) for split, found in drawn.items()} == COUNTS
    lengths = [len(sentence.source) for found in drawn.values() for sentence in found]
    assert min(lengths) >= 4
    assert max(lengths) <= 14


def test_no_held_out_sentence_is_seen_in_training_or_twice(drawn: dict[str, list[Sentence]]) -> None:
    held_out = [source(sentence) for split in ("valid", "test") for sentence in drawn[split]]
    assert len(set(held_out)) == len(held_out)
    assert not set(held_out) & {source(sentence) for sentence in drawn["train"]}


def test_the_seed_draws_the_sentences_and_the_counts_change_none(drawn: dict[str, list[Sentence]]) -> None:
    fewer = [source(sentence) for split, sentence in sentences(1, COUNTS | {"train": 50}) if split == "train"]
    assert fewer == [source(sentence) for sentence in drawn["train"][:50]]
    other = {source(sentence) for split, sentence in sentences(2, COUNTS | {"train": 50}) if split == "train"}
    assert len(other & set(fewer)) < 5


def test_every_word_of_both_sides_is_aligned(drawn: dict[str, list[Sentence]]) -> None:
    for sentence in drawn["test"]:
        links = [tuple(map(int, link.split("-"))) for link in sentence.links().split()]
        assert links == sorted(set(links))
        assert {i for i, _ in links} == set(range(len(sentence.source)))
        assert {j for _, j in links} == set(range(len(sentence.target)))


def translated(sentence: Sentence, place: int) -> list[str]:
    """The target words of a source word."""
    return [word.text for word in sentence.target if place in word.links]


def test_agreement(drawn: dict[str, list[Sentence]]) -> None:
    """Determiner and adjective share the gender of their noun; verbs show number and tense."""
    phrases = verbs = 0
    for sentence in drawn["train"]:
        words = sentence.source
        for place, word in enumerate(words[:-2]):
            if word in ("the", "a", "some") and words[place + 1] in ADJECTIVES:
                (determiner,), (adjective,) = translated(sentence, place), translated(sentence, place + 1)
                noun = translated(sentence, place + 2)[-1]
                assert determiner[-2] == adjective[-1]
                assert (adjective[-1] == "i") == noun.endswith("i")
                phrases += 1
        subject = next(place for place, word in enumerate(words) if word in ("the", "a", "some"))
        assert translated(sentence, subject)[0][-1] == "i"
        noun = subject + 1 + (words[subject + 1] in ADJECTIVES)
        verb = translated(sentence, noun + 1 + (words[noun + 1] == "not"))[-1]
        assert verb.endswith("s") == words[noun].endswith("s")
        tense = next((ending for ending, times in TENSES.items() if times & set(words)), "e")
        assert verb.removesuffix("s")[-1] == tense
        verbs += 1
    assert min(phrases, verbs) > 1000


def test_the_language_stays_as_it_is() -> None:
    pinned = {
        "the cold dog build the cat under the gardens tomorrow .": (
            "stim virui mas bret meru virae rin virie stami tril buro .",
            "0-1 1-4 2-2 2-3 3-10 4-5 5-6 6-9 7-7 8-8 9-0 10-11",
        ),
        "the river not want the songs under the field now .": (
            "trul virai pan kran virie tomi viroe fom kril tril lete trel .",
            "0-1 1-2 2-3 2-11 3-10 4-4 5-5 6-9 7-6 8-7 8-8 9-0 10-12",
        ),
    }
    found = {source(sentence): sentence for split, sentence in sentences(1, COUNTS | {"train": 1}) if split == "test"}
    for text, (words, links) in pinned.items():
        assert " ".join(target(found[text])) == words
        assert found[text].links() == links


def test_some_words_hang_on_words_far_away(drawn: dict[str, list[Sentence]]) -> None:
    """A question's first word comes from the last of the source; a noun's sense depends on the verb."""
    for sentence in drawn["train"]:
        question = sentence.source[-1] == "?"
        assert (sentence.target[0].links == (len(sentence.source) - 1,)) == question
    senses = defaultdict(set)
    for sentence in drawn["train"]:
        for place, word in enumerate(sentence.source):
            if word == "bat":
                senses[translated(sentence, place)[-1]] |= set(sentence.source) & VERBS
    first, second = senses.values()
    assert not first & second


def test_words_cross(drawn: dict[str, list[Sentence]]) -> None:
    crossing = 0
    for sentence in drawn["train"]:
        places = [word.links[0] for word in sentence.target]
        crossing += places != sorted(places)
    assert crossing / COUNTS["train"] > 0.7


def test_hardly_a_word_can_be_translated_alone(drawn: dict[str, list[Sentence]]) -> None:
    """The best translation of each source word, alone, is right for far from all of its occurrences."""
    choices = defaultdict(Counter)
    for sentence in drawn["train"]:
        for place, word in enumerate(sentence.source):
            own = tuple(item.text for item in sentence.target if place in item.links)
            choices[word][own] += 1
    right = sum(counts.most_common(1)[0][1] for counts in choices.values())
    assert right / sum(sum(counts.values()) for counts in choices.values()) < 0.7
    assert max(len(own) for counts in choices.values() for own in counts) >= 2  # one to many


def test_the_source_says_nearly_all(drawn: dict[str, list[Sentence]]) -> None:
    """Equal sources have equal targets but for the one free choice, so that a high BLEU can be reached."""
    seen = defaultdict(set)
    for _, sentence in sentences(3, {"train": 12_000, "valid": 1, "test": 1}):
        seen[source(sentence)].add(" ".join(target(sentence)))
    assert any(len(targets) == 1 for targets in seen.values())
    assert all(len(targets) == 1 or "because" in text for text, targets in seen.items())


def test_prepared_alignments_belong_to_the_prepared_lines(tmp_path: Path) -> None:
    raw = {"dataset": {"kind": "demo", "pairs": 300, "held_out": 20}, "max_length": 8}
    data = Data.open(prepare(Recipe.model_validate(raw), cache=tmp_path))
    train = data.split("train")
    assert train.alignments is not None
    assert 0 < len(train) == len(train.alignments) < 300
    for i in range(len(train)):
        links = [tuple(map(int, link.split("-"))) for link in train.alignments[i].split()]
        assert max(a for a, _ in links) == train.source[i].count(" ")
        assert max(b for _, b in links) == train.target[i].count(" ")


def test_the_usual_vocabularies_hold_all_words(tmp_path: Path) -> None:
    data = Data.open(prepare(Recipe.model_validate({"dataset": "demo"}), cache=tmp_path))
    assert [data.manifest["splits"]["test"][f"{side}_unk"] for side in ("source", "target")] == [0, 0]
    for side in ("source", "target"):
        entry = data.manifest["vocabulary"][side]
        assert entry["filled"] <= entry["rows"]
