"""A generated two-language corpus with known word alignments; no network, a second to make.

The source reads like English without inflection. The target is an invented language in which hardly a word can be
translated alone:

- nouns have one of three genders; the determiner agrees with its noun in gender and number and shows whether it is
  the subject, the adjective (which follows the noun) agrees in gender and number;
- the verb ends its clause, and agrees in number with its subject and in tense with a time word, first or last in the
  source, always in front in the target; a source without one is in the present;
- some nouns and verbs are two words, the first word of a verb standing after the subject, far from the second;
- `not` is a word before the object and another after the verb;
- some nouns have two senses, and the verb says which;
- a question begins with a word that only the source's last token calls for; a preposition follows its noun;
- the pronoun of a clause with `because` agrees with the subject of the main clause.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from attnbench.data.datasets.base import SPLITS, DatasetSpec, Languages, datasets
from attnbench.data.finder import Finder
from attnbench.data.parts import Part

_NOUNS = (
    *("dog", "cat", "horse", "bird", "fish", "child", "teacher", "farmer", "king", "doctor", "tree", "house", "river"),
    *("garden", "road", "table", "book", "letter", "song", "story", "apple", "bread", "stone", "boat", "field"),
    *("train", "bridge", "window", "tower", "candle"),
)
_SENSES = ("bat", "crane", "seal", "mouse")
_ADJECTIVES = ("old", "young", "big", "small", "red", "green", "quiet", "happy", "heavy", "strange", "cold", "bright")
_VERBS = ("see", "find", "hear", "follow", "paint", "carry", "buy", "lose", "draw", "build", "want", "forget")
_ALONE = ("sleep", "sing", "fall", "wait", "laugh", "return")
_TIMES = {"past": ("yesterday", "once"), "present": ("today", "now"), "future": ("tomorrow", "soon")}
_PREPOSITIONS = ("near", "behind", "under", "with")
_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "kr", "pl", "st", "tr")
_GENDERS = "oau"
_LONGEST = 14


class Word(NamedTuple):
    """A word of the target, and the places in the source that it translates."""

    text: str
    links: tuple[int, ...]


class Noun(NamedTuple):
    """first: a word that goes before the noun proper, or nothing."""

    stem: str
    gender: str
    first: str = ""


class Lexicon:
    """The invented language's words: always the same, whatever the seed of the corpus."""

    def __init__(self) -> None:
        rng = random.Random("attnbench demo lexicon")
        taken: set[str] = set()

        def stem(syllables: int) -> str:
            while True:
                word = "".join(rng.choice(_ONSETS) + rng.choice("aeiou") for _ in range(syllables))
                word += rng.choice("lmnrst")
                if word not in taken:
                    taken.add(word)
                    return word

        def noun(two: bool) -> Noun:
            return Noun(stem(1), rng.choice(_GENDERS), stem(1) if two else "")

        self.nouns = {name: noun(number % 8 == 0) for number, name in enumerate(_NOUNS)}
        self.senses = {name: (noun(False), noun(False)) for name in _SENSES}
        self.adjectives = {name: stem(1) for name in _ADJECTIVES}
        self.verbs = {name: stem(1) for name in (*_VERBS, *_ALONE)}
        self.particles = {name: stem(1) for name in (*_VERBS[::4], _ALONE[0])}
        self.times = {name: stem(1) for names in _TIMES.values() for name in names}
        self.prepositions = {name: stem(1) for name in _PREPOSITIONS}
        self.determiners = {name: stem(1) for name in ("the", "a")}
        self.because = stem(1), stem(1)
        self.question, self.not_before, self.not_after, self.pronoun = (stem(1) for _ in range(4))

    def sense(self, name: str, verb: str) -> Noun:
        """The noun, in the sense that goes with the verb."""
        if name not in self.senses:
            return self.nouns[name]
        return self.senses[name][_VERBS.index(verb) % 2 if verb in _VERBS else 0]


class Sentence:
    """Draws one sentence pair."""

    def __init__(self, lexicon: Lexicon, rng: random.Random) -> None:
        self._lexicon = lexicon
        self._rng = rng
        self.source: list[str] = []
        self.target: list[Word] = []
        self._draw()

    def links(self) -> str:
        """Word alignment in Pharaoh's form: `source-target`, counted from 0."""
        pairs = sorted((i, j) for j, word in enumerate(self.target) for i in word.links)
        return " ".join(f"{i}-{j}" for i, j in pairs)

    def _draw(self) -> None:
        rng, lexicon, source = self._rng, self._lexicon, self.source
        tense = rng.choice(list(_TIMES))
        time = rng.choice(_TIMES[tense]) if tense != "present" or rng.random() < 0.5 else ""
        time_first = rng.random() < 0.4
        transitive = rng.random() < 0.75
        verb = rng.choice(_VERBS if transitive else _ALONE)
        negative = rng.random() < 0.2
        place = rng.random() < 0.3
        because = rng.random() < 0.2 and not place
        question = rng.random() < 0.2
        front: list[Word] = []
        if time and time_first:
            front = [Word(lexicon.times[time], self._say(time))]
        subject, plural, gender = self._phrase(verb, "i", 0.4)
        nots = self._say("not") if negative else ()
        verbs = self._say(verb)
        middle = self._phrase(verb, "e", 0.4)[0] if transitive else []
        if place:
            name = rng.choice(_PREPOSITIONS)
            said = self._say(name)
            middle += [*self._phrase(verb, "e", 0.2)[0], Word(lexicon.prepositions[name], said)]
        if time and not time_first:
            front = [Word(lexicon.times[time], self._say(time))]
        reason: list[Word] = []
        if because:
            reason = self._reason(plural, gender, tense)
        end = self._say("?" if question else ".")
        ending = {"past": "a", "present": "e", "future": "o"}[tense] + ("s" if plural else "")
        self.target = [
            *([Word(lexicon.question, end)] if question else []),
            *front,
            *subject,
            *([Word(lexicon.particles[verb], verbs)] if verb in lexicon.particles else []),
            *([Word(lexicon.not_before, nots)] if negative else []),
            *middle,
            Word(lexicon.verbs[verb] + ending, verbs),
            *([Word(lexicon.not_after, nots)] if negative else []),
            *reason,
            Word(source[-1], end),
        ]

    def _say(self, word: str) -> tuple[int]:
        self.source.append(word)
        return (len(self.source) - 1,)

    def _phrase(self, verb: str, case: str, adjective: float) -> tuple[list[Word], bool, str]:
        """A noun phrase of the source said, and its translation, number and gender."""
        rng, lexicon = self._rng, self._lexicon
        name = rng.choice((*_NOUNS, *_SENSES))
        plural = rng.random() < 0.35
        noun = lexicon.sense(name, verb)
        gender = "i" if plural else noun.gender
        kind = rng.choice(("the", "a"))
        determiner = Word(
            lexicon.determiners[kind] + gender + case, self._say("some" if kind == "a" and plural else kind)
        )
        after = []
        if rng.random() < adjective:
            word = rng.choice(_ADJECTIVES)
            after = [Word(lexicon.adjectives[word] + gender, self._say(word))]
        said = self._say(name + "s" * plural)
        words = [Word(noun.first, said)] if noun.first else []
        return [determiner, *words, Word(noun.stem + "i" * plural, said), *after], plural, gender

    def _reason(self, plural: bool, gender: str, tense: str) -> list[Word]:
        rng, lexicon = self._rng, self._lexicon
        because = self._say("because")
        pronoun = Word(lexicon.pronoun + gender, self._say("they" if plural else "it"))
        verb = rng.choice(_ALONE)
        said = self._say(verb)
        ending = {"past": "a", "present": "e", "future": "o"}[tense] + ("s" if plural else "")
        particle = [Word(lexicon.particles[verb], said)] if verb in lexicon.particles else []
        conjunction = lexicon.because[rng.random() < 0.2]
        return [Word(conjunction, because), pronoun, *particle, Word(lexicon.verbs[verb] + ending, said)]


def sentences(seed: int, counts: dict[str, int]) -> Iterator[tuple[str, Sentence]]:
    """(split, sentence) for the counts asked for. No held-out source occurs twice, nor in train."""
    lexicon = Lexicon()
    held_out: set[str] = set()
    for split in reversed(SPLITS):
        rng = random.Random(f"attnbench demo {seed} {split}")
        made = 0
        while made < counts[split]:
            sentence = Sentence(lexicon, rng)
            text = " ".join(sentence.source)
            if len(sentence.source) > _LONGEST or text in held_out:
                continue
            if split != "train":
                held_out.add(text)
            made += 1
            yield split, sentence


@datasets.register
class DemoSpec(DatasetSpec):
    """A generated corpus with known word alignments: agreement, reordering, one-to-many words, distant information."""

    kind: Literal["demo"] = "demo"
    title: ClassVar = "generated two-language corpus with known word alignments"
    recipe: ClassVar = MappingProxyType(
        {"tokenizer": {"kind": "word", "source_vocab": 128, "target_vocab": 288}, "pretokenize": "none"}
    )
    pairs: int = Field(default=8000, ge=1)
    """Sentence pairs to train on."""
    held_out: int = Field(default=300, ge=1, le=10000)
    """Sentence pairs of each of valid and test."""
    seed: int = 1
    """The sentences drawn; the language is always the same."""

    def pair(self) -> Languages:
        return Languages("en", "xx")

    def moses_words(self) -> bool:
        return False

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        counts = {"train": self.pairs, "valid": self.held_out, "test": self.held_out}
        parts = {split: Part(work / f"{split}.en", work / f"{split}.xx") for split in SPLITS}
        with ExitStack() as stack:
            outs = {
                split: [
                    stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
                    for path in (part.source, part.target, work / f"{split}.align")
                ]
                for split, part in parts.items()
            }
            for split, sentence in sentences(self.seed, counts):
                texts = " ".join(sentence.source), " ".join(word.text for word in sentence.target), sentence.links()
                for out, text in zip(outs[split], texts, strict=True):
                    out.write(text + "\n")
        return {split: [part._replace(alignment=work / f"{split}.align")] for split, part in parts.items()}
