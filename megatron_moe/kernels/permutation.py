"""Move rows between the order of tokens and the order of experts; every output row is written once, by a gather.

    copy n = t K + k of token t                 row_ids_TK: the row of each copy, -1 for none
    rows of experts [ expert 0 | expert 1 | .. ]  copy_ids_N: the copy in each row, its inverse

    permute      rows[n] = x[copy_ids[n] // K]            backward: sums of gathered rows
    unpermute    y[t] = sum over k of weight[t, k] * rows[row_ids[t, k]]

Neither direction adds atomically, so that the result is the same at every run.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_moe.kernels.selection import functions


class RowOrder(NamedTuple):
    """Where the copies of T tokens lie among N rows: two int64 tables, each the other's inverse.

    Attributes:
        copy_ids_N: the copy t K + k that each row holds.
        row_ids_TK: the row of each copy; -1 where the slot is empty.
    """

    copy_ids_N: Tensor
    row_ids_TK: Tensor


def row_order(ids_TK: Tensor, positions_TK: Tensor, counts_E: Tensor) -> RowOrder:
    """The expert-major order, from the dense table of experts and positions, without sorting (DeepSpeed-MoE, 5.4).

    Args:
        ids_TK: int64 expert of each copy; every slot has one.
        positions_TK: int64 place of the copy among those of its expert.
        counts_E: int64 copies of each expert.
    """
    first_E = counts_E.cumsum(0) - counts_E
    row_ids_TK = first_E[ids_TK] + positions_TK
    copy_ids_N = torch.empty(ids_TK.numel(), dtype=torch.int64, device=ids_TK.device)
    copy_ids_N[row_ids_TK.view(-1)] = torch.arange(ids_TK.numel(), device=ids_TK.device)
    return RowOrder(copy_ids_N, row_ids_TK)


def permute(x_TD: Tensor, order: RowOrder, kernels: str = "torch") -> Tensor:
    """[T, D] -> [N, D]: each row is a copy of its token."""
    return _Permute.apply(x_TD, *order, kernels)  # type: ignore[return-value]


def unpermute(rows_ND: Tensor, order: RowOrder, weights_TK: Tensor | None = None, kernels: str = "torch") -> Tensor:
    """[N, D] -> [T, D]: each token is the sum of its rows, weighed where there are weights [T, K]."""
    return _Unpermute.apply(rows_ND, weights_TK, *order, kernels)  # type: ignore[return-value]


def spread(x_TD: Tensor, copy_ids_N: Tensor, num_slots: int) -> Tensor:
    """Row n is token copy_ids[n] // num_slots: [T, D] -> [N, D]."""
    return x_TD.index_select(0, copy_ids_N // num_slots)


def collect(rows_ND: Tensor, row_ids_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Sum of each token's rows, added up in float32 at least: [N, D] -> [T, D]."""
    num_tokens, num_slots = row_ids_TK.shape
    y_TD = rows_ND.new_zeros(num_tokens, rows_ND.shape[1], dtype=torch.promote_types(rows_ND.dtype, torch.float32))
    # An empty slot reads a row of zeros behind the last.
    padded_ND = torch.cat([rows_ND, rows_ND.new_zeros(1, rows_ND.shape[1])])
    for k in range(num_slots):
        taken_TD = padded_ND.index_select(0, row_ids_TK[:, k] % len(padded_ND)).to(y_TD.dtype)
        y_TD += taken_TD if weights_TK is None else taken_TD * weights_TK[:, k : k + 1]
    return y_TD.to(rows_ND.dtype)


def collect_backward(grad_TD: Tensor, rows_ND: Tensor, copy_ids_N: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`collect` with weights: of the rows [N, D], and of the weights [T, K]; 0 for empty slots."""
    wide = torch.promote_types(grad_TD.dtype, torch.float32)
    grad_ND = spread(grad_TD, copy_ids_N, weights_TK.shape[1]).to(wide)
    weights_N1 = weights_TK.view(-1, 1).index_select(0, copy_ids_N)
    grad_weights_TK = torch.zeros_like(weights_TK)
    grad_weights_TK.view(-1)[copy_ids_N] = (grad_ND * rows_ND).sum(1).to(weights_TK.dtype)
    return (grad_ND * weights_N1).to(rows_ND.dtype), grad_weights_TK


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, copy_ids_N: Tensor, row_ids_TK: Tensor, kernels: str) -> Tensor:
        ctx.save_for_backward(row_ids_TK)
        ctx.kernels = kernels
        return functions("permutation", kernels).spread(x_TD, copy_ids_N, row_ids_TK.shape[1])

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (row_ids_TK,) = ctx.saved_tensors
        return functions("permutation", ctx.kernels).collect(grad_ND.contiguous(), row_ids_TK, None), None, None, None


class _Unpermute(torch.autograd.Function):
    """Without weights nothing is kept of the rows."""

    @staticmethod
    def forward(
        ctx: Any, rows_ND: Tensor, weights_TK: Tensor | None, copy_ids_N: Tensor, row_ids_TK: Tensor, kernels: str
    ) -> Tensor:
        ctx.save_for_backward(copy_ids_N, *(() if weights_TK is None else (rows_ND, weights_TK)))
        ctx.num_slots, ctx.kernels = row_ids_TK.shape[1], kernels
        return functions("permutation", kernels).collect(rows_ND, row_ids_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        copy_ids_N, *weighed = ctx.saved_tensors
        chosen, grad_TD = functions("permutation", ctx.kernels), grad_TD.contiguous()
        if not weighed:
            return chosen.spread(grad_TD, copy_ids_N, ctx.num_slots), None, None, None, None
        rows_ND, weights_TK = weighed
        return *chosen.collect_backward(grad_TD, rows_ND, copy_ids_N, weights_TK), None, None, None
