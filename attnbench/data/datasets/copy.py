"""Generated sequences to be copied: the toy task of the fixed-size memory paper (Britz, Guan and Luong 2017)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from attnbench.data.datasets.base import SPLITS, DatasetSpec, Languages, datasets
from attnbench.data.finder import Finder
from attnbench.data.parts import Part
from attnbench.data.special import SPECIALS

_APART, _LEAST = 4, 100
"""Splits share no sequence of a length that has this many times the sequences expected to be held out, and this many:
a draw among those that are left then never takes long."""


def sequences(spec: CopySpec) -> Iterator[tuple[str, str]]:
    """(split, sequence): test, valid, train. Held-out sequences do not depend on how many are trained on."""
    words = [str(number) for number in range(spec.symbols)]
    held_out: set[str] = set()
    for split in reversed(SPLITS):
        rng = random.Random(f"attnbench copy {spec.seed} {split}")
        for _ in range(spec.pairs if split == "train" else spec.held_out):
            length = rng.randint(spec.shortest, spec.longest)
            text = " ".join(rng.choices(words, k=length))
            while text in held_out:  # only of a length where the splits are kept apart
                text = " ".join(rng.choices(words, k=length))
            if split != "train" and spec.apart(length):
                held_out.add(text)
            yield split, text


@datasets.register
class CopySpec(DatasetSpec):
    """Random sequences, source and target the same; lengths uniform, each symbol uniform.

    A sequence may be empty: its source and its target are then EOS alone, and it is kept. No sequence of valid or test
    occurs twice or is trained on, wherever a length has sequences enough: at 20 symbols and lengths 0 to 10 from length
    3 on (8,000 sequences). Shorter ones are drawn freely, so that most of them are trained on too: the one empty
    sequence, the 20 of length 1 and the 400 of length 2 are 3 in 11 of each held-out split.
    """

    kind: Literal["copy"] = "copy"
    title: ClassVar = "generated sequences to be copied"
    repeats: ClassVar = True
    symbols: int = Field(default=20, ge=1)
    """Different symbols; the vocabulary has a row for each, and the 4 special ones."""
    shortest: int = Field(default=0, ge=0)
    """Symbols of the shortest sequence; EOS is not counted."""
    longest: int = Field(default=10, ge=1)
    """Symbols of the longest sequence."""
    pairs: int = Field(default=100_000, ge=1)
    """Sequences to train on."""
    held_out: int = Field(default=1000, ge=1)
    """Sequences of each of valid and test."""
    seed: int = 1
    """The sequences drawn."""

    @model_validator(mode="after")
    def _some_length(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest {self.shortest} is more than longest {self.longest}")
        return self

    def pair(self) -> Languages:
        return Languages("xx", "xx")

    def usual(self) -> Mapping[str, Any]:
        rows = self.symbols + len(SPECIALS)
        tokenizer = {"kind": "word", "source_vocab": rows, "target_vocab": rows, "joint": True}
        return {"tokenizer": tokenizer, "pretokenize": "none", "empty": "keep"}

    def longest_words(self) -> int:
        return self.longest

    def moses_words(self) -> bool:
        return False

    def apart(self, length: int) -> bool:
        """Whether no sequence of this length stands in two splits."""
        expected = 2 * self.held_out / (self.longest - self.shortest + 1)
        return self.symbols**length >= max(_LEAST, _APART * expected)

    def sources(self, files: Finder, work: Path) -> dict[str, list[Part]]:
        paths = {split: work / f"{split}.txt" for split in SPLITS}
        with ExitStack() as stack:
            outs = {
                split: stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
                for split, path in paths.items()
            }
            for split, text in sequences(self):
                outs[split].write(text + "\n")
        return {split: [Part(path, path)] for split, path in paths.items()}
