"""How a metric is called, written and ordered in a table for people."""

from __future__ import annotations

import difflib
import math

SITES = {"encoder_self": "enc", "decoder_self": "dec", "cross": "cross"}
_WORDS = {
    "bleu": "BLEU",
    "bleu_13a": "BLEU 13a",
    "d_bleu": "d-BLEU",
    "d_bleu_13a": "d-BLEU 13a",
    "s_bleu": "s-BLEU",
    "s_bleu_13a": "s-BLEU 13a",
    "wrong_counts": "% blocks with another number of sentences",
    "chrf": "chrF",
    "ppl": "perplexity",
    "tokens_per_s": "ktok/s",
    "params": "parameters",
    "exact": "exact match",
    "rep": "REP",
    "drop": "DROP",
    "bleu_bound": "BLEU of a perfect copy",
    "bleu_13a_bound": "BLEU 13a of a perfect output",
    "d_bleu_13a_bound": "d-BLEU 13a of a perfect output",
    "exact_bound": "exact match of a perfect copy",
    "seconds_per_epoch": "s/epoch",
    "seconds_spread": "seconds, spread",
    "encode_seconds": "seconds in the encoder",
    "ms_per_step": "ms/step",
}
_LOWER = {
    "loss", "nll", "ppl", "seconds", "seconds_per_epoch", "ms_per_step", "rep", "drop", "max_mem_mb",
    "unfinished", "wrong_counts",
}  # fmt: skip
_HIGHER = {"bleu", "bleu_13a", "chrf", "exact", "tokens_per_s"}
_DECIMALS = {
    "attended": 1, "entropy": 2, "bleu": 2, "bleu_13a": 2, "d_bleu": 2, "d_bleu_13a": 2, "s_bleu": 2, "s_bleu_13a": 2,
    "wrong_counts": 1, "chrf": 2, "exact": 2, "loss": 3, "nll": 3, "ppl": 2,
    "rep": 2, "drop": 2, "bleu_bound": 2, "bleu_13a_bound": 2, "d_bleu_13a_bound": 2,
    "exact_bound": 2, "seconds_per_epoch": 2,
}  # fmt: skip


_SCORES = sorted(_HIGHER | _LOWER | set(_WORDS) - {"params", "tokens_per_s", "ms_per_step", "seconds_spread"})
_USUAL = [
    *(f"{split}/{name}" for split in ("test", "valid") for name in (*_SCORES, "decode_seconds", "decode_tokens_per_s")),
    *(f"{group}/{site}" for group in ("attended", "entropy") for site in SITES),
    "train/tokens_per_s", "train/seconds_per_epoch", "train/seconds", "train/steps", "train/epochs", "train/tokens",
    "decode/tokens_per_s", "best/step", "best/epoch", "params",
]  # fmt: skip


def misspelt(metric: str) -> str | None:
    """The usual metric that an unusual name comes close to; None where it may be one of its own."""
    near = difflib.get_close_matches(metric, _USUAL, n=1, cutoff=0.88)
    return near[0] if near and metric not in _USUAL else None


def last(metric: str) -> str:
    """'test/bleu' -> 'bleu'."""
    return metric.rsplit("/", 1)[-1]


def title(metric: str) -> str:
    """'test/bleu' -> 'test BLEU'."""
    group, _, name = metric.rpartition("/")
    words = SITES.get(name) or _WORDS.get(name) or name.replace("_", " ")
    return f"{group.replace('/', ' ')} {words}".strip()


def higher_is_better(metric: str) -> bool | None:
    """None: neither, it only describes (attended positions, entropy, parameters)."""
    name = last(metric)
    if name.endswith("_bound"):
        return None  # it belongs to the data
    if name in _HIGHER or "bleu" in name or name.endswith("tokens_per_s"):
        return True
    return False if name in _LOWER or name.endswith("_seconds") else None


def number(metric: str, value: float) -> str:
    """`value` as tables for people print it; tokens/s in thousands."""
    if not math.isfinite(value):
        return str(value)
    if metric.endswith("tokens_per_s"):
        return thousands(value)
    decimals = _DECIMALS.get(metric.split("/", 1)[0], _DECIMALS.get(last(metric)))
    if decimals is not None:
        return f"{value:.{decimals}f}"
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.4g}"


def thousands(value: float) -> str:
    """12345 -> '12.3', with three digits that count below 1,000,000."""
    scaled = value / 1000
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.1f}" if scaled >= 10 else f"{scaled:.2f}"
