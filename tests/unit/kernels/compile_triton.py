"""Compile every Triton kernel for a GPU that need not be there: types that the interpreter lets pass fail here.

    python -m tests.unit.kernels.compile_triton            for compute capability 9.0; no test, for it takes a minute

The functions beside the PyTorch references are called as ever, on the CPU; each launch is compiled instead of run.
"""

import inspect
import os
import sys
from typing import Any

import torch

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from megatron_moe.kernels import blocks

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.int64: "*i64"}
TYPES |= {torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5"}


def compile_instead(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """In the place of ``launch``."""
    parameters = inspect.signature(kernel.fn).parameters
    values = dict(zip(parameters, arguments, strict=False)) | constants
    signature, fixed = {}, {}
    for i, (name, parameter) in enumerate(parameters.items()):
        value = values[name]
        if value is None or "constexpr" in str(parameter.annotation):
            signature[name], fixed[i,] = "constexpr", value
        else:
            signature[name] = TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
    compile(ASTSource(fn=kernel, signature=signature, constexprs=fixed), target=TARGET)
    print("compiled", kernel.fn.__module__, kernel.fn.__name__, *(s for s in signature.values() if s != "constexpr"))


def main() -> int:
    """All kernels with and without their optional inputs."""
    blocks.launch = compile_instead
    from megatron_moe.kernels import (
        cross_entropy_triton,
        permutation_triton,
        quantisation_triton,
        scoring_triton,
        swiglu_triton,
    )
    from megatron_moe.kernels.quantisation import LARGEST_EXPONENT
    from megatron_moe.kernels.scoring import ScoringRule

    ids = torch.zeros(4, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x_R2F, rows, weights = (torch.zeros(*shape, dtype=dtype) for shape in ((4, 2, 768), (4, 768), (4,)))
        for given in (None, weights):
            column = None if given is None else given.unsqueeze(1)
            swiglu_triton.swiglu_forward(x_R2F, column)
            swiglu_triton.swiglu_backward(rows, x_R2F, column)
            permutation_triton.spread(rows, ids, given)
            permutation_triton.collect(rows, ids, ids, given)
        permutation_triton.row_products(rows, rows, ids)
        shard = cross_entropy_triton.shard_statistics(rows, ids, 700)
        cross_entropy_triton.shard_gradient(rows, ids, 700, shard.peak_N, shard.sum_N, shard.sum_N, dtype)
    for dtype in (torch.bfloat16, torch.float32):
        for form in LARGEST_EXPONENT:
            quantisation_triton.quantise_rows(torch.zeros(4, 768, dtype=dtype), form)
            quantisation_triton.quantise_blocks(torch.zeros(2, 128, 768, dtype=dtype), form)
    for dtype in (torch.float32, torch.float64):
        logits_TE, bias_E = torch.zeros(100, 8, dtype=dtype), torch.zeros(8, dtype=dtype)
        for rule in (
            ScoringRule(2, False, True, 1.0),
            ScoringRule(2, False, False, 1.0),
            ScoringRule(2, True, True, 2.5),
        ):
            scored = scoring_triton.score_topk_forward(logits_TE, bias_E, rule, None)
            scoring_triton.score_topk_forward(logits_TE, None, rule, scored.ids_TK)
            scoring_triton.score_topk_backward(scored.weights_TK, logits_TE, logits_TE, scored, rule)
    return 0


if __name__ == "__main__":
    sys.exit(main())
