"""Every expert is here (ep = etp = 1): nothing is sent, rows are only put in the experts' order."""

from collections.abc import Callable

from torch import Tensor

from megatron_moe.moe.dispatchers.base import Dispatched
from megatron_moe.moe.permute import add_rows, copy_rows, expert_order
from megatron_moe.moe.routing import Routing


class LocalDispatcher:
    """Sort by expert, and back."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """x [T, D] -> rows [N, D], expert-major."""
        order_N, counts_E, copies = expert_order(routing, self.num_experts, len(x_TD))
        dispatched = Dispatched(copy_rows(x_TD, copies), routing.weights_N[order_N], counts_E, copies)
        return lambda: dispatched

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Callable[[], Tensor]:
        """rows [N, D] -> y [T, D]."""
        return lambda: add_rows(rows_RD, dispatched.receipt)
