"""Fixed-size memory attention (Britz et al. 2017): the encoder writes M contexts, and queries choose among those.

Once a source: `alpha_s = f_enc(W_alpha h_s)`, `C_m = sum_s alpha_sm h_s`. Each query: `beta = f_dec(W_beta q)`,
`c = sum_m beta_m C_m`. No key is left to look at, so a query costs the same whatever the length of the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from torch import Tensor, nn

from attnbench.attention.modules._stages import blank
from attnbench.attention.modules.base import Attention, ModuleSpec, modules
from attnbench.attention.site import Site, Stage
from attnbench.attention.transforms.base import TransformField, TransformSpec
from attnbench.attention.transforms.softmax import SoftmaxSpec, softmax
from attnbench.attention.types import AttentionOutput, Dims, History, Memory, Positions, Role
from attnbench.core.dropout import Dropout

Offset = Literal["as_printed", "plus_one"]


class FixedMemory(Attention):
    """See FixedMemorySpec. The Memory holds contexts [B, 1, M, D], neither keys nor mask."""

    def __init__(self, spec: FixedMemorySpec, site: Site, dims: Dims, dropout: float) -> None:
        super().__init__()
        single = dims._replace(heads=1)
        self.encoder_transform = spec.encoder_transform.build(single)
        self.transform = site.transform.build(single)
        self.over_time = spec.enc_norm == "time"
        self.offset: Offset | None = spec.pe_offset if spec.positions else None
        spec.require(dims.longest_source)
        self.longest = spec.longest or dims.longest_source or 1
        self.dense_in_eval = site.sparsify == "train"
        self.dropout = Dropout(dropout)
        self.context_width = dims.key_width
        self.write_weight = nn.Parameter(torch.empty(spec.slots, dims.key_width))
        self.read_weight = nn.Parameter(torch.empty(spec.slots, dims.query_width))
        for weight in (self.write_weight, self.read_weight):
            nn.init.xavier_uniform_(weight)

    def memorize(
        self,
        keys: Float[Tensor, "B K D"],
        valid: Bool[Tensor, "B K"] | None,
        values: Float[Tensor, "B K D"] | None = None,
        *,
        need_weights: bool = False,
    ) -> Memory:
        keys = blank(keys, valid)
        values = keys if values is None else blank(values, valid)
        logits = _project(keys, self.write_weight)
        if self.offset is not None:
            logits = logits * encodings(logits, valid, self.longest, self.offset)
        # a state that is masked writes nothing: sigmoid of its logits would be 0.5
        if self.over_time:
            mask = None if valid is None else valid[:, None, None, :]
            written = self.encoder_transform(logits.transpose(1, 2).unsqueeze(1), valid=mask)
        else:
            mask = None if valid is None else valid[:, None, :, None]
            written = self.encoder_transform(logits.unsqueeze(1), valid=mask).transpose(2, 3)
        contexts = written.to(values.dtype) @ values.unsqueeze(1)
        return Memory(None, contexts, written=written[:, 0].transpose(1, 2) if need_weights else None)

    def forward(
        self,
        query: Float[Tensor, "B Q D"],
        memory: Memory,
        positions: Positions,
        *,
        history: History | None = None,
        need_weights: bool = False,
    ) -> AttentionOutput:
        transform = softmax if self.dense_in_eval and not self.training else self.transform
        chosen = transform(_project(query, self.read_weight).unsqueeze(1))
        contexts = memory.values
        context = (self.dropout(chosen).to(contexts.dtype) @ contexts).squeeze(1)
        weights = None
        if need_weights and memory.written is not None:
            with torch.autocast(chosen.device.type, enabled=False):
                weights = chosen @ memory.written.to(chosen.dtype).transpose(1, 2).unsqueeze(1)
        return AttentionOutput(context, weights, history)


def encodings(
    like: Float[Tensor, "B S M"], valid: Bool[Tensor, "B S"] | None, longest: int, offset: Offset
) -> Float[Tensor, "#B S M"]:
    """`l_sm`: for each slot a profile over the source that sums to 1; early slots favour its start, late ones its end.

    `L_sm = (1 - m/M)(1 - s/S) + (m/M)(s/S)`, m = 1..M, s = 0.., S = longest, divided by its sum over the valid s; where
    that is 0 (slot M of a source of one token), uniform. `plus_one`: m/(M+1) and (s+1)/(S+1). s beyond S counts as S.
    """
    states, slots = like.shape[1:]
    shift = 1 if offset == "plus_one" else 0
    slot = torch.arange(1, slots + 1, device=like.device, dtype=like.dtype) / (slots + shift)
    time = torch.arange(shift, states + shift, device=like.device, dtype=like.dtype) / (longest + shift)
    time = time.clamp(max=1).unsqueeze(-1)
    profile = ((1 - slot) * (1 - time) + slot * time).unsqueeze(0)
    uniform = torch.ones_like(profile)
    if valid is not None:
        mask = valid.unsqueeze(-1).to(like.dtype)
        profile, uniform = profile * mask, uniform * mask
    profile = torch.where((profile > 0).any(1, keepdim=True), profile, uniform)
    return profile / profile.sum(1, keepdim=True).clamp(min=torch.finfo(like.dtype).tiny)  # no tokens: 0 / tiny


def _project(states: Float[Tensor, "B N D"], weight: Float[Tensor, "M D"]) -> Float[Tensor, "B N M"]:
    """Logits of each slot, in float32 at least: ties of low precision would let top-k keep too many."""
    if states.dtype.itemsize < 4:
        states, weight = states.float(), weight.float()
    with torch.autocast(states.device.type, enabled=False):
        return nn.functional.linear(states, weight)


@modules.register
class FixedMemorySpec(ModuleSpec):
    """`slots` contexts, written while encoding; the transform is over these slots. A query looks at no source state."""

    kind: Literal["fixed_memory"] = "fixed_memory"
    roles: ClassVar[frozenset[Role]] = frozenset({"cross"})
    stages: ClassVar[frozenset[Stage]] = frozenset({"transform"})
    headed: ClassVar[bool | None] = False
    paper: ClassVar[str] = "Britz et al. 2017, sections 3.1 to 3.3"

    slots: int = Field(default=32, ge=1)
    """How many contexts; the paper's K."""
    encoder_transform: TransformField = Field(default_factory=SoftmaxSpec)
    """How a source state is spread over the slots; `sparsify` leaves it alone."""
    enc_norm: Literal["k", "time"] = "k"
    """What the encoder's weights are normalised over: k, the slots, as printed in the paper; time, the source."""
    positions: bool = False
    """Position encodings inside the encoder's scoring function (eq. 11)."""
    pe_offset: Literal["as_printed", "plus_one"] = "as_printed"
    """Position encodings with s/S and k/K, or symmetric with (s+1)/(S+1) and k/(K+1)."""
    longest: int | None = Field(default=None, ge=1)
    """S of the position encodings: the longest source of the data, in tokens with EOS; null: as the data say."""

    @model_validator(mode="after")
    def _encodes(self) -> Self:
        transform = self.encoder_transform
        transform.require()
        _unbounded("encoder_transform", transform)
        if "cross" not in transform.roles:
            raise ValueError(f"encoder_transform: the transform '{transform.kind}' cannot stand at cross")
        if self.enc_norm == "time" and transform.rows == "gates":
            raise ValueError(
                f"enc_norm 'time' means nothing with encoder_transform '{transform.kind}', which normalises over "
                "nothing; drop enc_norm, or take a transform like 'softmax'"
            )
        return self

    @property
    def averages(self) -> bool:
        return self.enc_norm == "time"

    @property
    def most(self) -> int:
        return self.slots

    def unused(self) -> Iterator[tuple[str, str]]:
        if not self.positions:
            for name in ("pe_offset", "longest"):
                if self.is_set(name):
                    yield name, "it belongs to `positions: true`"
        if self.enc_norm == "time":
            return
        softmax = self.encoder_transform.is_softmax(self.slots)
        if softmax and not self.encoder_transform.is_softmax():
            yield "encoder_transform", f"it keeps all of {self.slots} slots, as softmax does"
        if softmax and self.positions and self.slots == 1:
            yield "positions", "one slot takes every state whole, wherever it stands"

    def check(self, site: Site, query_width: int, key_width: int) -> None:
        _unbounded("transform", site.transform)

    def require(self, longest_source: int | None) -> None:
        if self.positions and self.longest is None and longest_source is None:
            raise ValueError("the position encodings need the length of the longest source: give module.longest")

    def build(self, site: Site, role: Role, width: int, dims: Dims, dropout: float) -> FixedMemory:
        return FixedMemory(self, site, dims, dropout)


def _unbounded(field: str, transform: TransformSpec) -> None:
    if transform.needs_upper:
        raise ValueError(
            f"{field}: the transform '{transform.kind}' needs what each source position has received, and the module "
            "'fixed_memory' knows no source position; take another transform, or the module 'single_head'"
        )
