"""Tokens travel to their experts by all-to-all, every peer getting just the rows it needs.

    x_TD --sort by expert--> rows_ND --all-to-all (ep)--> by sender --gather (etp)--> --sort--> rows_RD, expert-major
    y_TD <--add copies------ rows_ND <--all-to-all (ep)-- by sender <--sum (etp)----- <--unsort-- rows_RD

Split sizes differ per peer and step and may be zero; a rank without rows takes part all the same, so that no peer
waits. Expert e lives on ep rank e // L. Under expert tensor parallelism the etp peers hold slices of the same experts:
they gather each other's rows and sum the partial results.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe.moe.dispatchers.base import Dispatched
from megatron_moe.moe.permute import Copies, add_rows, copy_rows, expert_major, expert_order, inverse_of, reorder
from megatron_moe.moe.replay import decided
from megatron_moe.moe.routing import Routing
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext


class _Receipt(NamedTuple):
    copies: Copies  # the sent rows
    send: list[int]  # rows per ep peer
    receive: list[int]
    gathered: list[int]  # rows of each etp peer after the all-to-all
    order_R: Tensor  # expert-major from sender-major
    inverse_R: Tensor


class AllToAllDispatcher:
    """Uneven all-to-all over ep, with expert tensor parallelism behind it."""

    def __init__(self, num_experts: int, ctx: ParallelContext) -> None:
        self.num_experts, self.ctx = num_experts, ctx
        self.num_local = num_experts // ctx.ep.size

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """x [T, D] -> rows [R, D] of this rank's experts, expert-major."""
        order_N, counts_E, copies = expert_order(routing, self.num_experts, len(x_TD))
        counts_XPL = decided(lambda: self._exchange_counts(counts_E))
        receipt = self._receipt(copies, counts_E, counts_XPL, x_TD.device)
        rows = self._begin(copy_rows(x_TD, copies), receipt)
        weights = self._begin(routing.weights_N[order_N].unsqueeze(1), receipt)

        def finish() -> Dispatched:
            rows_RD, weights_R = self._received(rows(), receipt), self._received(weights(), receipt).squeeze(1)
            return Dispatched(rows_RD, weights_R, counts_XPL.sum((0, 1)), receipt)

        return finish

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Callable[[], Tensor]:
        """rows [R, D] (partial over etp) -> y [T, D]."""
        receipt: _Receipt = dispatched.receipt
        rows = reorder(rows_RD, receipt.inverse_R, receipt.order_R)
        rows = collectives.reduce_scatter_rows(rows, receipt.gathered, self.ctx.etp)
        rows_ND = collectives.begin_all_to_all(rows, receipt.receive, receipt.send, self.ctx.ep)
        return lambda: add_rows(rows_ND(), receipt.copies)

    def _exchange_counts(self, counts_E: Tensor) -> Tensor:
        """[E] copies per expert here -> [etp, ep, L] rows of this rank's experts, by sender. On the host."""
        ep, etp = self.ctx.ep, self.ctx.etp
        received_PL = collectives.exchange_rows(counts_E.view(ep.size, -1), [1] * ep.size, [1] * ep.size, ep)
        return collectives.gather_dim0(received_PL.unsqueeze(0), etp).cpu()

    def _receipt(self, copies: Copies, counts_E: Tensor, counts_XPL: Tensor, device: torch.device) -> _Receipt:
        order_R = expert_major(counts_XPL.flatten(0, 1))
        return _Receipt(
            copies=copies,
            send=counts_E.view(self.ctx.ep.size, -1).sum(1).tolist(),
            receive=counts_XPL[self.ctx.etp.rank].sum(1).tolist(),
            gathered=counts_XPL.sum((1, 2)).tolist(),
            order_R=order_R.to(device, non_blocking=True),
            inverse_R=inverse_of(order_R).to(device, non_blocking=True),
        )

    def _begin(self, rows: Tensor, receipt: _Receipt) -> Callable[[], Tensor]:
        """Rows by receiver -> rows by sender, when called."""
        return collectives.begin_all_to_all(rows, receipt.send, receipt.receive, self.ctx.ep)

    def _received(self, rows: Tensor, receipt: _Receipt) -> Tensor:
        """Rows by sender -> rows of this rank's experts, expert-major."""
        rows = collectives.all_gather_rows(rows, receipt.gathered, self.ctx.etp)
        return reorder(rows, receipt.order_R, receipt.inverse_R)
