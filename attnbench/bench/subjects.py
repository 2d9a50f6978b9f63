"""The models that are timed: Transformers of several sizes, models of other kinds, and those of a spec's cells."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from attnbench.attention.transforms.base import TransformSpec, transforms
from attnbench.attention.types import ROLES
from attnbench.bench import sentences
from attnbench.bench.ops import TRANSFORMS, kind_of, mechanism
from attnbench.data.base import PAD
from attnbench.models.base import ModelSpec, Seq2SeqModel, Sizes, models
from attnbench.models.transformer import TransformerSpec
from attnbench.search.base import searches
from attnbench.train.optim import optimizers

SMOOTHING = 0.1
"""Of labels, in training."""
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"preset": "tiny"},
    "mini": {"preset": "mini", "layers": 2},
    "iwslt": {"preset": "iwslt"},
    "base": {"preset": "base"},
}
"""Presets of the Transformer; `mini` with two layers, as other packages' benchmarks have it."""
COMPARED = ("softmax", "topk, k = 8", "sparsemax", "entmax15", "entmax, learned alpha")
PATTERNS = ("window, n = 8", "random, n = 8")
"""What decoding is timed with beside them, wherever such a pattern can stand; on a processor a step reads these keys
alone."""
QUANTIZED = ", int8"
"""After the name of a transform: searched with products of whole numbers of 8 bits."""
DEFINED = " (dense)"
"""After the name of a transform: as it is defined, not as `auto` has it on a GPU."""


class Update(NamedTuple):
    """How a model is trained. tokens: padded ones a side of a batch, at most; None: sentences.TOKENS. clip: 0 leaves
    the gradient alone. optimizer: as YAML has it."""

    tokens: int | None = None
    smoothing: float = SMOOTHING
    clip: float = 1.0
    optimizer: Mapping[str, Any] = {"kind": "adam"}


class Subject(NamedTuple):
    """A model that is timed; a process of its own can be sent one.

    group: what it is compared within; name: what it is called there. model, search: as YAML has them; without a search
    it is searched as a load says. quantization: of that search.
    """

    group: str
    name: str
    model: Mapping[str, Any]
    sizes: Sizes
    update: Update = Update()
    search: Mapping[str, Any] | None = None
    quantization: str | None = None

    def digest(self) -> str:
        """Equal for subjects that differ in their name alone, and across versions that give fields new ones beside
        them."""
        search = None if self.search is None else searches.parse(dict(self.search)).canonical()
        optimizer = optimizers.parse(dict(self.update.optimizer)).canonical()
        plain = self._replace(
            name="", model=self.spec.canonical(), search=search, update=self.update._replace(optimizer=optimizer)
        )
        # the last was a field once, and files with it shall be known again
        told = [*plain, self.group in SIZES and self.counted]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def spec(self) -> ModelSpec:
        return models.parse(dict(self.model))

    @property
    def counted(self) -> bool:
        """Whether its products, as they are defined, say how much there is to do: under a pattern they are of keys that
        nobody looks at."""
        sites = (self.model.get("attention") or {}).values()
        given = [site.get("pattern") or "full" for site in sites if isinstance(site, Mapping)]
        return all((each if isinstance(each, str) else each["kind"]) == "full" for each in given)

    @property
    def most(self) -> int | None:
        """Tokens that it can read, EOS counted; None: any number."""
        return self.spec.most

    @property
    def longest(self) -> int:
        """Words of its longest sentence: what its data are known to have, else as many as other models have."""
        known = self.sizes.longest_source
        longest = sentences.LONGEST if known is None else known - 1
        return longest if self.most is None else min(longest, self.most - 1)

    @property
    def source_limit(self) -> int | None:
        """Tokens of the longest source that it can be given; None: there is no limit."""
        return min((each for each in (self.most, self.sizes.longest_source) if each is not None), default=None)

    def build(self, device: torch.device, *, defined: bool = False, dropout: bool = True) -> Seq2SeqModel:
        """The model, with the same weights at every call. defined: with attention as it is defined, whatever is
        named. dropout: False leaves it out."""
        raw = dict(self.model)
        if defined and isinstance(raw.get("attention"), Mapping):
            raw["attention"] = {site: _dense(given) for site, given in raw["attention"].items()}
        torch.manual_seed(0)
        return models.parse(raw if dropout else _without_dropout(raw)).build(self.sizes).to(device)


def _dense(site: Any) -> Any:
    return {**site, "backend": "dense"} if isinstance(site, Mapping) and "transform" in site else site


def _without_dropout(raw: Any) -> Any:
    """The same without dropout, wherever it stands."""
    if isinstance(raw, Mapping):
        return {key: 0.0 if _drops(key, value) else _without_dropout(value) for key, value in raw.items()}
    return [_without_dropout(each) for each in raw] if isinstance(raw, list) else raw


def _drops(key: str, value: Any) -> bool:
    return key.endswith("dropout") and isinstance(value, float)


def transformer(size: str, name: str) -> Subject:
    """The Transformer of that size, with the mechanism of that name at every site that it can stand at."""
    plain = name.removesuffix(QUANTIZED).removesuffix(DEFINED)
    spec = transforms.parse(TRANSFORMS[plain]) if plain in TRANSFORMS else mechanism(kind_of(plain))
    site: dict[str, Any] = {"transform" if isinstance(spec, TransformSpec) else "pattern": spec.dump()}
    if DEFINED in name:
        site["backend"] = "dense"
    model = fields_of(size, attention={role: site for role in ROLES if role in spec.roles})
    quantization = "int8" if name.endswith(QUANTIZED) else None
    return Subject(size, name, model.dump(), words(), quantization=quantization)


def fields_of(size: str, **more: Any) -> TransformerSpec:
    """The Transformer of that size."""
    spec = models.parse({"kind": "transformer", **SIZES[size], "dropout": 0.1, **more})
    assert isinstance(spec, TransformerSpec)
    return spec


def words() -> Sizes:
    """One vocabulary for both sides."""
    return Sizes(sentences.WORDS, sentences.WORDS, True, PAD)


def compared(device: torch.device, also: Iterable[str] = ()) -> list[str]:
    """Names of the mechanisms that are timed there. also: of others."""
    names = [*COMPARED, *also]
    defined = [name + DEFINED for name in names[1:]] if device.type == "cuda" else []
    return [*names, *defined]


def families(width: int, tokens: int | None = None) -> list[Subject]:
    """Models of every kind of that width, at most two layers a side but for convolutions. tokens: of a batch."""
    recurrent = {"layers": 2, "width": width}
    fed = {**recurrent, "kind": "lstm", "input_feeding": "attentional"}
    found: dict[str, dict[str, Any]] = {
        "Transformer": {"kind": "transformer", "layers": 2, "width": width, "heads": 4, "ffn": 4 * width},
        "LSTM, no attention": {
            **recurrent, "kind": "lstm", "readout": "state", "attention": {"cross": {"module": "none"}},
        },
        "LSTM, softmax": {**fed, "attention": {"cross": {"score": "bilinear"}}},
        "LSTM, csparsemax": {
            **fed, "fertility": {"kind": "constant", "value": 2},
            "attention": {"cross": {"score": "bilinear", "transform": "csparsemax"}},
        },
        "LSTM, fixed-size memory": {
            **recurrent, "kind": "lstm", "bidirectional": True,
            "attention": {"cross": {"module": {"kind": "fixed_memory", "slots": 16}}},
        },
        "GRU, additive": {
            **recurrent, "kind": "gru", "layers": 1, "bidirectional": True, "query": "previous", "readout": "concat",
            "attention": {"cross": {"score": "additive"}},
        },
        "ConvS2S": {"kind": "convs2s", "layers": 4, "width": width, "embedding": width, "share_attention": True},
    }  # fmt: skip
    update = Update(tokens)
    return [Subject(f"{width} wide", name, models.parse(raw).dump(), words(), update) for name, raw in found.items()]
