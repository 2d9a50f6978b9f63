"""The Triton kernels compile for a GPU, and fit where least shared memory is to be had.

Some variants of each are made into machine code, for small blocks; those that ship are made into what LLVM would be
given, which has its shared memory by then: the rest is most of the time.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from attnbench.attention.backends import fused

pytestmark = pytest.mark.skipif(fused.kernels() is None, reason="Triton is not installed")

_BUILD = """
from functools import partial
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler
from triton.compiler import ASTSource
from attnbench.attention.backends import _backward, _forward, _listed, _peaks, _rough, fused
from attnbench.attention.transforms import _bounded_kernels, _row_kernels

HALF = {"query", "key", "value", "out", "upstream", "query_slope", "slope"}
WHOLE = {"threshold", "most", "inverse", "number", "shift", "excess", "mean", "alpha_slope", "key_slope", "value_slope",
         "scores", "weights", "grad", "alphas", "bounds", "upper",
         "to_scores", "to_upper"}
NUMBERS = {"again", "found", "crowded", "lists"}
FIXED = {"CAUSAL": True, "VALID": True, "DROPOUT": True, "GRADIENT": True, "LEARNED": True, "WIDTH": 64,
         "VALUE_WIDTH": 64, "ROOM": 64, "PLAIN": False, "UNROLL": 4,
         "KEEP": True, "ALL": False, "SHORT": False, "FULL": False, "EVEN": False}
WIDE = {"WIDTH": 128, "VALUE_WIDTH": 128, "BLOCK_M": 32}
POINTERS = {
    "valid": "*u8", "keep": "*u8", "short": "*u8", "seed": "*i64",
    **dict.fromkeys(WHOLE, "*fp32"), **dict.fromkeys(NUMBERS, "*i32"),
}

class Lowered(Exception):  # all is done but LLVM's part and what follows it; with the bytes of shared memory
    pass

to_module, make_llir = compiler.llvm.to_module, compiler.CUDABackend.make_llir

def stop(*given):
    raise Lowered

def up_to_llvm(self, module, *given):
    try:
        return make_llir(self, module, *given)
    except Lowered:
        raise Lowered(module.get_int_attr("ttg.shared")) from None

compiler.CUDABackend.make_llir = up_to_llvm

def made(then, kernel, half="*bf16", target=89, num_warps=4, num_stages=2, maxnreg=None, **fixed):
    names = kernel.arg_names
    fixed = {name: value for name, value in {**FIXED, **fixed}.items() if name in names}
    pointers = {**POINTERS, **dict.fromkeys(HALF, half)}
    kinds = {name: pointers.get(name) or ("fp32" if name in ("scale", "rate") else "i32") for name in names}
    source = ASTSource(
        fn=kernel, signature={**kinds, **dict.fromkeys(fixed, "constexpr")},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg, "enable_fp_fusion": True}
    compiler.llvm.to_module = then
    try:
        shared = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options).metadata.shared
    except Lowered as lowered:
        (shared,) = lowered.args
    print(kernel.__name__, target, shared)

build, lower = partial(made, to_module), partial(made, stop)

def shipped(width, keys, part, dtype=torch.bfloat16, kind=3):
    states = torch.empty(1, 1, keys, width, dtype=dtype)
    return fused._sizes(states, states, states, part, kind)
"""
_BLOCKS = """
for kernel in (_forward.forward, _backward.backward_query, _backward.backward_key, _backward.backward_short):
    build(kernel, KIND={kind}, BLOCK_M=16, BLOCK_N=16, WIDTH=16, VALUE_WIDTH=16)
lower(_backward.backward_key, KIND=0, BLOCK_M=64, BLOCK_N=64)
"""
_SMALL = """
for kind in range(4):
    full = kind % 2 == 1
    build(_peaks.peaks, KIND=kind, CLASSES=16, target=89 + full, FULL=full, VALID=not full, BLOCK_M=16, BLOCK_N=16,
          WIDTH=16, VALUE_WIDTH=16)
build(_forward.forward, "*fp32", KIND=0, BLOCK_M=16, BLOCK_N=16, WIDTH=16, VALUE_WIDTH=16)
build(_rough.thresholds, BLOCK_M=16, BLOCK_N=64, WIDTH=16, VALUE_WIDTH=16)
for again in (False, True):
    build(_rough.contexts, AGAIN=again, BLOCK_M=16, BLOCK_N=64, WIDTH=16, VALUE_WIDTH=16)
"""
_SHORT = """
lower(_forward.forward, KIND={kind}, SHORT=True, ROOM=0, target={target}, **shipped(128, 64, "forward"))
lower(_backward.backward_short, KIND={kind}, target={target}, **shipped(128, 64, "short"))
"""
_OF_64 = """
lower(_peaks.peaks, KIND=0, CLASSES=32, target=89, **shipped(64, 512, "peaks", kind=0))
lower(_peaks.peaks, KIND=2, CLASSES=64, target=89, **shipped(64, 512, "peaks", kind=2))
lower(_backward.backward_query, KIND=0, ROOM=0, target=89, **shipped(64, 512, "query", kind=0))
lower(_backward.backward_key, KIND=2, ROOM=0, target=89, **shipped(64, 512, "dropped", kind=2))
"""
_WHOLE = """
lower(_peaks.peaks, KIND=1, CLASSES=32, target=90, FULL=True, VALID=False, **shipped(64, 512, "peaks", kind=1))
lower(_peaks.peaks, KIND=3, CLASSES=32, target=90, FULL=True, VALID=False, **shipped(64, 512, "peaks"))
lower(_backward.backward_query, KIND=3, ROOM=0, target=90, FULL=True, VALID=False, **shipped(64, 512, "query"))
lower(_backward.backward_key, KIND=3, ROOM=0, target=90, EVEN=True, VALID=False, **shipped(64, 512, "key"))
"""
_ROUGH = """
lower(_rough.thresholds, target=89, **shipped(128, 512, "thresholds", kind=2))
for part in ("contexts", "again"):
    lower(_rough.contexts, AGAIN=part == "again", target=89, **shipped(128, 512, part, kind=2))
"""
_LISTS = """
build(_listed.choose, KIND={kind}, BLOCK_M=64, BLOCK_N=32)
build(_listed.mix, KIND={kind}, BLOCK_M=8)
build(_listed.spread, KIND={kind}, BLOCK_M=8)
"""
_IN_FLOAT32 = """
lower(_listed.choose, "*fp32", KIND={kind}, BLOCK_N=64, **WIDE)
lower(_forward.forward, "*fp32", KIND={kind}, **shipped(128, 512, "forward", torch.float32))
lower(_peaks.peaks, "*fp32", KIND={kind}, CLASSES=32, **shipped(128, 512, "peaks", torch.float32))
lower(_backward.backward_short, "*fp32", KIND={kind}, **shipped(128, 16, "short", torch.float32))
lower(_backward.backward_query, "*fp32", KIND={kind}, **shipped(128, 32, "query", torch.float32))
"""


_ROWS = """
for kernel in (_row_kernels.weigh, _row_kernels.vjp):
    build(kernel, "*fp32", KIND={kind}, ROWS={rows}, BLOCK={block}, LEARNED={kind} == 3)
"""
_BOUNDED = """
for kernel in (_bounded_kernels.solve, _bounded_kernels.vjp):
    build(kernel, "*fp32", KIND={kind}, ROWS=8, BLOCK=64)
"""

_OF_SMALL = [*["peaks"] * 4, "forward", "thresholds", "contexts", "contexts"]
_OF_BLOCKS = ["forward", "backward_query", "backward_key", "backward_short", "backward_key"]
_OF_WHOLE = ["peaks", "peaks", "backward_query", "backward_key"]
_OF_HALF = ["peaks", "peaks", "backward_query", "backward_key"]
_OF_LISTS, _OF_ROUGH = ["choose", "mix", "spread"], ["thresholds", "contexts", "contexts"]
_OF_FLOAT32 = ["choose", "forward", "peaks", "backward_short", "backward_query"]
_OF_ROWS, _OF_SHORT, _OF_BOUNDED = ["weigh", "vjp"], ["forward", "backward_short"], ["solve", "vjp"]


CALLS = {
    "lists, float32, blocks": [
        (_LISTS.format(kind=0), _OF_LISTS), (_IN_FLOAT32.format(kind=0), _OF_FLOAT32),
        (_BLOCKS.format(kind=3), _OF_BLOCKS), (_LISTS.format(kind=2), _OF_LISTS),
        (_ROUGH, _OF_ROUGH),
    ],
    "heads of 64, short rows, rows, bounds": [
        (_OF_64, _OF_HALF), (_WHOLE, _OF_WHOLE), (_SMALL, _OF_SMALL),
        (_SHORT.format(kind=0, target=89), _OF_SHORT), (_SHORT.format(kind=3, target=90), _OF_SHORT),
        (_ROWS.format(kind=0, rows=32, block=32), _OF_ROWS), (_ROWS.format(kind=3, rows=1, block=4096), _OF_ROWS),
        (_BOUNDED.format(kind=0), _OF_BOUNDED), (_BOUNDED.format(kind=1), _OF_BOUNDED),
    ],
}  # fmt: skip
"""What two processes build, each of which imports once."""


@pytest.mark.parametrize("name", CALLS)
def test_the_kernels_compile_for_a_gpu(name, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _BUILD + "".join(call for call, _ in CALLS[name])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [kernel for kernel, _, _ in lines] == [kernel for _, made in CALLS[name] for kernel in made]
    assert all(int(shared) <= 99 << 10 for _, _, shared in lines)  # for one block; no GPU that they run on has less
