"""The edge of a step, where all ranks agree: why to stop, whether a save is due by the clock, whether a writer failed.

    rank 0   SIGTERM    -            -         \\
    rank 1   -          60 min over  -          }  one maximum over the world  ->  the same Edge on every rank
    rank 2   -          -            failed    /

A rank alone never leaves, saves or raises: the others would wait for it.
"""

import signal
import time
from dataclasses import dataclass
from types import FrameType

from megatron_moe.checkpoint import CheckpointError
from megatron_moe.config.schema import Config
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training.agreement import largest
from megatron_moe.training.checkpointing import Saver


@dataclass(frozen=True)
class Edge:
    """What was agreed: a reason to stop, or None; whether it is time to save."""

    stop: str | None
    save: bool


class StepEdge:
    """Listens to SIGTERM and SIGUSR1 and to the clock from its creation on."""

    def __init__(self, config: Config, ctx: ParallelContext, saver: Saver) -> None:
        self._ctx, self._saver, self._signal = ctx, saver, 0
        minutes, between = config.training.exit_duration_in_mins, config.checkpoint.save_interval_minutes
        self._end = None if minutes is None else time.monotonic() + 60 * minutes
        self._between = None if between is None else 60 * between
        self._saved = time.monotonic()
        self._previous = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGUSR1)}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def agree(self) -> Edge:
        """The same on every rank.

        Raises:
            CheckpointError: on every rank: a checkpoint could not be written in the background.
        """
        now = time.monotonic()
        late = self._end is not None and now > self._end
        due = self._between is not None and now > self._saved + self._between
        flags = [self._signal, int(late), int(due), int(self._saver.failed)]
        number, late, due, failed = largest(flags, self._ctx.world, self._ctx.device)
        if failed:
            self._saver.wait()
            raise CheckpointError("Another rank could not finish a checkpoint; its own message says why.")
        if due:
            self._saved = now
        if number:
            return Edge(f"signal {signal.Signals(number).name}", bool(due))
        return Edge("--exit-duration-in-mins is over" if late else None, bool(due))

    def close(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
