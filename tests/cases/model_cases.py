"""Every model with everything that can stand in it, small, and what it is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from attnbench.attention.biases.base import biases
from attnbench.attention.coverage.base import coverages
from attnbench.attention.patterns.base import patterns
from attnbench.attention.scores.base import scores
from attnbench.attention.transforms.base import transforms
from attnbench.attention.types import Role
from attnbench.models.base import Seq2SeqModel, Sizes, Source, models

PAD, BOS, EOS, VOCABULARY = 0, 1, 2, 13
LENGTHS, TARGETS = (7, 1, 4), (5, 6, 2)
SMALL: dict[str, list[dict[str, Any]]] = {
    "lstm": [
        {"layers": 2, "width": 8, "embedding": 6},
        {"layers": 1, "width": 8, "bidirectional": True, "input_feeding": "attentional"},
        {"layers": 1, "width": 8, "readout": "state", "attention": {"cross": {"module": "none"}}},
    ],
    "gru": [
        {"layers": 1, "width": 8, "embedding": 6, "bidirectional": True, "query": "previous", "readout": "concat"},
        {"layers": 2, "width": 8, "input_feeding": "context", "attention": {"cross": {"score": "bilinear"}}},
    ],
    "convs2s": [
        {"layers": 2, "embedding": 6, "width": 8},
        {"layers": 1, "decoder_layers": 2, "embedding": 6, "width": 8, "kernel": 4, "share_attention": True,
         "tie": "all", "max_length": 16, "attention": {"cross": {"score": "additive"}}},
        {"layers": 1, "embedding": 6, "width": 8, "kernel": 1, "heads": 2, "tie": "decoder",
         "attention": {"cross": {"module": "multihead"}}},
    ],
    "transformer": [
        {"layers": 2, "width": 8, "heads": 2, "ffn": 12, "tie": "none", "norm": "post"},
        {"layers": 1, "decoder_layers": 2, "width": 8, "heads": 2, "ffn": 12, "tie": "all", "norm": "pre",
         "positions": "learned", "max_length": 16, "shared_norm": True, "output_bias": True},
    ],
}  # fmt: skip
"""Every shape that computes something else, for each model."""
LOOKING_BACK: list[Any] = [
    {"transform": "csparsemax", "bias": {"kind": "exhaustion", "c": 0.7}},
    {"transform": "csoftmax", "coverage": "simple"},
    {"transform": "csoftmax", "module": "multihead"},
    {"coverage": "simple", "score": "bilinear"},
    {"coverage": {"kind": "neural", "units": 3}},
]
"""What a decoder that runs step by step can do besides."""
EXTRA: list[Any] = [
    {"transform": {"kind": "entmax", "alpha": "learned"}},
    {"transform": {"kind": "topk", "ratio": 0.5}},
    {"transform": {"kind": "topk", "k": 2, "ties": "index"}, "sparsify": "train"},
]
MEMORY: dict[str, dict[str, Any]] = {
    "softmax-softmax": {"module": {"kind": "fixed_memory", "slots": 3}},
    "softmax-sigmoid": {"module": {"kind": "fixed_memory", "slots": 3}, "transform": "sigmoid"},
    "sigmoid-softmax": {"module": {"kind": "fixed_memory", "slots": 3, "encoder_transform": "sigmoid"}},
    "sigmoid-sigmoid-positions": {
        "module": {"kind": "fixed_memory", "slots": 9, "encoder_transform": "sigmoid", "positions": True, "longest": 5},
        "transform": "sigmoid",
    },
    "time-positions": {
        "module": {"kind": "fixed_memory", "slots": 9, "enc_norm": "time", "positions": True, "pe_offset": "plus_one"},
    },
}
"""Attention over the source by fixed-size memory: encoder's and decoder's side."""


def small(model: str) -> list[dict[str, Any]]:
    """Of a newcomer, one shape, and one that reads both ways where it can: what is called as elsewhere is little."""
    fields = models.get(model).model_fields
    sizes = {"layers": 1, "width": 8, "embedding": 6, "heads": 2, "ffn": 12, "tie": "decoder"}
    little = {key: size for key, size in sizes.items() if key in fields}
    both_ways = [{**little, "bidirectional": True}] if "bidirectional" in fields else []
    return SMALL.get(model) or [little, *both_ways]


def roles(model: str) -> set[Role]:
    attention: Any = models.get(model).model_fields.get("attention")
    return set() if attention is None else set(attention.annotation.roles)


def fitted(raw: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """With those of the fields that the model has."""
    return {**raw, **{key: value for key, value in fields.items() if key in models.get(raw["kind"]).model_fields}}


def sites(model: str) -> list[dict[str, Any]]:
    if not roles(model):
        return []
    found = []
    for kind in transforms.kinds():
        cls = transforms.get(kind)
        if cls.roles >= roles(model) and (models.get(model).sequential or not cls.needs_upper):
            filled = cls.from_budget(2, "cross")
            found.append({"transform": kind if filled is None else filled.dump()})
    if models.get(model).sequential:
        found += [*LOOKING_BACK, *({"coverage": kind} for kind in coverages.kinds())]
        found += [{"coverage": kind, "transform": {"kind": "topk", "k": 2}} for kind in coverages.kinds()]
    return found + EXTRA


def at_some_sites(model: str) -> list[dict[Role, dict[str, Any]]]:
    """Every bias where it may stand, and every score that the model takes between source and target."""
    found: list[dict[Role, dict[str, Any]]] = []
    for kind in biases.kinds():
        cls, sequential = biases.get(kind), models.get(model).sequential
        where = roles(model) & cls.roles
        if where and (sequential or not cls.needs_upper):
            found.append({role: {"bias": kind} for role in sorted(where)})
    for kind in scores.kinds() if "cross" in roles(model) else ():
        attention: dict[Role, dict[str, Any]] = {"cross": {"score": kind}}
        try:
            models.parse({"kind": model, **small(model)[0], "attention": attention})
        except ValidationError:  # not every model has every score
            continue
        found.append(attention)
    return found


def name(site: dict[str, Any]) -> str:
    parts = [[part] if isinstance(part, str) else part.values() for part in site.values()]
    return "-".join(str(value) for part in parts for value in part if value is not None)


def with_fertility(raw: dict[str, Any]) -> dict[str, Any]:
    """Little of it, where the attention spends any: bounds that bind."""
    site = {**raw["attention"].get("default", {}), **raw["attention"].get("cross", {})}
    named = ((biases, site.get("bias")), (transforms, site.get("transform")))
    kinds = [(family, part if isinstance(part, str) else part["kind"]) for family, part in named if part]
    spends = any(family.get(kind).needs_upper for family, kind in kinds)
    return {**raw, "fertility": {"kind": "constant", "value": 0.7}} if spends else raw


PLAIN, BOUNDED = [
    [
        pytest.param({"kind": kind, **shape}, id=f"{kind}{number}")
        for kind in models.kinds() if field in models.get(kind).model_fields
        for number, shape in enumerate(small(kind))
    ]
    for field in ("kind", "max_length")
]  # fmt: skip
WITH_MEMORY = [
    pytest.param({"kind": kind, **small(kind)[0], "attention": {"cross": site}}, id=f"{kind}0-memory-{label}")
    for kind in models.kinds() if "cross" in roles(kind) for label, site in MEMORY.items()
]  # fmt: skip
PATTERNED = [
    pytest.param(
        {"kind": "transformer", **SMALL["transformer"][0],
         "attention": {role: {"pattern": pattern, "budget": 3, **site} for role in ("encoder_self", "decoder_self")}},
        id=f"transformer0-{pattern}-{name(site)}",
    )
    for pattern in patterns.kinds() if patterns.get(pattern).from_budget(3, "encoder_self")
    for site in ({"transform": "softmax"}, {"transform": "topk"}, {"transform": "softmax", "backend": "banded"})
    if patterns.get(pattern).sparse or "backend" not in site
]  # fmt: skip
PATTERNED += [
    pytest.param(
        {"kind": "transformer", **SMALL["transformer"][0],
         "attention": {role: {"transform": "topk_oow", "budget": budget} for role in ("encoder_self", "decoder_self")}},
        id=f"transformer0-topk_oow-{budget}",
    )
    for budget in (2, 3)
]  # fmt: skip
"""Every pattern on both self-attentions, alone and with a transform that takes a budget, too."""
CASES = [
    *(
        pytest.param(
            with_fertility({"kind": kind, **small(kind)[0], "attention": {"default": site}}), id=f"{kind}0-{name(site)}"
        )
        for kind in models.kinds()
        for site in sites(kind)
    ),
    *(
        pytest.param(
            with_fertility({"kind": kind, **small(kind)[0], "attention": attention}),
            id=f"{kind}0-{'-'.join([*attention, name(next(iter(attention.values())))])}",
        )
        for kind in models.kinds()
        for attention in at_some_sites(kind)
    ),
    *WITH_MEMORY,
    *PATTERNED,
    *(
        pytest.param(
            {"kind": kind, **small(kind)[0], "attention": {"cross": {"pattern": pattern, "budget": 2}}},
            id=f"{kind}0-cross-{pattern}",
        )
        for kind in models.kinds()
        for pattern in patterns.kinds()
        if "cross" in roles(kind) and patterns.get(pattern).from_budget(2, "cross")
    ),
    *(plain for plain in PLAIN if not str(plain.id).endswith("0")),
]
"""The first shape of each model with everything that can stand in it; the other shapes as they are."""
EACH = pytest.mark.parametrize("raw", CASES)
PRECISION = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"]
)


def build(raw: dict[str, Any], dtype: torch.dtype = torch.float64, seed: int = 3) -> Seq2SeqModel:
    torch.manual_seed(seed)
    joint = raw.get("tie") == "all"
    model = models.parse({**fitted(raw, dropout=0.0), **raw}).build(
        Sizes(VOCABULARY, VOCABULARY, joint, PAD, max(LENGTHS))
    )
    for parameter in model.parameters():  # norms, biases and alphas that matter, too
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def tokens(lengths: tuple[int, ...], seed: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Ids padded on the right, and which of them are real."""
    width = width or max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), width), generator=torch.Generator().manual_seed(seed))
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    return ids.masked_fill(~valid, PAD), valid


def batch() -> tuple[Source, Tensor, Tensor]:
    source, target_in = Source(*tokens(LENGTHS, 1)), tokens(TARGETS, 2)[0]
    target_in[:, 0] = BOS
    return source, target_in, tokens(TARGETS, 2)[1]


def logits(model: Seq2SeqModel, source: Source, target_in: Tensor) -> Tensor:
    return model.logits(model.decode(model.encode(source), target_in).hidden)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
