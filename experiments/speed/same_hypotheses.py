"""Whether searches find what the definition finds: compiled steps and packed weights in float32 beside attention with
all scores, in torch operations.

    python same_hypotheses.py --size mini --sentences 1024

The Transformer of that size with random weights, which leave more close calls than trained ones do, on random sources
of 4 to 60 words; outputs go on to 30 tokens, unless EOS comes. Counted are the sentences whose best outputs are other
words, with the largest difference of their scores: what is searched here beside the definition, and both beside the
definition in float64. Top-k is not continuous: where two keys are all but equal at the k-th place, a last digit decides
which of them counts.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from attnbench.bench import sentences
from attnbench.bench.subjects import COMPARED, transformer
from attnbench.core import native, processor
from attnbench.data.base import BOS, EOS, PAD
from attnbench.models.base import Seq2SeqModel, Source
from attnbench.search.base import Hypothesis, Searcher, SpecialIds, computing, searches
from attnbench.train.onednn import keep_few_products, use_onednn_float32
from attnbench.train.runtime import keep_freed_memory, use_threads

AT_ONCE = 64
SPECIAL = SpecialIds(bos=BOS, eos=EOS, pad=PAD)


def sources(count: int) -> list[Source]:
    """Of like lengths, as a split is searched."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, sentences.LONGEST + 1, (count,), generator=draw).sort().values
    found = []
    for some in lengths.split(AT_ONCE):
        data = torch.randint(4, sentences.WORDS, (len(some), int(some.max()) + 1), generator=draw)
        place = torch.arange(data.shape[1])[None]
        data[place == some[:, None]] = EOS
        data[place > some[:, None]] = PAD
        found.append(Source(data, place <= some[:, None]))
    return found


def best(model: Seq2SeqModel, searcher: Searcher, given: list[Source]) -> list[Hypothesis]:
    return [first for source in given for first, *_ in searcher(model, source, SPECIAL)]


def apart(found: list[Hypothesis], wanted: list[Hypothesis]) -> str:
    others = [abs(a.score - b.score) for a, b in zip(found, wanted, strict=True) if a.tokens != b.tokens]
    return f"{len(others)} ({max(others):.1e})" if others else "0"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--size", default="mini")
    options.add_argument("--sentences", type=int, default=1024)
    given = options.parse_args()
    use_threads(processor.usable_cores())
    keep_freed_memory()
    keep_few_products()
    use_onednn_float32()
    texts, device = sources(given.sentences), torch.device("cpu")
    lines = [
        f"| {given.size}, {given.sentences:,} sentences | searches beside the definition | beside it in float64 | the "
        "definition beside it in float64 |",
        "| --- | ---: | ---: | ---: |",
    ]
    print("\n".join(lines), flush=True)
    for name in COMPARED:
        subject = transformer(given.size, name)
        fast, defined = subject.build(device).eval(), subject.build(device, defined=True).eval()
        exact = subject.build(device, defined=True).eval().double()
        for kind in ("greedy", "beam 5"):
            limits: dict[str, Any] = {"max_ratio": 0.0, "max_extra": sentences.STEPS}
            chosen = {"kind": "greedy"} if kind == "greedy" else {"kind": "beam", "size": 5}
            searcher = searches.parse({**chosen, **limits}).build()
            with torch.no_grad(), computing(fast, searcher.spec):
                found = best(fast, searcher, texts)
            with torch.no_grad(), native.off():
                wanted, right = (best(each, searcher, texts) for each in (defined, exact))
            columns = apart(found, wanted), apart(found, right), apart(wanted, right)
            print(f"| {name}, {kind} | {' | '.join(columns)} |", flush=True)
    print(f"\n{processor.name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {native.engine()}")


if __name__ == "__main__":
    main()
