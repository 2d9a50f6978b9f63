"""Recipe: everything that decides what prepared data look like. Its digest names the prepared folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from attnbench.core.errors import DataError
from attnbench.core.registry import MemberError
from attnbench.core.spec import Spec, unknown
from attnbench.data.datasets.base import MOSES_CODES, DatasetField, datasets
from attnbench.data.separated import Separated
from attnbench.data.tokenizers.base import TokenizerField, Vocabulary, VocabularySizes
from attnbench.data.tokenizers.bpe import BpeSpec


class Recipe(Spec):
    """A corpus and what is done to it. A key that is left out takes the usual value of the corpus."""

    dataset: DatasetField
    """The corpus: a name, or a mapping with `kind`."""
    tokenizer: TokenizerField = BpeSpec()
    """How words become ids."""
    pretokenize: Literal["moses", "none"] = "moses"
    """moses: raw text is tokenised; none: words stand between spaces already."""
    normalize: bool = False
    """Plain quotes and dashes, no control characters (Moses normalize-punctuation and remove-non-printing-char)."""
    split_hyphens: bool = False
    """`a-b` becomes `a @-@ b` (tokenizer.perl -a)."""
    lowercase: bool = False
    """Lower-case both sides after tokenisation."""
    max_length: int | None = Field(default=None, ge=1)
    """Training pairs with more words than this on a side are left out (counted before subwords)."""
    max_ratio: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """Training pairs are left out when one side has more than this many times the words of the other."""
    empty: Literal["error", "drop", "keep"] = "drop"
    """What to do with a pair that has an empty side; keep is for generated text, in which nothing is a sentence too."""

    block: int | None = Field(default=None, ge=8)
    """Of a corpus of documents: sentences are joined into blocks of at most so many tokens a side, separators and EOS
    counted, never across a document's end; null: each sentence alone."""

    overlap: Literal["keep", "drop"] = "keep"
    """drop: training pairs with a side that is, word for word, a line of that side of valid or test are left out; of a
    document these sentences alone."""

    @model_validator(mode="before")
    @classmethod
    def _usual(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping) or "dataset" not in raw:
            return raw
        try:
            dataset = datasets.parse(raw["dataset"])
        except (ValueError, ValidationError):
            return raw  # told at its own place when the field is read
        usual = dataset.usual()
        for key in usual.keys() - Recipe.model_fields.keys():  # which would be told as a fault of the spec's
            raise MemberError(
                f"{type(dataset).__name__}: {unknown('key of its recipe', key, list(Recipe.model_fields))}"
            )
        tokenizer, its_usual = raw.get("tokenizer"), usual.get("tokenizer", {"kind": "bpe"})
        given = {"kind": tokenizer} if isinstance(tokenizer, str) else tokenizer
        if isinstance(given, Mapping) and given.get("kind", its_usual["kind"]) == its_usual["kind"]:
            if given.get("joint") and not its_usual.get("joint", its_usual["kind"] == "bpe"):
                its_usual = {"kind": its_usual["kind"]}  # the sizes of two vocabularies are none of one
            raw = {**raw, "tokenizer": {**its_usual, **given}}  # the usual one, but for what is given
        return {**usual, **raw}

    @model_validator(mode="after")
    def _known_to_moses(self) -> Self:
        longer = [code for code in self.dataset.pair() if code in MOSES_CODES] if self.pretokenize == "moses" else []
        if longer:
            code = MOSES_CODES[longer[0]]
            raise ValueError(f"Moses has its rules of '{longer[0]}' under the code '{code}'; write that")
        return self

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.block is not None and not self.dataset.documents:
            raise ValueError(f"block: the corpus '{self.dataset.kind}' does not say where a document ends; drop it")
        return self

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.split_hyphens and self.pretokenize == "none":
            yield "split_hyphens", "it is a part of tokenising, and pretokenize is 'none'"

    def plain(self) -> Recipe:
        """The recipe alone, if this is a spec that holds more: the digest is of what decides the data."""
        return Recipe.model_validate({name: getattr(self, name) for name in Recipe.model_fields})

    def learn(self, texts: Callable[[], Iterable[str]], rows: int) -> Vocabulary:
        """A vocabulary of `rows` rows from lines of tokenised text; one of them is the separator's, where there are
        blocks."""
        if self.block is None:
            return self.tokenizer.learn(texts, rows)
        try:
            return Separated(self.tokenizer.learn(texts, rows - 1))
        except DataError as error:
            raise DataError(f"{error}, and one more for what separates the sentences of a block") from None

    def load(self, path: Path, rows: int) -> Vocabulary:
        """What such a vocabulary saved."""
        return self.tokenizer.load(path, rows) if self.block is None else Separated(self.tokenizer.load(path, rows - 1))

    def sizes(self) -> VocabularySizes:
        """Rows of the source and the target embedding, and whether they are one."""
        return self.tokenizer.sizes()
