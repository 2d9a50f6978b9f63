"""The interface of a vocabulary, and of the spec that learns one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

from attnbench.core.registry import Family, Registry, unwritten
from attnbench.core.spec import Spec
from attnbench.data.special import SPECIALS


class VocabularySizes(NamedTuple):
    """Rows of the two embeddings, special tokens included; joint: both sides share one vocabulary."""

    source: int
    target: int
    joint: bool


class Vocabulary(Protocol):
    """Words of tokenised text (separated by spaces) to ids and back. Ids 0..3 are the specials."""

    rows: int
    """Size of the embedding: what the spec asked for, rows that the corpus did not fill included."""
    filled: int
    """Rows in use."""

    def encode(self, text: str) -> list[int]:
        """Ids of one line, without BOS and EOS; what is unknown becomes UNK. Never PAD, BOS or EOS."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Tokenised text with subwords merged. PAD, BOS and EOS are left out; UNK and unused rows give <unk>."""
        ...

    def token(self, index: int) -> str:
        """The text of one row, as maps and tables show it."""
        ...

    def save(self, path: Path) -> None: ...


class TokenizerSpec(Spec):
    """The fields of one kind of vocabulary in YAML."""

    kind: str

    def sizes(self) -> VocabularySizes:
        """Exact, so that a model can be sized before any data is seen."""
        raise unwritten(self, "sizes")

    def learn(self, texts: Callable[[], Iterable[str]], rows: int) -> Vocabulary:
        """A vocabulary of `rows` rows from lines of tokenised text, which `texts` begins anew at every call.

        Raises DataError if so few rows cannot do.
        """
        raise unwritten(self, "learn")

    def load(self, path: Path, rows: int) -> Vocabulary:
        """What `save` wrote."""
        raise unwritten(self, "load")


tokenizers: Registry[TokenizerSpec] = Registry("tokenizer", TokenizerSpec, "attnbench.data.tokenizers")
TokenizerField = Annotated[TokenizerSpec, Family(lambda: tokenizers)]

LEAST_ROWS = len(SPECIALS) + 1
