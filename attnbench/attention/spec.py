"""AttentionSpec: the choice of every site of a model, budgets resolved, capabilities checked when the spec is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from attnbench.attention.modules.base import Attention, ModuleField, Site
from attnbench.attention.modules.multihead import MultiHeadSpec
from attnbench.attention.patterns.base import PatternField
from attnbench.attention.patterns.full import FullSpec
from attnbench.attention.scores.base import ScoreField
from attnbench.attention.scores.dot import ScaledDotSpec
from attnbench.attention.transforms.base import TransformField
from attnbench.attention.transforms.softmax import SoftmaxSpec
from attnbench.attention.types import ROLES, Dims, Role
from attnbench.core.spec import Spec

Budget = int | Literal["inf"]


def is_bare(spec: Spec) -> bool:
    """True when nothing but the name was given, so that a budget may fill in the rest."""
    return not spec.model_fields_set - {"kind"}


class SiteSpec(Spec):
    """One attention site: the five stages of the pipeline."""

    module: ModuleField = Field(default_factory=MultiHeadSpec)
    """What the layer calls."""
    score: ScoreField = Field(default_factory=ScaledDotSpec)
    """How alike query and key are."""
    pattern: PatternField = Field(default_factory=FullSpec)
    """Who may look at whom before seeing data."""
    transform: TransformField = Field(default_factory=SoftmaxSpec)
    """From scores to weights."""
    budget: Budget | None = None
    """Attended positions of an ordinary row: fills in the bare kinds that take one. `inf`: dense attention."""
    sparsify: Literal["train", "both"] = "both"
    """`train`: softmax instead of the transform whenever the model is in eval mode (the papers' row "T")."""

    @field_validator("budget", mode="before")
    @classmethod
    def _infinite(cls, raw: Any) -> Any:
        return "inf" if isinstance(raw, float) and math.isinf(raw) and raw > 0 else raw

    @field_validator("budget")
    @classmethod
    def _positive(cls, value: Budget | None) -> Budget | None:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"a budget is a whole number of positions from 1 on, or inf, not {value}")
        return value

    def resolved(self, role: Role) -> Self:
        """The same site with its budget spent on the bare kinds that take one. Raises ValueError where none does."""
        parts: dict[str, Spec] = {}
        if self.budget is not None:
            probe = 1 if self.budget == "inf" else self.budget
            for name, dense in (("pattern", FullSpec()), ("transform", SoftmaxSpec())):
                part = getattr(self, name)
                filled = part.from_budget(probe, role) if is_bare(part) else None
                if filled is not None:
                    parts[name] = dense if self.budget == "inf" else filled
            if not parts:
                raise ValueError(
                    f"the budget {self.budget} has no taker: neither pattern '{self.pattern.kind}' nor transform "
                    f"'{self.transform.kind}' takes one; name one bare (like `transform: topk`) or drop the budget"
                )
        site = self.replace(**parts, budget=None)
        site.transform.require()
        for name in ("module", "pattern", "transform"):
            part = getattr(site, name)
            if role not in part.roles:
                raise ValueError(
                    f"{name} '{part.kind}' cannot stand at {role} (it can at: {', '.join(sorted(part.roles))})"
                )
        return site

    def build(self, role: Role, width: int, dims: Dims, dropout: float) -> Attention:
        """The module of one layer."""
        site = Site(self.score, self.pattern, self.transform, self.sparsify)
        return self.module.build(site, role, width, dims, dropout)


class AttentionSpec(Spec):
    """`default` for every site; a site's own mapping is laid over it, field by field."""

    default: SiteSpec = Field(default_factory=SiteSpec, exclude=True)
    """The choice for every site that says nothing else; spent on the sites when the spec is read."""
    encoder_self: SiteSpec = Field(default_factory=SiteSpec)
    """Encoder self-attention."""
    decoder_self: SiteSpec = Field(default_factory=SiteSpec)
    """Decoder self-attention (causal)."""
    cross: SiteSpec = Field(default_factory=SiteSpec)
    """Decoder attention over the source."""

    @model_validator(mode="before")
    @classmethod
    def _lay_over_default(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        default = raw.get("default", {})
        if isinstance(default, SiteSpec):
            default = {name: getattr(default, name) for name in default.model_fields_set}
        try:
            SiteSpec.model_validate(default)
        except ValidationError:  # reported once, at `default`
            default = {}
        sites = {}
        for role in ROLES:
            own = raw.get(role, {})
            if isinstance(default, Mapping) and isinstance(own, Mapping):
                sites[role] = {**default, **own}
                if "budget" not in own and ("pattern" in own or "transform" in own):
                    # an inherited budget serves the site only if its own choice takes one
                    sites[role]["budget"] = default.get("budget") if _takes_budget(sites[role], role) else None
        return {**raw, **sites}

    @field_validator(*ROLES)
    @classmethod
    def _resolve(cls, site: SiteSpec, info: ValidationInfo) -> SiteSpec:
        assert info.field_name in ROLES
        return site.resolved(info.field_name)

    @model_validator(mode="after")
    def _forget_default(self) -> Self:
        # the sites say all: two ways to write the same sites are one spec
        object.__setattr__(self, "default", SiteSpec())
        self.__pydantic_fields_set__.discard("default")
        return self

    def site(self, role: Role) -> SiteSpec:
        return getattr(self, role)


def _takes_budget(raw: Mapping[str, Any], role: Role) -> bool:
    try:
        SiteSpec.model_validate({**raw, "budget": 1}).resolved(role)
    except ValueError:
        return False
    return True
