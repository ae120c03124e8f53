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
from megatron_moe.moe.dispatchers.exchange import ExchangingDispatcher, Splits
from megatron_moe.moe.permute import Copies, add_rows, copy_rows, expert_major, expert_order, inverse_of, reorder
from megatron_moe.moe.replay import decided
from megatron_moe.moe.routing import Routing


class _Receipt(NamedTuple):
    copies: Copies  # the sent rows
    rows: Splits
    order_R: Tensor  # expert-major from sender-major
    inverse_R: Tensor


class AllToAllDispatcher(ExchangingDispatcher):
    """Uneven all-to-all over ep, with expert tensor parallelism behind it."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """x [T, D] -> rows [R, D] of this rank's experts, expert-major."""
        order_N, counts_E, copies = expert_order(routing, self.num_experts, len(x_TD))
        splits, counts_XPL = decided(lambda: self._splits(counts_E))
        receipt = _receipt(copies, splits, counts_XPL, x_TD.device)
        rows = self._begin(copy_rows(x_TD, copies), splits)
        weights = self._begin(routing.weights_N[order_N].unsqueeze(1), splits)

        def finish() -> Dispatched:
            rows_RD, weights_R = self._received(rows(), receipt), self._received(weights(), receipt).squeeze(1)
            return Dispatched(rows_RD, weights_R, counts_XPL.sum((0, 1)), receipt)

        return finish

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Callable[[], Tensor]:
        """rows [R, D] (partial over etp) -> y [T, D]."""
        receipt: _Receipt = dispatched.receipt
        rows_ND = self._begin_return(reorder(rows_RD, receipt.inverse_R, receipt.order_R), receipt.rows)
        return lambda: add_rows(rows_ND(), receipt.copies)

    def _splits(self, counts_E: Tensor) -> tuple[Splits, Tensor]:
        """Copies per expert here -> splits, and copies by sender and local expert [etp, ep, L]. On the host."""
        sent_PL, counts_XPL = self._exchange_counts(counts_E.view(self.ctx.ep.size, -1))
        return Splits.of(sent_PL.sum(1), counts_XPL.sum(2), self.ctx.etp.rank), counts_XPL

    def _received(self, rows: Tensor, receipt: _Receipt) -> Tensor:
        """Rows by sender -> rows of this rank's experts, expert-major."""
        return reorder(self._gathered(rows, receipt.rows), receipt.order_R, receipt.inverse_R)


def _receipt(copies: Copies, splits: Splits, counts_XPL: Tensor, device: torch.device) -> _Receipt:
    order_R = expert_major(counts_XPL.flatten(0, 1))
    inverse_R = inverse_of(order_R)
    return _Receipt(copies, splits, order_R.to(device, non_blocking=True), inverse_R.to(device, non_blocking=True))
