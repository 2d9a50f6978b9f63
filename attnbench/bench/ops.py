"""Mechanisms alone: transforms of scores, and attention from projected queries, keys and values to contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from attnbench.attention.catalog import build_transform
from attnbench.attention.modules.multihead import MultiHead
from attnbench.attention.patterns.base import PatternSpec, dense, patterns
from attnbench.attention.scores.dot import ScaledDotSpec
from attnbench.attention.site import Site
from attnbench.attention.transforms.base import TransformSpec, transforms
from attnbench.attention.transforms.entmax import LearnedEntmax
from attnbench.attention.types import Backend, Dims, Memory, Positions
from attnbench.bench.timer import Case
from attnbench.core import native
from attnbench.core.kernels import compiles
from attnbench.core.registry import Registry
from attnbench.core.spec import dotted, problems

if TYPE_CHECKING:
    from attnbench.bench.peers import Peer

SHAPES = ((64, 4, 32, 32), (16, 8, 128, 128), (4, 8, 512, 512))
"""Batch, heads, queries, keys."""
ON_A_GPU = ((16, 8, 512, 512), (8, 8, 1024, 1024), (4, 8, 2048, 2048), (2, 8, 4096, 4096), (1, 8, 8192, 8192))
"""Shapes of whole attention there."""
HEAD = 64
TRANSFORMS: dict[str, dict[str, Any]] = {
    "softmax": {"kind": "softmax"},
    "topk, k = 8": {"kind": "topk", "k": 8},
    "sparsemax": {"kind": "sparsemax"},
    "entmax15": {"kind": "entmax15"},
    "entmax, alpha = 1.3": {"kind": "entmax", "alpha": 1.3},
    "entmax, learned alpha": {"kind": "entmax", "alpha": "learned"},
    "csoftmax": {"kind": "csoftmax"},
    "csparsemax": {"kind": "csparsemax"},
    "sigmoid": {"kind": "sigmoid"},
}
"""What each transform is timed with; csoftmax and csparsemax under bounds of 4 / K."""
TRAINED = "entmax, learned alpha, 1.1 to 1.9"
"""Transforms of scores are timed with it, too: training leads the alphas of the heads apart, from 1.5."""
PATTERNS = ("window", "block", "dilated", "global", "bigbird", "random")
BUDGET = 8
"""Of a mechanism in none of these tables that is asked for."""
BASELINE = "torch.softmax"
_CELLS = 1 << 24
"""Of a pattern, that are looked at in one go."""


class Method(NamedTuple):
    """One mechanism of whole attention."""

    pattern: Any = "full"
    transform: Any = "softmax"
    backend: Backend = "auto"


def kind_of(name: str) -> str:
    """Of a case: what stands before its fields and its backend."""
    return name.partition(",")[0].partition(" (")[0]


def mechanism(kind: str, n: int = BUDGET) -> TransformSpec | PatternSpec:
    """The transform of that kind at the usual budget or, if there is none, the pattern at one of n; as it is by default
    where it takes no budget. Raises ValueError where it has no defaults either, and for a kind that there is not."""
    if kind in transforms.kinds():
        return _at_budget(transforms, kind, BUDGET)
    return _at_budget(patterns, kind, n)


def _at_budget(family: Registry[Any], kind: str, n: int) -> Any:
    cls = family.get(kind)
    role = "encoder_self" if "encoder_self" in cls.roles else min(cls.roles)
    try:
        spec = cls.from_budget(n, role) or family.parse(kind)
    except ValidationError as error:
        raise ValueError("; ".join(f"{dotted(path)}: {said}" for path, said in problems(error))) from None
    spec.require()
    return spec


def called(spec: TransformSpec | PatternSpec) -> str:
    """The name of its case: the kind, and the fields that its budget gave it."""
    given = spec.model_dump(exclude_unset=True, exclude={"kind"})
    return ", ".join([spec.kind, *(f"{field} = {value}" for field, value in given.items())])


def transform_cases(
    shapes: tuple[tuple[int, ...], ...], device: torch.device, peers: list[Peer], also: Sequence[str] = (),
    every_backend: bool = False,
) -> Iterator[Case]:  # fmt: skip
    """Forward, and forward with backward, of every transform; torch.softmax goes first, and peers last. also: kinds of
    others. every_backend: each in torch operations, too, as it is without a compiler."""
    for shape in shapes:
        generator = torch.Generator().manual_seed(0)
        scores = (torch.randn(shape, generator=generator) * 2).to(device)
        upstream = torch.randn(shape, generator=generator).to(device)
        fields = TRANSFORMS | {called(spec): spec.dump() for spec in map(mechanism, also)}
        built = {name: _transform(given, shape, device) for name, given in fields.items()}
        built[TRAINED] = _trained(shape[1], device)
        functions: dict[str, Callable[[Tensor], Tensor]] = {BASELINE: lambda given: torch.softmax(given, -1), **built}
        if every_backend:
            functions |= {f"{name} (torch)": partial(_in_torch, function) for name, function in built.items()}
        functions |= {
            f"{peer.package}: {name}": function for peer in peers for name, function in peer.transforms.items()
        }
        title = "x".join(map(str, shape))
        for name, function in functions.items():
            check = partial(_off_definition, function, scores) if name in built else None
            yield Case(
                f"{title}, forward", name, partial(_quiet, function, [scores]), check=check,
                cost=partial(moved, scores, both=False),
            )  # fmt: skip
        for name, function in functions.items():
            check = partial(gradient_off, function, scores, upstream) if name in built else None
            yield Case(
                f"{title}, forward and backward", name, both_ways(function, scores, upstream=upstream), check=check,
                cost=partial(moved, scores, both=True),
            )  # fmt: skip


def _in_torch(function: Callable[[Tensor], Tensor], scores: Tensor) -> Tensor:
    with native.off():
        return function(scores)


def moved(scores: Tensor, *, both: bool) -> float:
    """Bytes that a transform reads and writes at least: scores and weights; backward weights, their gradients and those
    of the scores."""
    return float(scores.numel() * scores.element_size() * (5 if both else 2))


def looked_at(method: Method, length: int, device: torch.device) -> float:
    """How many keys a query looks at in bidirectional self-attention, the mean over queries and one head's draw."""
    pattern = patterns.parse(method.pattern)
    lengths = torch.tensor([length], device=device) if pattern.drawn else None
    rule = pattern.mask_mod("encoder_self", 0, lengths=lengths, seed=0)
    if rule is None:
        return float(length)
    at = torch.arange(length, device=device)
    some = max(1, _CELLS // length)
    counts = [dense(rule, Positions(queries, at)).sum() for queries in at.split(some)]
    return float(torch.stack(counts).sum()) / length


def multiplied(method: Method, heads: int, length: int, device: torch.device, *, both: bool) -> float:
    """Operations of the products of an attention of so many heads, over the keys that its queries look at: two products
    forward, and four backward."""
    return 4.0 * heads * length * looked_at(method, length, device) * HEAD * (3 if both else 1)


def _transform(given: dict[str, Any], shape: tuple[int, ...], device: torch.device) -> Callable[[Tensor], Tensor]:
    fields = dict(given)
    kind = fields.pop("kind")
    transform = build_transform(kind, heads=shape[1], **fields)
    if isinstance(transform, nn.Module):
        transform.to(device)
    if transforms.get(kind).needs_upper:
        upper = torch.full((), 4 / shape[-1], device=device)
        return lambda scores: transform(scores, upper=upper)
    return transform


def _trained(heads: int, device: torch.device) -> nn.Module:
    transform = LearnedEntmax(heads)
    with torch.no_grad():
        transform.raw.copy_(torch.logit(torch.linspace(0.1, 0.9, heads)))
    return transform.to(device)


def _off_definition(function: Callable[[Tensor], Tensor], scores: Tensor) -> float:
    """How far weights lie from those of torch operations, as a part of their length."""
    with torch.no_grad(), native.off():
        wanted = function(scores)
    with torch.no_grad():
        return farthest([function(scores)], [wanted])


def gradient_off(function: Callable[[Tensor], Tensor], scores: Tensor, upstream: Tensor) -> float:
    """The same of gradients for scores, and for what the function learns."""

    def gradients() -> tuple[Tensor, ...]:
        given = [scores.detach().requires_grad_(), *_learned(function)]
        return torch.autograd.grad(function(given[0]), given, upstream)

    with native.off():
        wanted = gradients()
    return farthest(gradients(), wanted)


def _learned(function: Callable[..., Tensor]) -> list[nn.Parameter]:
    if isinstance(function, Mixer):
        return function.learned
    return list(function.parameters()) if isinstance(function, nn.Module) else []


def farthest(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest length of a difference, as a part of that of what is wanted; or a tenth of the largest one at any
    place (dimension -2, over all rows and heads) beside the length of places there, as the edges of blocks may be
    wrong alone."""
    apart: list[Tensor] = []
    for mine, other in zip(found, wanted, strict=True):
        off = mine.float() - other
        apart.append(off.norm() / other.norm().clamp_min(1e-12))
        if other.dim() > 1:
            at, of = (each.transpose(0, -2).flatten(1).norm(dim=1) for each in (off, other))
            apart.append(at.max() / of.square().mean().sqrt().clamp_min(1e-12) / 10)
    return float(torch.stack(apart).max())  # which keeps a NaN, wherever it stands


def attention_names() -> list[str]:
    """Of the transforms that whole attention is timed with: those that look at one query."""
    return [name for name, fields in TRANSFORMS.items() if not transforms.get(fields["kind"]).needs_upper]


def attention_cases(
    shapes: tuple[tuple[int, ...], ...], device: torch.device, dtype: torch.dtype, n: int = 32,
    peers: Sequence[Peer] = (), also: Sequence[str] = (),
    every_backend: bool = False,
) -> Iterator[Case]:  # fmt: skip
    """Bidirectional attention of each transform, and of patterns at a budget of n where that is less than the keys; on
    a GPU through its own backends, too. also: kinds of others. every_backend: on a processor patterns by all scores,
    too."""
    for shape in shapes:
        batch, heads, length, _ = shape
        generator = torch.Generator().manual_seed(0)
        given = [torch.randn(batch, heads, length, HEAD, generator=generator).to(device, dtype) for _ in range(3)]
        methods = {name: Method(transform=TRANSFORMS[name]) for name in attention_names()}
        if n < length:
            methods |= {f"{name}, n = {n}": Method(pattern={"kind": name, "n": n}) for name in PATTERNS}
        for spec in (mechanism(kind, n) for kind in also):
            own = Method(transform=spec) if isinstance(spec, TransformSpec) else Method(pattern=spec)
            methods[called(spec)] = own
        if device.type == "cuda":
            methods = on_a_gpu(methods, device)
        elif every_backend:
            others = {name: method for name, method in methods.items() if method.pattern != "full"}
            methods |= {f"{name} (dense)": method._replace(backend="dense") for name, method in others.items()}
        title = "x".join(map(str, (*shape, HEAD)))
        sdpa = nn.functional.scaled_dot_product_attention
        mixers = {name: Mixer(method, heads, device) for name, method in methods.items()}
        runs: dict[str, Callable[..., Tensor]] = {"SDPA": sdpa, **mixers}
        defined = {"SDPA": Method(), **methods}
        for peer in peers:
            for name, (function, method) in peer.attention.items() if device.type == "cuda" else ():
                runs[f"{peer.package}: {name}"], defined[f"{peer.package}: {name}"] = function, method
        plain = {name: Mixer(method._replace(backend="dense"), heads, device) for name, method in defined.items()}
        costs = {name: partial(multiplied, method, batch * heads, length, device) for name, method in defined.items()}
        for name, function in runs.items():
            yield Case(
                f"{title}, forward", name, partial(_quiet, function, given),
                check=partial(_apart, function, plain[name], given),
                cost=partial(costs[name], both=False),
            )  # fmt: skip
        for name, function in runs.items():
            # how exact the gradients of another package are is its affair
            own = name == "SDPA" or name in methods
            yield Case(
                f"{title}, forward and backward", name, both_ways(function, *given, upstream=given[0]),
                check=partial(slopes_apart, function, plain[name], given) if own else None,
                cost=partial(costs[name], both=True),
            )  # fmt: skip


def on_a_gpu(methods: dict[str, Method], device: torch.device) -> dict[str, Method]:
    """Each as it is defined, and through the backends that serve it on a GPU alone, where Triton's kernels are compiled
    for it."""
    backends: tuple[Backend, ...] = ("triton", "flex") if compiles(device) else ()
    found = {name: method._replace(backend="dense") for name, method in methods.items()}
    for name, method in methods.items():
        for backend in backends:
            with suppress(ValueError):  # what cannot serve a method says so when it is built
                Mixer(method._replace(backend=backend), 1, device)
                found[f"{name} ({backend})"] = method._replace(backend=backend)
    return found


def _apart(function: Callable[..., Tensor], plain: Callable[..., Tensor], given: list[Tensor]) -> float:
    """How far contexts lie from those of all scores, in torch operations and float32, as a part of their length."""
    with native.off():
        wanted = _quiet(plain, [each.float() for each in given])
    return farthest([_quiet(function, given)], [wanted])


def slopes_apart(function: Callable[..., Tensor], plain: Callable[..., Tensor], given: list[Tensor]) -> float:
    """How far gradients for queries, keys and values lie from those of all scores, in torch operations and float32, as
    a part of their length; and in float32 those for what is learned: sums over all rows, in which most cancels."""

    def slopes(of: Callable[..., Tensor], states: list[Tensor]) -> tuple[Tensor, ...]:
        inputs = [each.detach().requires_grad_() for each in states]
        return torch.autograd.grad(of(*inputs), inputs, states[0])

    def of_learned(of: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(of(*exact), _learned(of), exact[0])

    exact = [each.detach().float() for each in given]
    with native.off():
        wanted = slopes(plain, exact)
        learned = of_learned(plain) if _learned(plain) and _learned(function) else ()
    found = farthest(slopes(function, given), wanted)
    return float(torch.tensor([found, farthest(of_learned(function), learned)]).max()) if learned else found


class Mixer:
    """`f(query, key, value)`, each `[B, H, L, E]`, of one mechanism in bidirectional self-attention."""

    def __init__(self, method: Method, heads: int, device: torch.device) -> None:
        pattern, transform = patterns.parse(method.pattern), transforms.parse(method.transform)
        site = Site(ScaledDotSpec(), pattern, transform, backend=method.backend)
        width = heads * HEAD
        torch.manual_seed(0)
        dims = Dims(heads=heads, query_width=width, key_width=width)
        self.module = MultiHead(site, "encoder_self", width, dims, 0.0).to(device)
        transform = self.module.transform
        self.learned = list(transform.parameters()) if isinstance(transform, nn.Module) else []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at = torch.arange(query.shape[2], device=query.device)
        return self.module.mix(query, Memory(key, value), Positions(at, at), need_weights=False)[0]


def _quiet(function: Callable[..., Tensor], given: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return function(*given)


def both_ways(function: Callable[..., Tensor], *given: Tensor, upstream: Tensor) -> Callable[[], object]:
    """A call that goes forward and back to everything given."""

    def run() -> None:
        function(*(each.detach().requires_grad_() for each in given)).backward(upstream)

    return run
