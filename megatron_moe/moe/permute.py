"""Order copies of tokens by expert, and add them back: the only place where rows change order.

tokens_TD --token_ids_N, expert_ids_N--> rows_ND (expert-major, tokens in order inside an expert) --> tokens_TD

Both ways are one gather. Copying rows and adding copies up are each other's transpose, so the backward pass of one is
the forward pass of the other; nothing is scattered, and sums are made in the order of the rows on every device.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx


class Copies(NamedTuple):
    """Which token each row is a copy of, and the rows of each token.

    Attributes:
        token_ids_R: int64, the token of each row.
        rows_R: int64, the rows again, token by token.
        starts_T: int64, where in ``rows_R`` those of each token begin.
    """

    token_ids_R: Tensor
    rows_R: Tensor
    starts_T: Tensor

    @staticmethod
    def of(token_ids_R: Tensor, num_tokens: int) -> "Copies":
        """Of any order of rows; tokens may have none."""
        rows_R, counts_T = grouped_order(token_ids_R, num_tokens)
        return Copies(token_ids_R, rows_R, counts_T.cumsum(0) - counts_T)


def grouped_order(group_ids_N: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Stable order of things by group.

    Returns:
        order_N: int64, the thing that goes to each place.
        counts_G: int64, things of each group.
    """
    order_N = torch.argsort(group_ids_N, stable=True)
    counts_G = torch.zeros(num_groups, dtype=torch.int64, device=group_ids_N.device)
    counts_G.scatter_add_(0, group_ids_N, torch.ones_like(group_ids_N))
    return order_N, counts_G


def own_experts_order(expert_ids_N: Tensor, ep_rank: int, num_local: int) -> tuple[Tensor, Tensor]:
    """The copies for one rank's experts, grouped by expert. Waits for the device.

    Returns:
        kept_R: int64, the copy that goes to each row; those for other ranks are left out.
        counts_L: int64, rows of each local expert.
    """
    local_ids_N = expert_ids_N - ep_rank * num_local
    mine_M = ((local_ids_N >= 0) & (local_ids_N < num_local)).nonzero().squeeze(1)
    order_R, counts_L = grouped_order(local_ids_N[mine_M], num_local)
    return mine_M[order_R], counts_L


def copy_rows(x_TD: Tensor, copies: Copies) -> Tensor:
    """[T, D] tokens -> [R, D], the token of each row."""
    return _CopyRows.apply(x_TD, copies)  # type: ignore[return-value]


def add_rows(rows_RD: Tensor, copies: Copies) -> Tensor:
    """[R, D] rows -> [T, D]: each token is the sum of its rows; a token without rows is zero."""
    return _AddRows.apply(rows_RD, copies)  # type: ignore[return-value]


def reorder(rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Row r of the result is row ``order_R[r]``; ``inverse_R`` is the inverse permutation."""
    return _Reorder.apply(rows_RD, order_R, inverse_R)  # type: ignore[return-value]


def expert_major(counts_PL: Tensor) -> Tensor:
    """Row order that turns peer-major blocks into expert-major ones.

    Args:
        counts_PL: [peers, local experts] rows of each block, as they lie: peer by peer, expert by expert.

    Returns:
        order_R: int64; row r of the expert-major order is row ``order[r]`` of the peer-major one.
    """
    num_peers, num_local = counts_PL.shape
    expert_of_row_R = torch.arange(num_local).repeat(num_peers).repeat_interleave(counts_PL.flatten())
    return torch.argsort(expert_of_row_R, stable=True)


def inverse_of(order_R: Tensor) -> Tensor:
    """The inverse permutation."""
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return inverse_R


def _sum_of_copies(rows_RD: Tensor, copies: Copies) -> Tensor:
    return F.embedding_bag(copies.rows_R, rows_RD, copies.starts_T, mode="sum")


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_TD: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies  # type: ignore[attr-defined]
        return x_TD.index_select(0, copies.token_ids_R)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_RD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sum_of_copies(grad_RD.contiguous(), ctx.copies), None  # type: ignore[attr-defined]


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows_RD: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies  # type: ignore[attr-defined]
        return _sum_of_copies(rows_RD, copies)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_TD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad_TD.index_select(0, ctx.copies.token_ids_R), None  # type: ignore[attr-defined]


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.inverse_R = inverse_R  # type: ignore[attr-defined]
        return rows_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad_RD.index_select(0, ctx.inverse_R), None, None  # type: ignore[attr-defined]
