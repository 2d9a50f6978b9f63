"""From released files to a prepared folder: clean, filter, learn the vocabulary, write ids. Everything is a stream."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

from attnbench.core.errors import DataError
from attnbench.data.alignment.links import parse_links
from attnbench.data.datasets.base import SPLITS
from attnbench.data.pack import pack
from attnbench.data.parts import Pair, Part, read_pairs
from attnbench.data.recipe import Recipe
from attnbench.data.special import UNK
from attnbench.data.store import IdsWriter, TextLines, TextWriter
from attnbench.data.text import Clean, chunks, cleaner, moses_detokenize, spaced
from attnbench.data.tokenizers.base import Vocabulary

log = logging.getLogger("attnbench")

SIDES = ("src", "tgt")
_REASONS = ("empty", "too_long", "ratio", "overlap")
_BATCH = 2048
_FILLED = 0.9
"""Part of a vocabulary below which it is told that the rest stands empty."""
_REPORT = 500_000


class SplitText:
    """Writes the tokenised text of one split, the raw references of all but the training split, known alignments."""

    def __init__(self, folder: Path, split: str, *, aligned: bool, documents: bool) -> None:
        self._stack = ExitStack()
        self._writers = [self._stack.enter_context(TextWriter(folder / f"{split}.{side}.txt")) for side in SIDES]
        self._raw = None if split == "train" else self._stack.enter_context(TextWriter(folder / f"{split}.tgt.raw"))
        self._links = self._stack.enter_context(TextWriter(folder / f"{split}.align")) if aligned else None
        self._documents = self._stack.enter_context(TextWriter(folder / f"{split}.docs")) if documents else None
        self._document = ""
        self.passed = 0
        """Pairs, or documents where these are known, that came this way; those held out for another split included."""
        self.counts = {"read": 0, "kept": 0, "empty": 0, "too_long": 0, "ratio": 0}

    def place(self, document: str = "") -> int:
        """Which pair this is, or which document, from 1."""
        if not document or document != self._document:
            self._document = document
            self.passed += 1
        return self.passed

    def write(self, source: str, target: str, reference: str, alignment: str, document: str) -> None:
        self._writers[0].write(source)
        self._writers[1].write(target)
        if self._raw is not None:
            self._raw.write(reference)
        if self._links is not None:
            self._links.write(alignment)
        if self._documents is not None:
            self._documents.write(document)
        self.counts["kept"] += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()


def write_texts(recipe: Recipe, parts: Mapping[str, list[Part]], folder: Path) -> dict[str, dict[str, int]]:
    """Tokenised and filtered text of every split; returns what was read, kept and left out.

    Raises DataError for bad lines, and for a split without a pair.
    """
    with ExitStack() as stack:
        texts = {
            split: stack.enter_context(
                SplitText(folder, split, aligned=_aligned(parts, split), documents=recipe.dataset.documents)
            )
            for split in SPLITS
        }
        for split in SPLITS:
            for part in parts.get(split, []):
                _write_part(recipe, part, split, texts)
    counts = {split: text.counts for split, text in texts.items()}
    for split, number in counts.items():
        if number["kept"] == 0 and number["read"] == 0 and not parts.get(split):
            what = f"{texts['train'].passed:,} {'documents' if recipe.dataset.documents else 'pairs'}"
            lower = "lower task.dataset.hold_every, or " * ("hold_every" in type(recipe.dataset).model_fields)
            raise DataError(
                f"nothing of the training text, {what}, was held out for {split}; {lower}give more, or files for "
                f"{split}"
            )
        if number["kept"] == 0:
            files = dict.fromkeys(each for part in parts.get(split, []) for each in part.made_from or part[:2])
            where = f" ({', '.join(map(str, files))})" if files else ""
            if number["read"] == 0:
                raise DataError(f"the {split} split has no pair, its files are empty{where}; give others")
            raise DataError(
                f"the {split} split keeps no pair of {number['read']:,} read; check its files{where} and filters"
            )
    return counts


def drop_overlap(folder: Path, *, aligned: bool, documents: bool = False) -> int:
    """Take out of the training text what stands in valid or test, on either side; returns the number of pairs.

    Raises DataError where nothing would be left.
    """
    known = [{line for split in SPLITS[1:] for line in TextLines(folder / f"{split}.{side}.txt")} for side in SIDES]
    links: Iterable[str] = TextLines(folder / "train.align") if aligned else repeat("")
    names: Iterable[str] = TextLines(folder / "train.docs") if documents else repeat("")
    read = 0
    with TemporaryDirectory(dir=folder) as temporary:
        work = Path(temporary)
        with SplitText(work, "train", aligned=aligned, documents=documents) as text:
            for (source, target), link, name in zip(_pairs(folder, "train"), links, names, strict=False):
                read += 1
                if source not in known[0] and target not in known[1]:
                    text.write(source, target, "", link, name)
        if not text.counts["kept"]:
            raise DataError(f"all of the {read:,} training pairs stand in valid or test too; say `overlap: keep`")
        for file in work.iterdir():
            file.replace(folder / file.name)
    return read - text.counts["kept"]


def count_repeated(folder: Path, split: str) -> int:
    """Pairs of a split that stand in the training text too, both sides word for word as tokenised."""
    held = Counter(_pairs(folder, split))
    return sum(held[pair] for pair in {pair for pair in _pairs(folder, "train") if pair in held})


def _pairs(folder: Path, split: str) -> Iterator[tuple[str, str]]:
    return zip(*(TextLines(folder / f"{split}.{side}.txt") for side in SIDES), strict=True)


_FEW = 0.01
"""Of a released split: a "thank you ." stands in every talk."""


def _warn_of_repeated(dataset: str, split: str, repeated: int, pairs: int, *, held: bool) -> None:
    # Held out by place in the file, not by pair: that is fairseq's way on IWSLT'14, and another choice would change
    # the splits, and so the scores, of corpora that are prepared already. So repetitions are counted and told.
    if repeated > (0 if held else _FEW * pairs):
        log.warning(
            "%s: %s of the %s pairs %s %s stand in the training text too; scores on them flatter: say `overlap: drop`, "
            "%s",
            dataset, f"{repeated:,}", f"{pairs:,}", "held out for" if held else "of", split,
            f"remove repeated lines, or give {split} files of its own" if held else "or take them out of one of both",
        )  # fmt: skip


def _aligned(parts: Mapping[str, list[Part]], split: str) -> bool:
    """Whether the alignments of all pairs of a split are known, those held out of another split included."""
    feeding = [part for name, own in parts.items() for part in own if name == split or split in part.held.values()]
    return all(part.alignment is not None for part in feeding)


def _write_part(recipe: Recipe, part: Part, split: str, texts: Mapping[str, SplitText]) -> None:
    languages = recipe.dataset.pair()
    repair_source, repair_target = (recipe.dataset.repair(language) or str for language in languages)
    clean_source, clean_target = (line_cleaner(recipe, language, tokenized=part.tokenized) for language in languages)
    counts = texts[split].counts
    for pair in read_pairs(part):
        counts["read"] += 1
        raw = repair_target(pair.target.text)
        source, target = clean_source(repair_source(pair.source.text)), clean_target(raw)
        into = split
        if pair.document:  # a document is held whole, whatever is left out of it
            into = part.held.get((texts[split].place(pair.document) - 1) % part.every + 1, split)
        reason = _refuse(recipe, into, pair, part, source, target)
        if reason is not None:
            counts[reason] += 1
            continue
        if not pair.document:
            place = texts[split].place()
            into = part.held.get(((counts["read"] if part.held_as_read else place) - 1) % part.every + 1, split)
        if pair.alignment:
            _check_links(pair, part, source, target)
        reference = "" if into == "train" else _reference(recipe, raw, part.tokenized)
        texts[into].write(source, target, reference, pair.alignment, pair.document)
        if counts["read"] % _REPORT == 0:
            log.info("%s: %s pairs read", split, f"{counts['read']:,}")


def line_cleaner(recipe: Recipe, language: str, *, tokenized: bool = False) -> Clean:
    """Raw line -> tokenised line of one language. tokenized: the line is that already, but for its case."""
    return cleaner(
        language,
        moses=recipe.pretokenize == "moses" and not tokenized,
        normalize=recipe.normalize and not tokenized,
        split_hyphens=recipe.split_hyphens,
        lowercase=recipe.lowercase,
    )


def _refuse(recipe: Recipe, split: str, pair: Pair, part: Part, source: str, target: str) -> str | None:
    """Why a pair is left out; None: it is kept."""
    if recipe.empty != "keep" and not (source and target):
        if recipe.empty == "error":
            raise DataError(
                f"{_place(part, pair, 1 if source else 0)}; fill it in, remove it together with its partner, "
                "or say `empty: drop` below `task`"
            )
        return "empty"
    if split != "train" or (recipe.max_length is None and recipe.max_ratio is None):
        return None
    words = source.count(" ") + 1, target.count(" ") + 1
    if recipe.max_length is not None and max(words) > recipe.max_length:
        return "too_long"
    if recipe.max_ratio is not None and max(words) > recipe.max_ratio * min(words):
        return "ratio"
    return None


def _check_links(pair: Pair, part: Part, source: str, target: str) -> None:
    place = f"{part.alignment}, beside {part.source}:{pair.source.number}"
    for path, line, text in ((part.source, pair.source, source), (part.target, pair.target, target)):
        given, now = len(line.text.split()), len(text.split())
        if given != now:  # the links count the words that were given
            raise DataError(
                f"{path}:{line.number}: has {given} words and, tokenised, {now}, so that the links of {part.alignment} "
                "would be of others; give tokenised text and say `tokenized: true` below task.dataset, or say "
                "`pretokenize: none` below task"
            )
    words = source.count(" ") + 1, target.count(" ") + 1
    for link in parse_links(pair.alignment, place):
        if link[0] >= words[0] or link[1] >= words[1]:
            raise DataError(
                f"{place}: no words for {link[0]}-{link[1]}: source and target have {words[0]} and {words[1]}, counted "
                "from 0"
            )


def _place(part: Part, pair: Pair, side: int) -> str:
    """Where an empty sentence stands. side: 0 the source, 1 the target."""
    if not part.made_from:
        path, line = (part.source, pair.source) if side == 0 else (part.target, pair.target)
        return f"{path}:{line.number}: an empty line"
    path = part.made_from[min(side, len(part.made_from) - 1)]  # chats are one file
    number, beside = pair.document.partition("/")[2], (pair.target, pair.source)[side].text
    return f"{path}: document {number}: an empty sentence, whose partner is {beside!r}"


def _reference(recipe: Recipe, raw: str, tokenized: bool) -> str:
    if tokenized and recipe.dataset.moses_words():
        return moses_detokenize(recipe.dataset.pair().target, [raw])[0]
    return spaced(raw)


def vocabulary_files(recipe: Recipe) -> tuple[str, str]:
    """Names of the source and the target vocabulary in a prepared folder: one file if they are one."""
    kind = recipe.tokenizer.kind
    if recipe.sizes().joint:
        return f"{kind}.json", f"{kind}.json"
    return f"{kind}.src.json", f"{kind}.tgt.json"


def learn_vocabularies(recipe: Recipe, folder: Path) -> tuple[Vocabulary, Vocabulary]:
    """Learn and save the vocabularies of the training text in `folder`."""
    sizes = recipe.sizes()
    texts = [folder / f"train.{side}.txt" for side in SIDES]
    learn = recipe.learn
    if sizes.joint:
        source = target = learn(lambda: chain.from_iterable(TextLines(text) for text in texts), sizes.source)
    else:
        source = learn(lambda: TextLines(texts[0]), sizes.source)
        target = learn(lambda: TextLines(texts[1]), sizes.target)
    for name, vocabulary in zip(vocabulary_files(recipe), (source, target), strict=True):
        vocabulary.save(folder / name)
    return source, target


def write_ids(vocabularies: tuple[Vocabulary, Vocabulary], split: str, folder: Path) -> dict[str, int]:
    """Ids of one split. Returns token counts: of each side, and (wide, widest) of the longer side of each pair."""
    total = {"source_tokens": 0, "target_tokens": 0, "wide_tokens": 0, "widest": 0, "source_unk": 0, "target_unk": 0}
    texts = [TextLines(folder / f"{split}.{side}.txt") for side in SIDES]
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IdsWriter(folder / f"{split}.{side}.ids", vocabulary.rows))
            for side, vocabulary in zip(SIDES, vocabularies, strict=True)
        ]
        batches = [chunks(iter(text), _BATCH) for text in texts]
        for lines in zip(*batches, strict=True):
            sources, targets = (side.encode_batch(batch) for side, batch in zip(vocabularies, lines, strict=True))
            writers[0].write(sources)
            writers[1].write(targets)
            _add(total, sources, targets)
    return total


def _add(total: dict[str, int], sources: list[list[int]], targets: list[list[int]]) -> None:
    for side, rows in (("source", sources), ("target", targets)):
        total[f"{side}_tokens"] += sum(map(len, rows))
        total[f"{side}_unk"] += sum(row.count(UNK) for row in rows)
    wide = [max(len(source), len(target)) + 1 for source, target in zip(sources, targets, strict=True)]
    total["wide_tokens"] += sum(wide)
    total["widest"] = max(total["widest"], *wide)


def build(recipe: Recipe, parts: Mapping[str, list[Part]], folder: Path) -> dict[str, Any]:
    """Fill `folder` with everything but the manifest; returns the manifest's `splits`, `vocabulary` and `tokenized`."""
    counts = write_texts(recipe, parts, folder)
    if recipe.overlap == "drop":
        counts["train"]["overlap"] = drop_overlap(
            folder, aligned=_aligned(parts, "train"), documents=recipe.dataset.documents
        )
        counts["train"]["kept"] -= counts["train"]["overlap"]
    held = {split for own in parts.values() for part in own for split in part.held.values()}
    repeated = {split: count_repeated(folder, split) for split in SPLITS[1:]}
    for split, number in repeated.items() if not recipe.dataset.repeats else ():
        _warn_of_repeated(recipe.dataset.kind, split, number, counts[split]["kept"], held=split in held)
    log.info("learning the vocabulary")
    source, target = learn_vocabularies(recipe, folder)
    for side in dict.fromkeys((source, target)):
        if side.filled < _FILLED * side.rows:
            log.warning(
                "%s: the training text gives %s of the %s entries of a vocabulary, and a model has parameters for all; "
                "ask for fewer below task.tokenizer", recipe.dataset.kind, f"{side.filled:,}", f"{side.rows:,}",
            )  # fmt: skip
    log.info("writing ids")
    splits: dict[str, dict[str, Any]] = {}
    for split in SPLITS:
        number = counts[split]
        dropped = {reason: number[reason] for reason in _REASONS if reason in number}
        packed = {} if recipe.block is None else pack(folder, split, (source, target), recipe.block)
        sizes = write_ids((source, target), split, folder)
        splits[split] = {"pairs": number["kept"], "read": number["read"], "dropped": dropped, **packed, **sizes}
        if split in held:
            splits[split]["in_train"] = repeated[split]
    vocabulary = {
        name: {"file": file, "rows": side.rows, "filled": side.filled}
        for name, file, side in zip(("source", "target"), vocabulary_files(recipe), (source, target), strict=True)
    }
    tokenized = recipe.dataset.moses_words() and all(part.tokenized for own in parts.values() for part in own)
    return {"splits": splits, "vocabulary": vocabulary, "tokenized": tokenized}
