"""Byte pair encoding of words into subwords (Sennrich, Haddow, Birch 2016), learnt and applied by `tokenizers`."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from attnbench.core.errors import DataError
from attnbench.core.files import write_atomic
from attnbench.data.special import EOS, SPECIALS, UNK
from attnbench.data.tokenizers.base import LEAST_ROWS, TokenizerSpec, Vocabulary, VocabularySizes, tokenizers

log = logging.getLogger("attnbench")

_END = "</w>"
_RESERVED = re.compile("|".join(map(re.escape, (*SPECIALS, _END))))
_KNOWN_WORDS = 100_000
_LEAST_ALPHABET, _ALPHABET_SHARE = 128, 8
"""At most an eighth of the rows (and never under 128) are characters; a text with more has its rarest as <unk>."""
_LONGEST_WORD = 2000
_ENDLESS = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")
"""A word that learning from takes seconds, and the square of its length: DNA, or a file that is no text."""


class BpeVocabulary:
    """A subword that ends a word carries `</w>`."""

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self.rows = rows
        self._tokenizer = tokenizer
        vocab = tokenizer.get_vocab(with_added_tokens=False)
        self.filled = len(vocab)
        self._known: dict[str, list[int]] = {}
        """Words met lately: most of a text is the same words again, and looking them up is several times as fast."""
        self._tokens = [token for token, _ in sorted(vocab.items(), key=lambda item: item[1])]

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        lines = [text.split() for text in texts]
        known = self._known
        fresh = list({word for words in lines for word in words if word not in known})
        if fresh:
            if len(known) > _KNOWN_WORDS:
                known.clear()
                return self.encode_batch(texts)
            for word, item in zip(fresh, self._tokenizer.encode_batch_fast(fresh), strict=True):
                # a word that happens to be spelt like a special token is text
                known[word] = [index if index > EOS else UNK for index in item.ids]
        return [[index for word in words for index in known[word]] for words in lines]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = []
        for index in ids:
            if index == UNK or index >= self.filled:
                pieces.append(SPECIALS[UNK] + " ")
            elif index > EOS:
                token = self._tokens[index]
                pieces.append(token[: -len(_END)] + " " if token.endswith(_END) else token)
        return "".join(pieces).rstrip()

    def token(self, index: int) -> str:
        return self._tokens[index] if index < self.filled else SPECIALS[UNK]

    def save(self, path: Path) -> None:
        write_atomic(path, self._tokenizer.to_str(pretty=True) + "\n")


@tokenizers.register
class BpeSpec(TokenizerSpec):
    """Subwords by byte pair encoding, learnt from the tokenised training text."""

    kind: Literal["bpe"] = "bpe"
    vocab: int = Field(default=8000, ge=LEAST_ROWS)
    """Rows of each embedding, the 4 special tokens and the alphabet included."""
    joint: bool = True
    """One vocabulary learnt from both sides; false: one for each."""

    def sizes(self) -> VocabularySizes:
        return VocabularySizes(self.vocab, self.vocab, self.joint)

    def learn(self, texts: Callable[[], Iterable[str]], rows: int) -> Vocabulary:
        counts: Counter[str] = Counter()
        endless = 0
        for text in texts():
            counts.update(text)
            endless += bool(_ENDLESS.search(text))
        if endless:
            log.warning(
                "%s lines hold words of more than %s characters, of which no merges are learned; is it text?",
                f"{endless:,}", f"{_LONGEST_WORD:,}",
            )  # fmt: skip
        characters = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))
        alphabet = sorted(characters[: max(_LEAST_ALPHABET, rows // _ALPHABET_SHARE)])
        least = len(SPECIALS) + 2 * len(alphabet)
        if least > rows:
            raise DataError(
                f"tokenizer.vocab: {rows} rows cannot hold the {len(alphabet)} characters of the text, each inside a "
                f"word and at its end; ask for {least} rows or more"
            )
        # The trainer numbers symbols in the order of a randomly seeded hash table, and breaks ties by number:
        # symbols that it is told of beforehand make it give the same merges every time.
        trainer = trainers.BpeTrainer(
            vocab_size=rows,
            min_frequency=2,
            special_tokens=[*SPECIALS, *alphabet, *(character + _END for character in alphabet)],
            end_of_word_suffix=_END,
            show_progress=False,
        )
        learner = _tokenizer(models.BPE(end_of_word_suffix=_END))
        learned = (_ENDLESS.sub("", text) for text in texts()) if endless else texts()
        learner.train_from_iterator(_only(alphabet, learned, len(characters)), trainer)
        model = json.loads(learner.to_str())["model"]
        merges = [tuple(pair) for pair in model["merges"]]
        return BpeVocabulary(_tokenizer(_model(model["vocab"], merges)), rows)

    def load(self, path: Path, rows: int) -> Vocabulary:
        return BpeVocabulary(Tokenizer.from_file(str(path)), rows)


def _model(vocab: dict[str, int], merges: list[tuple[str, str]]) -> models.BPE:
    return models.BPE(vocab, merges, unk_token=SPECIALS[UNK], fuse_unk=True, end_of_word_suffix=_END)


def _tokenizer(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return tokenizer


def _only(alphabet: Sequence[str], texts: Iterable[str], seen: int) -> Iterator[str]:
    """The texts as merges are learned from them: what the alphabet has no room for parts its neighbours, and so does
    the first sign of what is spelt like a special token or an end, or a merge would take the place of these."""
    other = re.compile(f"[^{re.escape(''.join(alphabet))}\\s]+") if len(alphabet) < seen else None
    for text in texts:
        text = _RESERVED.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        yield other.sub(" ", text) if other else text
