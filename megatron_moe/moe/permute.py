"""Order copies of tokens by expert, and add them back: the only place where rows change order.

tokens_TD --token_ids_N, expert_ids_N--> rows_ND (expert-major, tokens in order inside an expert) --> tokens_TD

Both ways are one gather. Copying rows and adding copies up are each other's transpose, so the backward pass of one is
the forward pass of the other; nothing is scattered, and sums are made in the order of the rows on every device.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megatron_moe.kernels.selection import functions
from megatron_moe.moe.routing import Routing


class Copies(NamedTuple):
    """Which token each row is a copy of, and the rows of each token.

    Attributes:
        token_ids_R: int64, the token of each row.
        rows_R: int64, the rows again, token by token.
        starts_T: int64, where in ``rows_R`` those of each token begin.
        kernels: implementation of copying and adding up.
    """

    token_ids_R: Tensor
    rows_R: Tensor
    starts_T: Tensor
    kernels: str = "torch"

    @staticmethod
    def of(token_ids_R: Tensor, num_tokens: int, kernels: str = "torch") -> "Copies":
        """Of any order of rows; tokens may have none."""
        rows_R, counts_T = grouped_order(token_ids_R, num_tokens)
        return Copies(token_ids_R, rows_R, counts_T.cumsum(0) - counts_T, kernels)


class ExpertOrder(NamedTuple):
    """Copies in the order of experts, tokens in order inside an expert.

    Attributes:
        order_N: int64, the copy that goes to each row.
        counts_E: int64, copies of each expert.
        copies: of the tokens, in this order.
    """

    order_N: Tensor
    counts_E: Tensor
    copies: Copies


def expert_order(routing: Routing, num_experts: int, num_tokens: int) -> ExpertOrder:
    """By the table of places, where the router's kernel made one; else by sorting."""
    table = routing.table
    if table is None:
        order_N, counts_E = grouped_order(routing.expert_ids_N, num_experts)
        copies = Copies.of(routing.token_ids_N[order_N], num_tokens, routing.kernels)
        return ExpertOrder(order_N, counts_E, copies)
    first_E = table.counts_E.cumsum(0) - table.counts_E
    rows_N = first_E[routing.expert_ids_N] + table.positions_N  # copies are token-major: these are the rows by token
    order_N = inverse_of(rows_N)
    starts_T = torch.arange(num_tokens, device=rows_N.device) * (len(rows_N) // max(num_tokens, 1))
    return ExpertOrder(order_N, table.counts_E, Copies(routing.token_ids_N[order_N], rows_N, starts_T, routing.kernels))


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


def copy_rows(x_TD: Tensor, copies: Copies, weights_R: Tensor | None = None) -> Tensor:
    """[T, D] tokens -> [R, D], the token of each row, times the row's weight; its gradient is a (weighed) sum."""
    return _CopyRows.apply(x_TD, weights_R, copies)  # type: ignore[return-value]


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


class _CopyRows(torch.autograd.Function):
    """Without weights nothing is kept of the tokens; never of the rows."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_TD: Tensor, weights_R: Tensor | None, copies: Copies) -> Tensor:
        ctx.copies = copies  # type: ignore[attr-defined]
        ctx.save_for_backward(*(() if weights_R is None else (x_TD, weights_R)))
        return functions("permutation", copies.kernels).spread(x_TD, copies.token_ids_R, weights_R)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_RD: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        copies: Copies = ctx.copies  # type: ignore[attr-defined]
        chosen, weighed = functions("permutation", copies.kernels), ctx.saved_tensors  # type: ignore[attr-defined]
        grad_RD = grad_RD.contiguous()
        if not weighed:
            return chosen.collect(grad_RD, copies.rows_R, copies.starts_T), None, None
        x_TD, weights_R = weighed
        grad_TD = chosen.collect(grad_RD, copies.rows_R, copies.starts_T, weights_R)
        return grad_TD, chosen.row_products(x_TD, grad_RD, copies.token_ids_R), None


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows_RD: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies  # type: ignore[attr-defined]
        return functions("permutation", copies.kernels).collect(rows_RD, copies.rows_R, copies.starts_T)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_TD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        copies: Copies = ctx.copies  # type: ignore[attr-defined]
        return functions("permutation", copies.kernels).spread(grad_TD.contiguous(), copies.token_ids_R), None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.inverse_R = inverse_R  # type: ignore[attr-defined]
        return rows_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad_RD.index_select(0, ctx.inverse_R), None, None  # type: ignore[attr-defined]
