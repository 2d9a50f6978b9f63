"""AttentionSpec and CrossSpec: the choice at each site of a model, budgets spent, capabilities checked at reading."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from attnbench.attention.backends.base import choose, require_width
from attnbench.attention.biases.base import BiasField
from attnbench.attention.coverage.base import CoverageField
from attnbench.attention.modules.base import Attention, ModuleField, modules
from attnbench.attention.modules.multihead import MultiHeadSpec
from attnbench.attention.modules.single_head import SingleHeadSpec
from attnbench.attention.patterns.base import PatternField, PatternSpec
from attnbench.attention.patterns.full import FullSpec
from attnbench.attention.scores.additive import AdditiveSpec
from attnbench.attention.scores.base import ScoreField
from attnbench.attention.scores.dot import ScaledDotSpec
from attnbench.attention.site import Site, Stage
from attnbench.attention.transforms.base import TransformField, TransformSpec
from attnbench.attention.transforms.softmax import SoftmaxSpec
from attnbench.attention.types import MOST_POSITIONS, ROLES, Backend, Dims, Role
from attnbench.core.spec import Spec

Budget = int | Literal["inf"]


def spend(part: PatternSpec | TransformSpec, budget: int, role: Role) -> PatternSpec | TransformSpec | None:
    """`part` with the fields that a budget decides; None where it takes none, or where those fields are given."""
    filled = part.from_budget(budget, role)
    if filled is None:
        return None
    decided = filled.model_fields_set - {"kind"}
    if decided & part.model_fields_set:
        return None
    try:
        return part.replace(**{name: getattr(filled, name) for name in decided})
    except ValidationError:  # a field that was given excludes what the budget would set, as topk's ratio does its k
        return None


def _own_number(name: str, part: PatternSpec | TransformSpec, role: Role) -> list[str]:
    """Fields of a part that keep it from taking a budget: `transform 'topk' has k: 8 of its own`."""
    found, given = [], {field: getattr(part, field) for field in sorted(part.model_fields_set)}
    for field, value in given.items():
        with contextlib.suppress(ValidationError):
            rest = type(part).model_validate({each: given[each] for each in given if each != field})
            if spend(rest, 1, role) is not None:
                found.append(f"{name} '{part.kind}' has {field}: {value} of its own")
    return found


class SiteSpec(Spec):
    """One attention site: the stages of the pipeline."""

    module: ModuleField = Field(default_factory=MultiHeadSpec)
    """What the layer calls."""
    score: ScoreField = Field(default_factory=ScaledDotSpec)
    """How alike query and key are."""
    coverage: CoverageField | None = None
    """What tells the score how much each key has received."""
    bias: BiasField | None = None
    """What is added to the score."""
    pattern: PatternField = Field(default_factory=FullSpec)
    """Who may look at whom before seeing data."""
    transform: TransformField = Field(default_factory=SoftmaxSpec)
    """From scores to weights."""
    budget: Budget | None = None
    """Attended positions of an ordinary row, for a pattern or transform without its own. `inf`: dense attention."""
    sparsify: Literal["train", "both"] = "both"
    """`train`: softmax instead of the transform whenever the model is in eval mode (the papers' row "T")."""
    backend: Backend = "auto"
    """`banded` visits no keys but those around a query; `auto` takes it where a pattern leaves out enough for that to
    pay; `dense` makes all scores. On a GPU `flex` skips blocks of scores by a pattern: `auto` takes it in long
    passes in half precision; `triton` never writes the scores of top-k, sparsemax and entmax."""

    @field_validator("budget", mode="before")
    @classmethod
    def _count_or_inf(cls, raw: Any) -> Any:
        if isinstance(raw, float) and math.isinf(raw) and raw > 0:
            return "inf"
        count = isinstance(raw, int) and not isinstance(raw, bool) and raw >= 1
        if raw is not None and raw != "inf" and not count:
            raise ValueError(f"a budget is a whole number of positions from 1 on, or inf, not {raw!r}")
        if isinstance(raw, int) and raw > MOST_POSITIONS:
            raise ValueError(f"a budget of {raw} is more positions than there can be; write inf")
        return raw

    def _no_taker(self, role: Role) -> str:
        pattern = self.pattern
        if role in pattern.roles:
            return f"pattern '{pattern.kind}' takes none"
        where = " and ".join(sorted(pattern.roles))
        return f"pattern '{pattern.kind}' stands at {where} alone (say {role}: {{pattern: full}})"

    def resolved(self, role: Role) -> Self:
        """The same site with its budget spent on what takes one. Raises ValueError where nothing does."""
        parts: dict[str, Spec] = {}
        if self.budget is not None:
            probe = 1 if self.budget == "inf" else self.budget
            for name, dense in (("pattern", FullSpec()), ("transform", SoftmaxSpec())):
                filled = spend(getattr(self, name), probe, role)
                if filled is not None:
                    parts[name] = dense if self.budget == "inf" else filled
            if not parts:
                own = [*_own_number("pattern", self.pattern, role), *_own_number("transform", self.transform, role)]
                mend = "drop that, or the budget"
                if not own:
                    own = [self._no_taker(role), f"transform '{self.transform.kind}' takes none"]
                    mend = "name one that does (like `transform: topk`), or drop the budget"
                raise ValueError(f"the budget {self.budget} has no taker at {role}: {', and '.join(own)}; {mend}")
        site = self.replace(**parts, budget=None)
        if role in site.pattern.roles:  # else that is the fault, told below
            site.pattern.require()
        site.transform.require()
        if site.sparsify == "train" and site.transform.rows == "gates":
            raise ValueError(
                f"sparsify 'train' would put softmax in place of '{site.transform.kind}' in eval mode, the mean of the "
                "values in place of a sum; drop it"
            )
        for name in ("module", "bias", "pattern", "transform"):
            part = getattr(site, name)
            if part is not None and role not in part.roles:
                raise ValueError(
                    f"{name} '{part.kind}' cannot stand at {role} (it can at: {', '.join(sorted(part.roles))})"
                )
        for name in sorted(set(get_args(Stage)) - site.module.stages):
            part = getattr(site, name)
            if part != type(site).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"the module '{site.module.kind}' has no {name}; drop `{name}: {part.kind}`")
        if "score" in site.module.stages:
            choose(site._stages(), role)
        return site

    def unused_at(self, role: Role) -> Iterator[tuple[str, str]]:
        """As `unused`, of a resolved site that stands there."""
        scores = "score" in self.module.stages
        most = self.pattern.most(role) if scores else self.module.most
        kept, left = self.transform.keep(role), most
        if most is not None and kept is not None and kept.kind == self.pattern.kind == "window":
            left = most - (kept.most(role) or 0)  # a window lies within a wider one: those that it chooses among
        if left is not None and self.transform.is_softmax(left) and not self.transform.is_softmax():
            whose = f"the pattern '{self.pattern.kind}'" if scores else f"the module '{self.module.kind}'"
            keys = "one key" if most == 1 else f"{most} keys"
            yield "transform", f"{whose} leaves a row {keys} at most, and '{self.transform.kind}' keeps all"
        if self.backend != "auto" and not scores:
            yield "backend", f"the module '{self.module.kind}' compares no queries with keys"

    def _stages(self) -> Site:
        return Site(self.score, self.pattern, self.transform, self.sparsify, self.bias, self.coverage, self.backend)

    @property
    def spends(self) -> bool:
        """Whether it must know what each key may still receive."""
        return self._stages().spends

    @property
    def looks_back(self) -> str | None:
        """The stage that depends on what was attended before, so that a decoder must run step by step; None: none."""
        stages: dict[str, Any] = {"transform": self.transform, "bias": self.bias}
        for name, part in stages.items():
            if part is not None and part.needs_upper:
                return f"the {name} '{part.kind}'"
        return None if self.coverage is None else f"the coverage '{self.coverage.kind}'"

    def check(self, role: Role, query_width: int, key_width: int, heads: int = 1) -> None:
        """Raise ValueError where this cannot stand there between queries and keys of these widths. heads: of the
        model."""
        self.module.check(self._stages(), query_width, key_width)
        if "score" in self.module.stages and self.module.headed is not None:
            width = query_width // heads if self.module.headed else max(query_width, key_width)
            require_width(self.backend, width, role)

    def build(self, role: Role, width: int, dims: Dims, dropout: float) -> Attention:
        """The module of one layer."""
        return self.module.build(self._stages(), role, width, dims, dropout)


class CrossSiteSpec(SiteSpec):
    """The attention of a recurrent or convolutional decoder over the source."""

    module: ModuleField = Field(default_factory=SingleHeadSpec)
    """What the decoder calls."""
    score: ScoreField = Field(default_factory=AdditiveSpec)
    """How alike query and key are."""


class Sites(Spec):
    """`default` for every site; a site's own mapping is laid over it, field by field.

    A subclass has a field for each of its `roles`, all of the class `site_class`.
    """

    roles: ClassVar[tuple[Role, ...]]
    site_class: ClassVar[type[SiteSpec]] = SiteSpec

    default: SiteSpec = Field(default_factory=SiteSpec, exclude=True)
    """The choice for every site that says nothing else; spent on the sites when the spec is read."""

    @model_validator(mode="before")
    @classmethod
    def _lay_over_default(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        default = raw.get("default", {})
        if isinstance(default, SiteSpec):
            default = {name: getattr(default, name) for name in default.model_fields_set}
        quiet: list[Role] = [role for role in cls.roles if not raw.get(role)]
        try:
            shared = cls.site_class.model_validate(default)
        except ValidationError:  # told once, at `default`
            return {**raw, **{role: {} for role in quiet}}
        _check_shared(shared, quiet)
        sites = {}
        for role in cls.roles:
            own = raw.get(role, {})
            if isinstance(own, Mapping):
                sites[role] = {**_inherited(default, own), **own}
                if "budget" not in own and own.keys() & {"module", "pattern", "transform"}:
                    # an inherited budget serves the site only if its own choice takes one
                    sites[role]["budget"] = default.get("budget") if cls.takes_budget(sites[role], role) else None
        return {**raw, **sites}

    @field_validator(*ROLES, check_fields=False)
    @classmethod
    def _resolve(cls, site: SiteSpec, info: ValidationInfo) -> SiteSpec:
        assert info.field_name in ROLES
        return site.resolved(info.field_name)

    @model_validator(mode="after")
    def _forget_default(self) -> Self:
        # the sites say all: two ways to write the same sites are one spec
        object.__setattr__(self, "default", self.site_class())
        self.__pydantic_fields_set__.discard("default")
        return self

    @classmethod
    def takes_budget(cls, raw: Mapping[str, Any], role: Role) -> bool:
        """Whether a site written like this has something that a budget could go to."""
        try:
            cls.site_class.model_validate({**raw, "budget": 1}).resolved(role)
        except ValueError:
            return False
        return True

    def unused(self) -> Iterator[tuple[str, str]]:
        sites: dict[Role, SiteSpec] = {role: self.site(role) for role in self.roles}
        for role, site in sites.items():
            for path, why in site.unused_at(role):
                yield f"{role}.{path}", why
        dense_later: list[Role] = [role for role, site in sites.items() if site.sparsify == "train"]
        if dense_later and all(sites[role].transform.is_softmax() for role in dense_later):
            yield f"{dense_later[0]}.sparsify", "in eval mode softmax takes the transform's place, which is softmax"
        banded: list[Role] = [
            role for role, site in sites.items() if site.backend == "banded" and "score" in site.module.stages
        ]
        if banded and all(choose(sites[role]._stages(), role).backend == "dense" for role in banded):
            yield f"{banded[0]}.backend", "'banded' needs a pattern of self-attention that leaves keys out"

    def require(self, longest_source: int | None) -> None:
        """Raise ValueError when a module misses a field that this length, of the longest source, cannot replace."""
        for role in self.roles:
            try:
                self.site(role).module.require(longest_source)
            except ValueError as error:
                raise ValueError(f"attention.{role}: {error}") from None

    def site(self, role: Role) -> SiteSpec:
        return getattr(self, role)


class AttentionSpec(Sites):
    """The three sites of a Transformer. `default` is for every site; a site's own mapping is laid over it."""

    roles: ClassVar[tuple[Role, ...]] = ROLES

    encoder_self: SiteSpec = Field(default_factory=SiteSpec)
    """Encoder self-attention."""
    decoder_self: SiteSpec = Field(default_factory=SiteSpec)
    """Decoder self-attention (causal)."""
    cross: SiteSpec = Field(default_factory=SiteSpec)
    """Decoder attention over the source."""


class CrossSpec(Sites):
    """The one site of a recurrent or convolutional model; `default` and `cross` say the same."""

    roles: ClassVar[tuple[Role, ...]] = ("cross",)
    site_class: ClassVar[type[SiteSpec]] = CrossSiteSpec

    default: CrossSiteSpec = Field(default_factory=CrossSiteSpec, exclude=True)
    """What `cross` is laid over; spent when the spec is read."""
    cross: CrossSiteSpec = Field(default_factory=CrossSiteSpec)
    """Decoder attention over the source."""


def _inherited(default: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What of `default` a site is laid over: not the stages that the site's own module does not have."""
    absent: set[str] = set()
    if "module" in own:
        with contextlib.suppress(ValueError):  # told at the site
            absent = set(get_args(Stage)) - modules.parse(own["module"]).stages
    return {name: value for name, value in default.items() if name not in absent}


def _check_shared(default: SiteSpec, roles: Sequence[Role]) -> None:
    """Tell what is wrong with `default` there, once, and not at each of the `roles` that inherit it whole."""
    faults = dict.fromkeys(filter(None, (_fault(default, role) for role in roles)))
    if faults:
        raise ValidationError.from_exception_data(
            "AttentionSpec",
            [
                InitErrorDetails(
                    type=PydanticCustomError("default_site", "{message}", {"message": fault}),
                    loc=("default",),
                    input=default,
                )
                for fault in faults
            ],
        )


def _fault(site: SiteSpec, role: Role) -> str | None:
    try:
        site.resolved(role)
    except ValueError as error:
        return str(error)
    return None
