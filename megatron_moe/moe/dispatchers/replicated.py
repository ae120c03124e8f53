"""In generation every rank of ep x etp holds the same tokens: none is sent, and each adds what its experts say.

    x_TD, ids_N --keep copies of own experts, sort--> rows_RD --experts--> add copies --sum (ep, etp)--> y_TD

Two sums of T rows. It is not among those to train with, where ranks hold different tokens.
"""

from collections.abc import Callable

from torch import Tensor

from megatron_moe.moe.dispatchers.base import Dispatched
from megatron_moe.moe.permute import Copies, add_rows, copy_rows, own_experts_order
from megatron_moe.moe.routing import Routing
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext


class ReplicatedDispatcher:
    """Sum over ep, then etp. Waits for the device to pick the copies of its experts."""

    def __init__(self, num_experts: int, ctx: ParallelContext) -> None:
        self.ctx, self.num_local = ctx, num_experts // ctx.ep.size

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """x [T, D], the same on all ranks -> rows [R, D] of this rank's experts, expert-major."""
        kept_R, counts_L = own_experts_order(routing.expert_ids_N, self.ctx.ep.rank, self.num_local)
        copies = Copies.of(routing.token_ids_N[kept_R], x_TD.shape[0], routing.kernels)
        dispatched = Dispatched(copy_rows(x_TD, copies), routing.weights_N[kept_R], counts_L, copies)
        return lambda: dispatched

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Callable[[], Tensor]:
        """rows [R, D] (partial over etp) -> y [T, D], the same on all ranks."""
        y_TD = add_rows(rows_RD, dispatched.receipt)
        return lambda: collectives.all_reduce(collectives.all_reduce(y_TD, self.ctx.ep), self.ctx.etp)
