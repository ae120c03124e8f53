"""Every rank of ep x etp sees all tokens and keeps the copies of its own experts.

    x_TD, ids_N, weights_N --all-gather (ep, etp)--> of all ranks --keep own experts, sort--> rows_RD, expert-major
    y_TD <--reduce-scatter (etp, ep)-- partial sums for all tokens <--add copies------------- rows_RD

Two large collectives of fixed size instead of an all-to-all of rows: (ep etp - 1) T rows sent each way, whatever the
routing. That is less than all-to-all's only where a token has more copies than there are ranks. Under expert tensor
parallelism the partial results of etp peers add up in the same reduce-scatter.
"""

from collections.abc import Callable
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe.moe.dispatchers.base import Dispatched
from megatron_moe.moe.permute import Copies, add_rows, copy_rows, own_experts_order
from megatron_moe.moe.replay import decided
from megatron_moe.moe.routing import Routing
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import Axis, ParallelContext


class _Counts(NamedTuple):
    """Rows of something on every rank: [etp][ep] numbers, in the order in which they are gathered."""

    by_rank: list[list[int]]

    @property
    def total(self) -> int:
        return sum(map(sum, self.by_rank))


class _Own(NamedTuple):
    """What the ranks tell each other, and the copies of this rank's experts among all."""

    tokens: _Counts
    copies: _Counts
    kept_R: Tensor  # the copy that goes to each row
    token_ids_R: Tensor  # its token
    counts_L: Tensor


class _Receipt(NamedTuple):
    copies: Copies  # of the tokens of all ranks
    tokens: _Counts


class AllGatherDispatcher:
    """All-gather over ep, then etp; reduce-scatter back. Waits for the device to pick the copies of its experts."""

    def __init__(self, num_experts: int, ctx: ParallelContext) -> None:
        self.ctx = ctx
        self.num_local = num_experts // ctx.ep.size

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """x [T, D] -> rows [R, D] of this rank's experts, expert-major."""
        own = decided(lambda: self._own(x_TD, routing))
        copies = Copies.of(own.token_ids_R, own.tokens.total, routing.kernels)
        rows_RD = copy_rows(self._gather(x_TD, own.tokens), copies)
        weights_R = self._gather(routing.weights_N.unsqueeze(1), own.copies).squeeze(1)[own.kept_R]
        dispatched = Dispatched(rows_RD, weights_R, own.counts_L, _Receipt(copies, own.tokens))
        return lambda: dispatched

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Callable[[], Tensor]:
        """rows [R, D] (partial over etp) -> y [T, D]."""
        receipt: _Receipt = dispatched.receipt
        ep, etp, by_rank = self.ctx.ep, self.ctx.etp, receipt.tokens.by_rank
        y = add_rows(rows_RD, receipt.copies)
        y = _scatter_sum(y, [sum(counts) for counts in by_rank], etp)
        y_TD = _scatter_sum(y, by_rank[etp.rank], ep)
        return lambda: y_TD

    def _own(self, x_TD: Tensor, routing: Routing) -> _Own:
        """Gathers all choices; waits for the device to pick this rank's."""
        tokens, copies = self._exchange_counts(x_TD, routing)
        pairs_N2 = torch.stack([routing.token_ids_N, routing.expert_ids_N], 1).to(torch.int32)
        token_ids_N, expert_ids_N = self._gather(pairs_N2, copies).long().unbind(1)
        token_ids_N = token_ids_N + _first_tokens(tokens, copies).to(x_TD.device)
        kept_R, counts_L = own_experts_order(expert_ids_N, self.ctx.ep.rank, self.num_local)
        return _Own(tokens, copies, kept_R, token_ids_N[kept_R], counts_L)

    def _gather(self, rows: Tensor, counts: _Counts) -> Tensor:
        """Rows of every rank, in the order of ``counts``; the gradient is summed and scattered."""
        ep, etp = self.ctx.ep, self.ctx.etp
        rows = _gather(rows, counts.by_rank[etp.rank], ep)
        return _gather(rows, [sum(by_ep) for by_ep in counts.by_rank], etp)

    def _exchange_counts(self, x_TD: Tensor, routing: Routing) -> tuple[_Counts, _Counts]:
        """How many tokens and copies every rank has. On the host."""
        mine_12 = torch.tensor([[x_TD.shape[0], routing.token_ids_N.shape[0]]], device=x_TD.device)
        all_P2 = collectives.gather_dim0(collectives.gather_dim0(mine_12, self.ctx.ep), self.ctx.etp)
        all_2XP = all_P2.T.reshape(2, self.ctx.etp.size, self.ctx.ep.size)
        tokens, copies = all_2XP.tolist()
        return _Counts(tokens), _Counts(copies)


def _gather(rows: Tensor, counts: list[int], axis: Axis) -> Tensor:
    """All ranks' rows, by the plain collective where all have as many."""
    even = len(set(counts)) == 1
    return collectives.all_gather(rows, axis) if even else collectives.all_gather_rows(rows, counts, axis)


def _scatter_sum(rows: Tensor, counts: list[int], axis: Axis) -> Tensor:
    """This rank's rows of the sum: the mirror of :func:`_gather`."""
    even = len(set(counts)) == 1
    return collectives.reduce_scatter(rows, axis) if even else collectives.reduce_scatter_rows(rows, counts, axis)


def _first_tokens(tokens: _Counts, copies: _Counts) -> Tensor:
    """For each gathered copy the number of its rank's first token among all tokens."""
    firsts = torch.tensor([0, *accumulate(chain(*tokens.by_rank))][:-1])
    return firsts.repeat_interleave(torch.tensor([*chain(*copies.by_rank)]))
