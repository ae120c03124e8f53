"""The products of ``grouped.py`` by Transformer Engine: one call, whose products run side by side on several streams.

Written against ``general_grouped_gemm`` of version 2.20; not yet run on hardware. It multiplies B by A, of which the
layout says what is transposed: TN is B A^T, NN is B A, NT is B^T A. Only experts that have rows are handed to it.
Weight gradients are accumulated in the type of their buffer, float32, as it multiplies.
"""

from torch import Tensor
from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

Runs = list[tuple[int, int, int]]


def grouped_product(rows_RI: Tensor, weight_LOI: Tensor, runs: Runs) -> Tensor:
    """[R, I] x [L, O, I] -> [R, O]; runs are (expert, first row, end row)."""
    out_RO = rows_RI.new_empty(rows_RI.shape[0], weight_LOI.shape[1])
    _multiply([weight_LOI[e] for e, *_ in runs], [rows_RI[i:j] for _, i, j in runs], [out_RO], "TN")
    return out_RO


def grouped_product_transposed(grad_RO: Tensor, weight_LOI: Tensor, runs: Runs) -> Tensor:
    """[R, O] x [L, O, I] -> [R, I]."""
    out_RI = grad_RO.new_empty(grad_RO.shape[0], weight_LOI.shape[2])
    _multiply([weight_LOI[e] for e, *_ in runs], [grad_RO[i:j] for _, i, j in runs], [out_RI], "NN", grad=True)
    return out_RI


def add_grouped_outer_product(out_LOI: Tensor, grad_RO: Tensor, rows_RI: Tensor, runs: Runs, beta: float) -> None:
    """[R, O], [R, I] -> out [L, O, I] = beta out + product; beta is 0 or 1."""
    if beta == 0 and len(runs) < len(out_LOI):
        out_LOI.zero_()
    factors = [rows_RI[i:j] for _, i, j in runs], [grad_RO[i:j] for _, i, j in runs]
    _multiply(*factors, [out_LOI[e] for e, *_ in runs], "NT", grad=True, accumulate=beta == 1)


def _multiply(a: list[Tensor], b: list[Tensor], out: list[Tensor], layout: str, **how: bool) -> None:
    if not a:
        return
    general_grouped_gemm(
        a,
        b,
        out,
        quantization_params=[None] * len(a),
        out_dtype=out[0].dtype,
        layout=layout,
        m_splits=[len(rows) for rows in b],
        single_output=layout != "NT",
        **how,
    )
