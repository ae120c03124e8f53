"""Graceful ends: SIGTERM and SIGUSR1 ask the run to save and leave at the next step; so do limits of time."""

import signal
import time
from types import FrameType

import torch

from megatron_moe.config.schema import TrainingConfig
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext


class StopRequest:
    """Listens from its creation on; all ranks agree at the edge of a step, so that none waits for one that left."""

    def __init__(self, config: TrainingConfig, ctx: ParallelContext) -> None:
        self._ctx, self._signal = ctx, 0
        self._deadline = None
        if config.exit_duration_in_mins is not None:
            self._deadline = time.monotonic() + 60 * config.exit_duration_in_mins
        self._previous = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGUSR1)}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def reason(self) -> str | None:
        """Why to stop now, the same on every rank; None to go on."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        flags = torch.tensor([self._signal, int(late)], device=self._ctx.device)
        number, is_late = collectives.max_(flags, self._ctx.world).tolist()
        if number:
            return f"signal {signal.Signals(number).name}"
        return "--exit-duration-in-mins is over" if is_late else None

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
