"""How long a rank waits in collectives: by the clock on a CPU, by events on the stream of a GPU.

Time in a collective is that of the transfer and that of waiting for the last rank to come. On a GPU a call returns at
once and the stream waits instead: two events around the call tell how long, read when they are asked for.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class WaitClock:
    """Adds up what is measured until it is taken."""

    def __init__(self, device: torch.device) -> None:
        self._on_stream = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count what is done inside."""
        if self._on_stream:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start

    def take(self) -> float:
        """Seconds since it was asked last; waits for the device."""
        seconds, self._seconds = self._seconds, 0.0
        events, self._events = self._events, []
        if events:
            torch.cuda.synchronize()
            seconds += sum(begin.elapsed_time(end) for begin, end in events) / 1000
        return seconds
