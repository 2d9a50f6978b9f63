"""The four special tokens, first in every vocabulary. Kept apart from the batches: preparing data needs no torch."""

from __future__ import annotations

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
SEPARATOR = "<sep>"
"""Between the sentences of a block, in text and as a row of the vocabulary of its own."""
