"""What `attnbench speed` measures: a plan gives its sections as far as they are, whenever they are more."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from attnbench.attention.patterns.base import patterns
from attnbench.attention.transforms.base import TransformSpec, transforms
from attnbench.bench import ctranslate2, marian, models, nn_kinds, nn_transformer, ops, scaling, sentences, subjects
from attnbench.bench.machine import copies, products
from attnbench.bench.peers import Peer, serves
from attnbench.bench.processes import Recipe, together, with_peaks
from attnbench.bench.results import Section
from attnbench.bench.sentences import Load
from attnbench.bench.subjects import Subject, transformer
from attnbench.bench.timer import Case, Timing, Yardstick, measure
from attnbench.train.runtime import Runtime

_log = logging.getLogger("attnbench")

What = Literal["ops", "transforms", "attention", "train", "decode", "scaling"]
_REST = 0.3
"""Seconds after which threads of another package have ceased to wait in a loop: 0.2 where they are Intel's."""
_CHUNK = {"cpu": 0.2, "cuda": 0.03}
"""Seconds of one turn; a GPU's clock, and what else it does, differ less."""
BATCHES = 2
"""Of a timed update."""
_TRANSFORMS = "transforms of scores"
_ATTENTION = "attention, from projected queries, keys and values"
_TRAINING, _TRAINING_BESIDE = "training, target tokens", "training beside other packages, target tokens"
_MODELS = ("models of every kind", "the cells of a spec")
_TRAINING_KINDS, _TRAINING_CELLS = (f"training of {what}, target tokens" for what in _MODELS)
_TRAINING_KINDS_BESIDE, _TRAINING_CELLS_BESIDE = (
    f"training of {what} beside other packages, target tokens" for what in _MODELS
)
_DECODING = "decoding, tokens of the best outputs"
_DECODING_BESIDE = "decoding beside other packages, tokens of the best outputs"
_DECODING_KINDS, _DECODING_CELLS = (f"decoding by {what}, tokens of the best outputs" for what in _MODELS)
_COST = "cost against"
_SHAPES = [(rows, length) for rows in (1, 64) for length in (26, 100)]
"""Sources that are decoded at a time, and how long they are."""


class Plan(NamedTuple):
    """quick: fewer and smaller cases, for a look before a release. only: kinds of mechanisms (KINDS); none: all. cells:
    of a spec, which are timed instead of the models that there are."""

    runtime: Runtime
    rounds: int
    quick: bool
    peers: list[Peer]
    sizes: list[str] | None = None
    only: Sequence[str] = ()
    cells: Sequence[Subject] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.runtime.product_type

    @property
    def half(self) -> bool:
        return self.runtime.precision != "fp32"

    def time(
        self, cases: list[Case], yardstick: Yardstick | None, *, loose: bool = False, rest: float = 0,
        apart: bool = False, replay: bool = False,
    ) -> list[Timing]:  # fmt: skip
        """loose: the cases are of the precision, not float32 whatever it is. apart: in other processes, which wait for
        their device themselves. yardstick, replay: as in measure."""
        device = torch.device("cpu") if apart else self.runtime.device
        return measure(
            cases, rounds=self.rounds, chunk=_CHUNK[device.type] * (0.25 if self.quick else 1), device=device,
            loose=loose and self.half, rest=rest, replay=replay, yardstick=yardstick,
        )  # fmt: skip

    @property
    def every_backend(self) -> bool:
        """Whether mechanisms are timed as they are defined, too, on a processor: what compiled code and bands give."""
        return not self.quick and self.runtime.device.type == "cpu"

    @property
    def products(self) -> Yardstick:
        return products(self.runtime.device, self.dtype)

    def beside(self, recipes: list[Recipe], *, peaks: bool = False) -> list[Timing]:
        """Each in a process of its own; all do what the first does, in float32 but for those of ours. peaks: with the
        memory that each takes."""
        threads, device = torch.get_num_threads(), self.runtime.device
        cost = None
        if device.type == "cpu":  # the machine's own products are timed in this process
            counted = recipes[0].make(*recipes[0].given).cost
            cost = None if counted is None else counted()
            del counted  # and what it holds
        with together(recipes, threads, device) as started:
            known = [each.case for each in started]
            shared = [not each.coarse and (each is known[0] or not self.half) for each in known]
            cases = [
                each._replace(cost=(lambda: cost) if own else None) for each, own in zip(known, shared, strict=True)
            ]
            timed = self.time(cases, self.products if cost else None, loose=True, rest=_REST, apart=True)
        timed = [each._replace(pace=None) for each in timed]
        return with_peaks(timed, recipes, threads, device) if peaks else timed

    def wants(self, name: str) -> bool:
        """Whether a case is asked for; what others are multiples of, and other packages, always are."""
        kind = ops.kind_of(name)
        return not self.only or kind in {*self.only, "softmax"} or kind not in every_kind()

    @property
    def of_sizes(self) -> list[str]:
        """The sizes of Transformers that are timed."""
        return [] if self.cells else self.sizes or (["tiny"] if self.quick else ["mini", "iwslt"])

    @property
    def families(self) -> list[Subject]:
        """Models of every kind, where neither sizes nor mechanisms were asked for."""
        if self.sizes or self.only or self.cells:
            return []
        return subjects.families(128, tokens=1024) if self.quick else subjects.families(256)

    @property
    def groups(self) -> set[str]:
        """What models are compared within."""
        return {*self.of_sizes, *(each.group for each in (*self.families, *self.cells))}

    @property
    def work(self) -> dict[str, Any]:
        """What whole models are timed with; figures of other work are not compared."""
        named = {size: transformer(size, "softmax") for size in self.of_sizes}
        return {
            "vocabulary": sentences.WORDS,
            "padded tokens a side": sentences.TOKENS,
            "longest sentence": sentences.LONGEST,
            "batches": BATCHES,
            "output tokens": sentences.STEPS,
            "models": {name: each.digest() for name, each in named.items()}
            | {each.name: each.digest() for each in self.families},
        }

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of what is decoded: sources at a time, and how long they are."""
        return [(16, 26)] if self.quick else _SHAPES

    @property
    def loads(self) -> list[Load]:
        return [Load(*shape, beam) for shape in self.shapes for beam in (1, 5)]


_OF_TRAINING = set(map(ops.kind_of, subjects.COMPARED))
_BY_ITSELF: dict[What, set[str]] = {
    "transforms": set(map(ops.kind_of, ops.TRANSFORMS)),
    "attention": {*map(ops.kind_of, ops.attention_names()), *ops.PATTERNS},
    "train": _OF_TRAINING,
    "decode": _OF_TRAINING | set(map(ops.kind_of, subjects.PATTERNS)),
}
"""Kinds of mechanisms that are timed where none is asked for."""


def kinds_of(what: What) -> set[str]:
    """Of mechanisms that can be timed, one's own among them; `scaling` times all its cases, whichever."""
    if what == "scaling":
        return set()
    if what == "ops":
        return kinds_of("transforms") | kinds_of("attention")
    specs = {kind: transforms.get(kind) for kind in transforms.kinds()}
    if what == "transforms":  # of scores alone, which have no site to bring a window
        return {kind for kind, spec in specs.items() if spec.keep == TransformSpec.keep}
    able = {kind for kind, spec in specs.items() if "encoder_self" in spec.roles and not spec.needs_upper}
    return able | {kind for kind in patterns.kinds() if kind != "full" and "encoder_self" in patterns.get(kind).roles}


def every_kind() -> set[str]:
    """Of mechanisms that any plan can time."""
    return set[str]().union(*map(kinds_of, PLANS))


def beyond(what: What, kinds: Sequence[str]) -> list[str]:
    """Those of these kinds that can be timed and are not by themselves."""
    if what == "ops":
        return list(dict.fromkeys(beyond("transforms", kinds) + beyond("attention", kinds)))
    return [kind for kind in kinds if kind in kinds_of(what) and kind not in _BY_ITSELF[what]]


def ops_sections(plan: Plan) -> Iterator[list[Section]]:
    """Transforms of scores, then whole attention."""
    found: list[Section] = []
    for found in transforms_sections(plan):
        yield found
    for more in attention_sections(plan):
        yield [*found, *more]


def transforms_sections(plan: Plan) -> Iterator[list[Section]]:
    """Forward with backward on scores alone, against copies of them."""
    device = plan.runtime.device
    transforms = Section(_TRANSFORMS, (ops.BASELINE,), [], limit="copies of the scores", in_float32=plan.half)
    also = beyond("transforms", plan.only)
    for shape in _shapes(plan):  # one shape at a time: what its cases hold is let go before the next
        made = ops.transform_cases((shape,), device, plan.peers, also, plan.every_backend)
        cases = [case for case in made if plan.wants(case.name)]
        transforms.timings.extend(plan.time(cases, copies(torch.zeros(shape, device=device)), replay=True))
        yield [transforms]


def attention_sections(plan: Plan) -> Iterator[list[Section]]:
    """From projected queries, keys and values on, against products of large matrices."""
    device, dtype = plan.runtime.device, plan.dtype
    attention = Section(_ATTENTION, ("SDPA", "softmax"), [])
    also = beyond("attention", plan.only)
    for shape in ops.ON_A_GPU if device.type == "cuda" and not plan.quick else _shapes(plan):
        n = max(1, min(32, shape[2] // 4))
        made = ops.attention_cases((shape,), device, dtype, n, plan.peers, also, plan.every_backend)
        cases = [case for case in made if plan.wants(case.name)]
        attention.timings.extend(plan.time(cases, plan.products, loose=True, replay=True))
        yield [attention]


def _shapes(plan: Plan) -> tuple[tuple[int, ...], ...]:
    return ops.SHAPES[:1] if plan.quick else ops.SHAPES


def train_sections(plan: Plan) -> Iterator[list[Section]]:
    """Updates of whole models: Transformers by size, then models of every kind, or of cells."""
    device = plan.runtime.device
    beside: list[Timing] = []
    found: list[Timing] = []
    done: list[Section] = []
    for size in plan.of_sizes:
        peers = [recipe for peer in plan.peers if peer.training for recipe in peer.training(size, BATCHES, device)]
        names = filter(plan.wants, subjects.compared(device, _called(beyond("train", plan.only))))
        recipes = _trainings(plan, [transformer(size, name) for name in names])
        beside += plan.beside([recipes[0], *peers], peaks=True) if peers else []
        found += _trained(plan, recipes)
        done = [
            *_if_any(_TRAINING_BESIDE, (nn_transformer.SHIPPED, marian.SHIPPED), beside),
            Section(_TRAINING, ("softmax",), found, "tokens"),
        ]
        yield done
    several: list[Timing] = []
    title_beside = _TRAINING_CELLS_BESIDE if plan.cells else _TRAINING_KINDS_BESIDE
    for subject in (*plan.families, *plan.cells):
        made = {peer.package: peer.models(subject, BATCHES, device) for peer in plan.peers if peer.models}
        for package, recipes in made.items():
            if not recipes:
                _log.warning(
                    "--against %s: '%s' stands beside nothing, for it has no such model", package, subject.name
                )
        if peers := [recipe for recipes in made.values() for recipe in recipes]:
            several += plan.beside([*_trainings(plan, [nn_kinds.ours(subject)]), *peers], peaks=True)
            yield [*done, *_if_any(title_beside, (nn_kinds.SHIPPED,), several)]
    done += _if_any(title_beside, (nn_kinds.SHIPPED,), several)
    for title, chosen in ((_TRAINING_KINDS, plan.families), (_TRAINING_CELLS, plan.cells)):
        if chosen:
            timed = _trained(plan, _trainings(plan, chosen))
            done = [*done, Section(title, _firsts(chosen), timed, "tokens")]
            yield done


def _trainings(plan: Plan, chosen: Sequence[Subject]) -> list[Recipe]:
    return [Recipe(models.training, (subject, BATCHES, plan.runtime)) for subject in chosen]


def _trained(plan: Plan, recipes: list[Recipe]) -> list[Timing]:
    timed = plan.time([recipe.make(*recipe.given) for recipe in recipes], plan.products, loose=True)
    return timed if plan.quick else with_peaks(timed, recipes, torch.get_num_threads(), plan.runtime.device)


def decode_sections(plan: Plan) -> Iterator[list[Section]]:
    """Searches by whole models, in the same order, for each number of sources, length and beam."""
    threads, device = torch.get_num_threads(), plan.runtime.device
    beside: list[Timing] = []
    found: list[Timing] = []
    done: list[Section] = []
    for size, load in itertools.product(plan.of_sizes, plan.loads):
        given = [each.decoding for each in plan.peers if each.decoding and serves(each, "decode", device)]
        peers = [recipe for decoding in given for recipe in decoding(size, load, threads)]
        quantized = ["softmax" + subjects.QUANTIZED] if device.type == "cpu" else []
        names = subjects.compared(device, _called(beyond("decode", plan.only)))
        chosen = filter(plan.wants, (*names, *quantized, *subjects.PATTERNS))
        beside += plan.beside([*_decodings(plan, size, ("softmax", *quantized), load), *peers]) if peers else []
        found += _decoded(plan, [transformer(size, name) for name in chosen], load)
        done = [
            *_if_any(_DECODING_BESIDE, (ctranslate2.NAME.format("float32"),), beside),
            Section(_DECODING, ("softmax",), found, "tokens"),
        ]
        yield done
    for title, chosen in ((_DECODING_KINDS, plan.families), (_DECODING_CELLS, plan.cells)):
        timed: list[Timing] = []
        for some in _grouped(chosen):
            loads = plan.loads if chosen is not plan.cells else [Load(*shape, None) for shape in _readable(plan, some)]
            for load in loads:
                timed += _decoded(plan, some, load)
                yield [*done, Section(title, _firsts(chosen), timed, "tokens")]


def _decodings(plan: Plan, size: str, names: Sequence[str], load: Load) -> list[Recipe]:
    return [Recipe(models.decoding, (transformer(size, name), load, plan.runtime)) for name in names]


def _decoded(plan: Plan, chosen: Sequence[Subject], load: Load) -> list[Timing]:
    return plan.time([models.decoding(each, load, plan.runtime) for each in chosen], plan.products, loose=True)


def _grouped(chosen: Sequence[Subject]) -> list[list[Subject]]:
    """Those that are compared with one another."""
    return [[each for each in chosen if each.group == group] for group in dict.fromkeys(each.group for each in chosen)]


def _firsts(chosen: Sequence[Subject]) -> tuple[str, ...]:
    """The name of the first of each group, beside which the others stand."""
    return tuple(dict.fromkeys(some[0].name for some in _grouped(chosen)))


def _readable(plan: Plan, some: Sequence[Subject]) -> list[tuple[int, int]]:
    """The shapes, with sources no longer than each of these can read."""
    limits = [each.source_limit for each in some if each.source_limit is not None]
    return list(dict.fromkeys((rows, min([length, *limits])) for rows, length in plan.shapes))


def _called(kinds: list[str]) -> list[str]:
    return [ops.called(ops.mechanism(kind)) for kind in kinds]


def _if_any(title: str, baselines: tuple[str, ...], found: list[Timing]) -> list[Section]:
    """Where something was timed, beside the fastest of those baselines that are there."""
    there = tuple(each for each in baselines if any(timing.name == each for timing in found))
    return [Section(title, there or baselines[:1], found, "tokens")] if found else []


def scaling_sections(plan: Plan) -> Iterator[list[Section]]:
    """Cost against each size, with the exponents that fit it."""
    lengths = (128, 256, 512) if plan.quick else (512, 1024, 2048, 4096)
    if plan.runtime.device.type == "cuda" and not plan.quick:
        lengths = (*lengths, 8192, 16384, 32768, 65536)
    found: list[Section] = []
    device = plan.runtime.device
    cases = scaling.cases(lengths, device, plan.dtype)
    # one group at a time: what its cases hold is let go
    for group, given in itertools.groupby(cases, key=lambda each: each[0]):
        made = list(given)
        moves = group in scaling.MOVED
        of_precision = group in scaling.OF_PRECISION
        multiplied = plan.products if of_precision else products(device, torch.float32)
        yardstick = copies(scaling.scores(device)) if moves else multiplied
        timed = plan.time([case for _, _, case in made], yardstick, loose=of_precision, replay=True)
        slopes = scaling.exponents([(size, timing) for (_, size, _), timing in zip(made, timed, strict=True)])
        baseline = ("SDPA",) if any(timing.name == "SDPA" for timing in timed) else ()
        limit = "copies of the scores" if moves else "matrix products"
        exact = plan.half and not of_precision
        found.append(Section(f"{_COST} {group}", baseline, timed, limit=limit, exponents=slopes, in_float32=exact))
        yield found


PLANS: dict[What, Callable[[Plan], Iterator[list[Section]]]] = {
    "ops": ops_sections,
    "transforms": transforms_sections,
    "attention": attention_sections,
    "train": train_sections,
    "decode": decode_sections,
    "scaling": scaling_sections,
}

TITLES: dict[What, tuple[str, ...]] = {
    "ops": (_TRANSFORMS, _ATTENTION),
    "transforms": (_TRANSFORMS,),
    "attention": (_ATTENTION,),
    "train": (
        _TRAINING_BESIDE,
        _TRAINING,
        _TRAINING_KINDS_BESIDE,
        _TRAINING_CELLS_BESIDE,
        _TRAINING_KINDS,
        _TRAINING_CELLS,
    ),
    "decode": (_DECODING_BESIDE, _DECODING, _DECODING_KINDS, _DECODING_CELLS),
    "scaling": (_COST,),
}
"""What the titles of their sections begin with."""
OF_SIZES: tuple[What, ...] = ("train", "decode")
"""Those that time models, which have a size."""
