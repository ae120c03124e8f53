"""Which ranks the others wait for (--log-straggler): busy and waiting seconds of every rank.

All ranks take the same time for a step, since they meet in it; what tells a slow one apart is that it waits least.

    rank   0  ██████████░░░░   busy 0.71 s, waits 29%
    rank   1  ██████████████   busy 0.99 s, waits  1%   <- the straggler
    rank   2  █████████░░░░░   busy 0.66 s, waits 34%
"""

from statistics import median
from typing import Any

import torch

from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.waiting import WaitClock
from megatron_moe.training.launch import is_main_rank

NOTEWORTHY = 1.2  # busy seconds over the median's, from which a rank is named


class StragglerClock:
    """Adds up steps and waiting between reports; does nothing unless it is wanted."""

    def __init__(self, ctx: ParallelContext, *, wanted: bool) -> None:
        self._ctx, self._seconds, self._steps = ctx, 0.0, 0
        self._clock = WaitClock(ctx.device) if wanted else None
        ctx.traffic.clock = self._clock

    def step(self, seconds: float) -> None:
        """Note one step."""
        self._seconds += seconds
        self._steps += 1

    def report(self) -> dict[str, Any]:
        """Means per step and rank since the last report, for a record; rank 0 says who stands out. For all ranks."""
        if self._clock is None:
            return {}
        mine = torch.tensor([[self._seconds, self._clock.take()]], dtype=torch.float64, device=self._ctx.device)
        table = collectives.gather_dim0(mine / max(self._steps, 1), self._ctx.world).tolist()
        self._clock.take()  # of the gathering itself
        self._seconds, self._steps = 0.0, 0
        busy = [max(seconds - waiting, 0.0) for seconds, waiting in table]
        shares = [waiting / seconds for seconds, waiting in table]
        if is_main_rank():
            print(describe(busy, shares), flush=True)
        return {"rank_busy_seconds": busy, "rank_waiting_share": shares}


def describe(busy: list[float], shares: list[float]) -> str:
    """One line: the ranks that are busy for longer than most, or that none is."""
    usual = median(busy)
    slow = sorted((rank for rank in range(len(busy)) if busy[rank] > NOTEWORTHY * usual), key=lambda r: -busy[r])
    summary = f"busy {min(busy):.3f} to {max(busy):.3f} s a step, waiting {min(shares):.0%} to {max(shares):.0%}"
    if not slow:
        return f"stragglers: none; {summary}"
    named = "; ".join(f"rank {rank} busy {busy[rank]:.3f} s, {busy[rank] / usual:.1f}x the median" for rank in slow[:8])
    return f"stragglers: {named}; {summary}"
