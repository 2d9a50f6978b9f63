"""Which backend answers a call: the definition (`dense`), or a fast path where one fits and pays."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import nn

from attnbench.attention.backends.banded import pays_from
from attnbench.attention.backends.flex import FROM as FLEX_FROM
from attnbench.attention.backends.flex import NARROWEST
from attnbench.attention.backends.fused import WIDEST, has_kernel
from attnbench.attention.backends.picked import draws_all
from attnbench.attention.patterns.base import hashable
from attnbench.attention.site import Site
from attnbench.attention.types import Backend, Dims, Role


class Choice(NamedTuple):
    """What full passes of one site go through. since: the fewest positions with which they do; below, it is dense.
    listed: the same where compiled code reads the keys of each query (sampled.py). gpu: the kernels that take their
    place on a GPU. few: a decoding step on a processor is one call of compiled code. picks: such steps read no keys but
    those of the pattern."""

    backend: Literal["dense", "banded", "flex", "sdpa", "triton"]
    why: str
    since: int = 1
    listed: int = 1
    gpu: Literal["flex", "sdpa", "triton"] | None = None
    few: bool = False
    picks: bool = False

    def __str__(self) -> str:
        where = f" ({FLEX_FROM} positions or more, half precision, padding on the right)" if self.gpu == "flex" else ""
        gpu = f"; on a GPU {self.gpu}{where}" if self.gpu else ""
        steps = "; on a processor steps read the pattern's keys alone" if self.picks else ""
        return f"{self.backend}: {self.why}{gpu}{steps}"


def choose(site: Site, role: Role, dropout: float = 0.0) -> Choice:
    """The backend of one site. dropout: on its weights. Raises ValueError where the one that was asked for cannot serve
    it."""
    with torch.random.fork_rng(devices=()):  # what is built to be asked draws its parameters
        return _choose(site, role, dropout)


def _choose(site: Site, role: Role, dropout: float) -> Choice:
    if site.backend == "dense":
        return Choice("dense", "as asked for")
    if site.backend in ("flex", "sdpa", "triton"):
        if site.backend == "flex":
            fault = _unfit_for_flex(site, role, dropout)
        else:
            fault = _unfit_for_sdpa(site) if site.backend == "sdpa" else _unfit_for_triton(site, role)
        if fault is not None:
            raise ValueError(
                f"the backend '{site.backend}' cannot serve {role}: {fault}; drop `backend: {site.backend}`"
            )
        return Choice(site.backend, "as asked for")
    fault, picks = _unfit(site, role), _picks(site, role)
    if fault is None:
        if site.backend == "banded":
            return Choice("banded", "as asked for", picks=picks)
        layout = site.pattern.layout(role, lengths=torch.ones(1, dtype=torch.int64))
        gpu = "flex" if _unfit_for_flex(site, role, dropout) is None else None
        why = f"the pattern '{site.pattern.kind}'" + (", on a processor" if role == "cross" else "")
        if layout is None:
            return Choice("banded", why, gpu=gpu, picks=picks)
        dots = site.score.build(Dims()).scale is not None
        since, listed = (pays_from(layout, causal=role == "decoder_self", listed=each) for each in (False, dots))
        why += f", from {since} positions on" + ("" if since == listed else f" ({listed} by compiled code)")
        return Choice("banded", why, since, listed, gpu, picks=picks)
    if site.backend == "banded" and site.pattern.sparse and role != "cross":
        raise ValueError(f"the backend 'banded' cannot serve this site: {fault}; drop `backend: banded`")
    if site.backend != "auto":
        return Choice("dense", fault, picks=picks)
    return Choice("dense", fault, gpu=_on_a_gpu(site, role), few=_fits_few(site, role), picks=picks)


def require_width(backend: Backend, width: int, role: Role) -> None:
    """Raise ValueError where kernels that were asked for do not take heads of this width."""
    fault = None
    if backend == "flex" and width < NARROWEST:
        fault = f"{NARROWEST} and more, and these have {width}; make them wider"
    if backend == "triton" and width > WIDEST:
        fault = f"{WIDEST} at most, and these have {width}; make them narrower"
    if fault is not None:
        raise ValueError(
            f"the backend '{backend}' cannot serve {role}: it takes heads of a width of {fault}, or drop `backend: "
            f"{backend}`"
        )


def chosen(model: nn.Module) -> dict[str, str]:
    """The backend of each site's full passes, and why; a site that differs from layer to layer has one line for each.

    Passes that are asked for their weights are always dense; steps of decoding too, unless SDPA or Triton serves them
    or, on a processor, few.py or picked.py does.
    """
    found: dict[str, list[str]] = {}
    for module in model.modules():
        if isinstance(choice := getattr(module, "choice", None), Choice):
            said = found.setdefault(str(getattr(module, "role", "cross")), [])
            if str(choice) not in said:
                said.append(str(choice))
    return {role: "; ".join(said) for role, said in found.items()}


def _picks(site: Site, role: Role) -> bool:
    """Whether what a position does not see can be left out of a step: nothing else of the site asks where keys stand,
    or for all of them."""
    if site.pattern.kind == "full" or not hashable(site.pattern):
        return False
    if site.transform.keep(role) is not None or site.bias is not None or site.coverage is not None or site.spends:
        return False
    return role == "decoder_self" or (role == "cross" and draws_all(site.pattern))


def _on_a_gpu(site: Site, role: Role) -> Literal["sdpa", "triton"] | None:
    if site.pattern.kind != "full" or site.transform.needs_upper:
        return None
    if _unfit_for_sdpa(site) is None:
        return "sdpa"
    return "triton" if _unfit_for_triton(site, role) is None else None


def _unfit_for_flex(site: Site, role: Role, dropout: float) -> str | None:
    if role == "cross":
        return "it serves self-attention alone"
    if not site.transform.is_softmax():
        return f"it knows softmax, not the transform '{site.transform.kind}'"
    if site.pattern.drawn:
        return f"the pattern '{site.pattern.kind}' draws its keys one by one, which no block mask skips"
    if dropout:
        return "it has no dropout on weights (model.attention_dropout: 0)"
    return _not_products(site)


def _unfit_for_sdpa(site: Site) -> str | None:
    if not site.transform.is_softmax():
        return f"it knows softmax, not the transform '{site.transform.kind}'"
    if site.pattern.kind != "full":
        return f"it knows no pattern, and there is '{site.pattern.kind}'"
    return _not_products(site)


def _unfit_for_triton(site: Site, role: Role) -> str | None:
    if site.pattern.kind != "full":
        return f"it knows no pattern, and there is '{site.pattern.kind}'"
    known = site.transform.fused(site.transform.build(Dims()))
    if known is None or not has_kernel(known) or site.transform.keep(role) is not None:
        return f"it has no kernel for the transform '{site.transform.kind}' as it is set"
    return _not_products(site)


def _fits_few(site: Site, role: Role) -> bool:
    """Whether few.py knows all stages of a site that looks at every key."""
    transform, keep = site.transform, site.transform.keep(role)
    if site.pattern.kind != "full" or transform.needs_upper or transform.fused(transform.build(Dims())) is None:
        return False
    return (keep is None or (role != "cross" and hashable(keep))) and _not_products(site) is None


def _not_products(site: Site) -> str | None:
    """Why a kernel that multiplies queries and keys itself cannot serve a site."""
    if site.score.build(Dims()).scale is None:
        return f"the score '{site.score.kind}' is not a product of queries and keys"
    return _more_than_scores(site)


def _more_than_scores(site: Site) -> str | None:
    """What weights depend on besides scores and which keys there are."""
    if site.bias is not None:
        return f"it adds no bias, and there is '{site.bias.kind}'"
    if site.coverage is not None or site.spends:
        return "it keeps no history of what was attended"
    return None


def _unfit(site: Site, role: Role) -> str | None:
    """Why the banded path cannot serve a site; None: it can."""
    pattern, transform = site.pattern, site.transform
    if not pattern.sparse:
        return f"the pattern '{pattern.kind}' leaves no key out"
    if role == "cross" and not draws_all(pattern):
        return "over a source it serves what is drawn alone"
    if not site.score.any_rank:
        return f"the score '{site.score.kind}' does not compare tiles"
    if (fault := _more_than_scores(site)) is not None:
        return fault
    if transform.keep(role) is not None:
        return f"the transform '{transform.kind}' looks at the scores of all keys"
    if pattern.drawn and transform.ordered:
        return f"the transform '{transform.kind}' breaks ties by position, and drawn keys stand out of order"
    return None
