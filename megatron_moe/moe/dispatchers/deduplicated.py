"""All-to-all in which a token travels once to each rank that has experts for it, however many they are.

    x_TD --one row per (token, rank)--> rows_SD --all-to-all (ep)--> --gather (etp)--> --copy, by expert--> rows_RD
    y_TD <--add---------------------- rows_SD <--all-to-all (ep)-- <--sum (etp)------- <--add copies------- rows_RD

Worth it where a token has several experts on a rank: with K of E experts at random and L of them on each of e ranks,
e (1 - C(E - L, K) / C(E, K)) rows per token instead of K, here and in the backward pass (DeepEP sends in this way;
group-limited routing, DeepSeek-V2, section 2.1.2, makes the ranks few). Beside the rows each copy sends its weight and
the place of its row among those from its sender, 4 bytes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe.moe.dispatchers.base import Dispatched
from megatron_moe.moe.dispatchers.exchange import ExchangingDispatcher, Splits
from megatron_moe.moe.permute import Copies, add_rows, copy_rows, expert_major, grouped_order
from megatron_moe.moe.replay import decided
from megatron_moe.moe.routing import Routing
from megatron_moe.parallel import collectives


class _Receipt(NamedTuple):
    sent: Copies  # the sent rows, copies of this rank's tokens
    rows: Splits
    used: Copies  # the experts' rows, copies of the received ones


class _Pairs(NamedTuple):
    """The distinct (peer, token) pairs: the sent rows, by peer.

    Attributes:
        token_ids_S: int64, the token of each.
        rows_P: int64, how many each ep peer gets.
        place_N: int32, of each copy, by expert: the place of its row among those for the same peer.
    """

    token_ids_S: Tensor
    rows_P: Tensor
    place_N: Tensor


class DeduplicatingDispatcher(ExchangingDispatcher):
    """Uneven all-to-all of distinct (token, rank) pairs; copies for the experts are made where they are."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """x [T, D] -> rows [R, D] of this rank's experts, expert-major."""
        order_N, counts_E = grouped_order(routing.expert_ids_N, self.num_experts)
        pairs = decided(lambda: self._pairs(routing, order_N, x_TD.shape[0]))
        rows, copies, counts_XPL = decided(lambda: self._splits(pairs.rows_P, counts_E))
        sent = Copies.of(pairs.token_ids_S, x_TD.shape[0], routing.kernels)
        arriving = self._begin(copy_rows(x_TD, sent), rows)
        weights = self._begin(routing.weights_N[order_N].unsqueeze(1), copies)
        place_R = decided(lambda: self._send_places(pairs.place_N, rows, copies, counts_XPL))
        order_R = expert_major(counts_XPL.flatten(0, 1)).to(x_TD.device, non_blocking=True)
        used = Copies.of(place_R[order_R], sum(rows.gathered), routing.kernels)

        def finish() -> Dispatched:
            rows_RD = copy_rows(self._gathered(arriving(), rows), used)
            weights_R = self._gathered(weights(), copies).squeeze(1)[order_R]
            return Dispatched(rows_RD, weights_R, counts_XPL.sum((0, 1)), _Receipt(sent, rows, used))

        return finish

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Callable[[], Tensor]:
        """rows [R, D] (partial over etp) -> y [T, D]."""
        receipt: _Receipt = dispatched.receipt
        rows_SD = self._begin_return(add_rows(rows_RD, receipt.used), receipt.rows)
        return lambda: add_rows(rows_SD(), receipt.sent)

    def _pairs(self, routing: Routing, order_N: Tensor, num_tokens: int) -> _Pairs:
        """Waits for the device: how many pairs are distinct."""
        peer_N = routing.expert_ids_N[order_N] // self.num_local
        pairs_S, row_N = torch.unique(peer_N * num_tokens + routing.token_ids_N[order_N], return_inverse=True)
        peer_S, token_ids_S = pairs_S // max(num_tokens, 1), pairs_S % max(num_tokens, 1)
        rows_P = pairs_S.new_zeros(self.ctx.ep.size).scatter_add_(0, peer_S, torch.ones_like(peer_S))
        place_N = row_N - (rows_P.cumsum(0) - rows_P)[peer_N]
        return _Pairs(token_ids_S, rows_P, place_N.to(torch.int32))

    def _splits(self, rows_P: Tensor, counts_E: Tensor) -> tuple[Splits, Splits, Tensor]:
        """Splits of the rows and of the copies, and copies by sender and local expert [etp, ep, L]. On the host."""
        mine_PC = torch.cat([rows_P.unsqueeze(1), counts_E.view(self.ctx.ep.size, -1)], 1)
        sent_PC, received_XPC = self._exchange_counts(mine_PC)
        counts_XPL, etp_rank = received_XPC[..., 1:], self.ctx.etp.rank
        rows = Splits.of(sent_PC[:, 0], received_XPC[..., 0], etp_rank)
        return rows, Splits.of(sent_PC[:, 1:].sum(1), counts_XPL.sum(2), etp_rank), counts_XPL

    def _send_places(self, place_N: Tensor, rows: Splits, copies: Splits, counts_XPL: Tensor) -> Tensor:
        """Of each copy here, by sender, the number of its row among all received and gathered rows."""
        ep, etp = self.ctx.ep, self.ctx.etp
        place_R = collectives.exchange_rows(place_N, copies.send, copies.receive, ep)
        firsts_P = torch.tensor([0, *rows.receive]).cumsum(0)[:-1]
        first_R = firsts_P.repeat_interleave(counts_XPL[etp.rank].sum(1)).to(place_N.device, non_blocking=True)
        whole_R = collectives.all_gather_rows(place_R + first_R, copies.gathered, etp)
        firsts_X = torch.tensor([0, *rows.gathered]).cumsum(0)[:-1]
        return whole_R + firsts_X.repeat_interleave(torch.tensor(copies.gathered)).to(place_N.device, non_blocking=True)
