"""What the uneven all-to-alls share: sizes are exchanged first, then rows go to their ep peers and on to all etp peers.

counts_PN --all-to-all (ep), gather (etp), to the host--> counts_XPN, of every sender    one wait for the device
rows by receiver --all-to-all (ep)--> by sender --gather (etp)--> of all etp peers
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext


class Splits(NamedTuple):
    """How many of something go to each ep peer, come from each, and are then with each etp peer."""

    send: list[int]
    receive: list[int]
    gathered: list[int]

    @staticmethod
    def of(sent_P: Tensor, counts_XP: Tensor, etp_rank: int) -> "Splits":
        """Of what this rank sends, and what each etp peer receives from each ep peer; both on the host."""
        return Splits(sent_P.tolist(), counts_XP[etp_rank].tolist(), counts_XP.sum(1).tolist())


class ExchangingDispatcher:
    """Expert e lives on ep rank e // L; etp peers hold slices of the same experts."""

    def __init__(self, num_experts: int, ctx: ParallelContext) -> None:
        self.num_experts, self.ctx = num_experts, ctx
        self.num_local = num_experts // ctx.ep.size

    def _exchange_counts(self, counts_PN: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers for each ep peer -> the same [ep, n], and those of every sender [etp, ep, n]. On the host."""
        ep, etp = self.ctx.ep, self.ctx.etp
        received_PN = collectives.exchange_rows(counts_PN, [1] * ep.size, [1] * ep.size, ep)
        received_XPN = collectives.gather_dim0(received_PN.unsqueeze(0), etp)
        all_ZPN = torch.cat([counts_PN.unsqueeze(0), received_XPN]).cpu()  # the only wait
        return all_ZPN[0], all_ZPN[1:]

    def _begin(self, rows: Tensor, splits: Splits) -> Callable[[], Tensor]:
        """Rows by receiver -> rows by sender, when called."""
        return collectives.begin_all_to_all(rows, splits.send, splits.receive, self.ctx.ep)

    def _gathered(self, rows: Tensor, splits: Splits) -> Tensor:
        """Rows by sender, of this rank -> of all etp peers."""
        return collectives.all_gather_rows(rows, splits.gathered, self.ctx.etp)

    def _begin_return(self, rows: Tensor, splits: Splits) -> Callable[[], Tensor]:
        """The way back of both: partial results of all etp peers' rows -> whole ones by receiver, when called."""
        rows = collectives.reduce_scatter_rows(rows, splits.gathered, self.ctx.etp)
        return collectives.begin_all_to_all(rows, splits.receive, splits.send, self.ctx.ep)
