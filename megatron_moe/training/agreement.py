"""Numbers that the host knows, put together over ranks: sums and maxima, the same on every rank.

    rank 0   [3.0, 12.0]   \\
    rank 1   [5.0, 11.0]   }  to the device, one collective, back to the host: a wait; a rank that is alone has no need
"""

from collections.abc import Sequence

import torch

from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import Axis


def summed(values: Sequence[float], axis: Axis, device: torch.device) -> list[float]:
    """Sums over the axis, in float64."""
    if axis.size == 1:
        return list(values)
    return collectives.sum_(torch.tensor(values, dtype=torch.float64, device=device), axis).tolist()


def largest(values: Sequence[int], axis: Axis, device: torch.device) -> list[int]:
    """The largest over the axis of each."""
    if axis.size == 1:
        return list(values)
    return collectives.max_(torch.tensor(values, device=device), axis).tolist()
