"""What every dispatcher does: move copies of tokens to their experts and the results back, knowing no scores.

    dispatch: x_TD, routing -> rows_RD ordered by local expert, gate weights_R, counts_L, receipt
    combine:  rows_RD, receipt -> y_TD

The receipt is opaque to all others. Both halves begin a transfer and return what finishes it, so that something else
can be computed meanwhile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron_moe.moe.routing import Routing


class Dispatched(NamedTuple):
    """Rows on the ranks that own their experts.

    Attributes:
        rows_RD: copies of tokens, expert-major.
        weights_R: combine weight of each row; the experts apply it.
        counts_L: int64 on the host or device, rows of each local expert.
        receipt: what ``combine`` needs; opaque.
    """

    rows_RD: Tensor
    weights_R: Tensor
    counts_L: Tensor
    receipt: Any


class Dispatcher(Protocol):
    """Moves tokens; holds no parameters."""

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        """Send every copy to the rank that owns its expert; call what is returned when the rows are needed."""
        ...

    def combine(self, rows_RD: Tensor, dispatched: Dispatched) -> Callable[[], Tensor]:
        """Send results back and add up the copies of each token: [R, D] -> [T, D], when called."""
        ...
