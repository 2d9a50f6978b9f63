"""The aligner: what is learned from parallel text aligns that text or any other, and can be kept in a file."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from attnbench.core.errors import DataError, SpecError
from attnbench.core.files import write_atomic
from attnbench.data.alignment.cells import Text
from attnbench.data.alignment.ibm2 import RECOMMENDED, Ibm2, Ibm2Settings, decode, train
from attnbench.data.alignment.links import Links, words
from attnbench.data.alignment.symmetrize import Method, require_method, symmetrize

Direction = Literal["forward", "reverse"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
_FORMAT = "attnbench aligner 1"


def needed(method: Method) -> tuple[Direction, ...]:
    """The directions that a method takes. Raises ValueError for an unknown one."""
    require_method(method)
    return (method,) if method in ("forward", "reverse") else DIRECTIONS


class Aligner(NamedTuple):
    """Word ids of both sides, from 1 in the order of the training text, and a table of word pairs a direction."""

    source: Mapping[str, int]
    target: Mapping[str, int]
    directions: Mapping[Direction, Ibm2]
    lowercase: bool

    @classmethod
    def train(
        cls,
        sources: Sequence[str],
        targets: Sequence[str],
        settings: Ibm2Settings = RECOMMENDED,
        *,
        directions: Iterable[Direction] = DIRECTIONS,
        lowercase: bool = False,
    ) -> Self:
        """Learn from tokenised lines, words between spaces; see ibm2.

        lowercase: both sides here, and all that is aligned later.
        Raises ValueError for sides of unequal length.
        """
        _require_pairs(sources, targets)
        source, target = _vocabulary(sources, lowercase), _vocabulary(targets, lowercase)
        untrained = cls(source, target, {}, lowercase)
        tables: dict[Direction, Ibm2] = {}
        for direction in directions:
            given, generated = untrained._texts(sources, targets, direction)
            tables[direction] = train(given, generated, untrained._columns(direction), settings)
        return untrained._replace(directions=tables)

    def align(
        self, sources: Sequence[str], targets: Sequence[str], method: Method = "grow-diag-final-and"
    ) -> list[Links]:
        """The links of each pair of tokenised lines, sorted. Word pairs never seen have the probability 1e-9.

        Raises ValueError for sides of unequal length, and SpecError for a direction that was not trained.
        """
        _require_pairs(sources, targets)
        directed: dict[Direction, list[Links]] = {}
        for direction in needed(method):
            if direction not in self.directions:
                raise SpecError(f"this aligner was trained without the {direction} direction, which {method} needs")
            directed[direction] = self._directed(sources, targets, direction)
        if len(directed) == 1:
            return directed[needed(method)[0]]
        both = zip(directed["forward"], directed["reverse"], strict=True)
        return [symmetrize(forward, reverse, method) for forward, reverse in both]

    def save(self, path: Path) -> None:
        """One file, without pickle; an aligner gives the same bytes each time."""
        facts = {"format": _FORMAT, "lowercase": self.lowercase, "directions": {}}
        arrays: dict[str, NDArray] = {}
        for side in ("source", "target"):
            encoded = [word.encode("utf-8", "surrogatepass") for word in getattr(self, side)]
            arrays[f"{side}.bytes"] = np.frombuffer(b"".join(encoded), np.uint8)
            arrays[f"{side}.sizes"] = np.array([len(each) for each in encoded], np.int64)
        for direction, table in self.directions.items():
            arrays[f"{direction}.keys"] = table.keys
            arrays[f"{direction}.probabilities"] = table.probabilities
            facts["directions"][direction] = {"tension": table.tension, "null": table.null}
        arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        packed = io.BytesIO()
        np.savez(packed, **arrays)  # pyright: ignore[reportArgumentType]
        write_atomic(path, packed.getvalue())

    @classmethod
    def load(cls, path: Path) -> Self:
        """What save() wrote. Raises DataError if the file is absent, no saved aligner, or damaged."""
        try:
            with np.load(path, allow_pickle=False) as packed:
                arrays = {name: packed[name] for name in packed.files}
            facts = json.loads(arrays["facts"].tobytes())
            if facts["format"] != _FORMAT:
                raise DataError(f"{path}: saved by another version of attnbench; train and save it again")
            bare = cls(_words(arrays, "source"), _words(arrays, "target"), {}, facts["lowercase"])
            return bare._with(arrays, facts["directions"])
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the path") from None
        except (ValueError, KeyError, TypeError, EOFError, AttributeError, RuntimeError, zipfile.BadZipFile):
            raise DataError(f"{path}: is no saved aligner, or damaged; train and save it again") from None

    def _with(self, arrays: Mapping[str, NDArray], numbers: Mapping[Direction, Any]) -> Self:
        tables: dict[Direction, Ibm2] = {}
        for direction, each in numbers.items():
            keys, chances = arrays[f"{direction}.keys"], arrays[f"{direction}.probabilities"]
            if len(keys) != len(chances):
                raise ValueError("tables of unequal length")
            tables[direction] = Ibm2(keys, chances, self._columns(direction), each["tension"], each["null"])
        return self._replace(directions=tables)

    def _columns(self, direction: Direction) -> int:
        generated = self.target if direction == "forward" else self.source
        return len(generated) + 2  # null and the unknown word

    def _texts(self, sources: Sequence[str], targets: Sequence[str], direction: Direction) -> tuple[Text, Text]:
        """(given, generated): what each word of the second comes from is sought in the first."""
        source = _text(sources, self.source, self.lowercase)
        target = _text(targets, self.target, self.lowercase)
        return (source, target) if direction == "forward" else (target, source)

    def _directed(self, sources: Sequence[str], targets: Sequence[str], direction: Direction) -> list[Links]:
        given, generated = self._texts(sources, targets, direction)
        origins = iter(decode(self.directions[direction], given, generated).tolist())
        alignments: list[Links] = []
        for length in generated.lengths.tolist():
            pairs = [(origin, at) for at, origin in zip(range(length), origins, strict=False) if origin >= 0]
            alignments.append(sorted(pairs) if direction == "forward" else [(at, origin) for origin, at in pairs])
        return alignments


def _require_pairs(sources: Sequence[str], targets: Sequence[str]) -> None:
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} source lines cannot be aligned with {len(targets)} target lines")


def _split(line: str, lowercase: bool) -> list[str]:
    return words(line.lower() if lowercase else line)


def _vocabulary(lines: Sequence[str], lowercase: bool) -> dict[str, int]:
    distinct = dict.fromkeys(chain.from_iterable(_split(line, lowercase) for line in lines))
    return {word: number for number, word in enumerate(distinct, 1)}


def _text(lines: Sequence[str], vocabulary: Mapping[str, int], lowercase: bool) -> Text:
    unknown = len(vocabulary) + 1
    lengths: list[int] = []

    def ids() -> Iterator[int]:
        for line in lines:
            sentence = _split(line, lowercase)
            lengths.append(len(sentence))
            for word in sentence:
                yield vocabulary.get(word, unknown)

    numbers = np.fromiter(ids(), np.int32)
    return Text(numbers, np.array(lengths, np.int64))


def _words(arrays: Mapping[str, NDArray], side: str) -> dict[str, int]:
    content = arrays[f"{side}.bytes"].tobytes()
    ends = np.cumsum(arrays[f"{side}.sizes"]).tolist()
    found = [content[begin:end].decode("utf-8", "surrogatepass") for begin, end in zip([0, *ends], ends, strict=False)]
    if (ends[-1] if ends else 0) != len(content):
        raise ValueError("words are missing")
    return {word: number for number, word in enumerate(found, 1)}
