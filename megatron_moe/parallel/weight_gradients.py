"""Weight gradients, at once or deferred: the split of a backward pass into input and weight parts.

A schedule that splits (zero bubble) opens the stage's queue; every linear then computes only its input gradient and
leaves a closure. Draining the queue computes the weight gradients: one backward in all, nothing twice.
"""

from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class WeightGradientQueue:
    """Deferred weight gradients of one pipeline stage, in the order of their micro-batches."""

    def __init__(self) -> None:
        self.deferring = False
        self._current: list[Callable[[], None]] = []
        self._waiting: deque[list[Callable[[], None]]] = deque()

    @contextmanager
    def defer(self) -> "Iterator[None]":
        """Within: linears leave their weight gradients here, as the next micro-batch's work."""
        self.deferring, self._current = True, []
        try:
            yield
        finally:
            self.deferring = False
            self._waiting.append(self._current)

    def push(self, compute: Callable[[], None]) -> None:
        """Leave one weight gradient for later."""
        self._current.append(compute)

    def drain_one(self) -> None:
        """Compute the weight gradients of the oldest waiting micro-batch."""
        with torch.no_grad():
            for compute in self._waiting.popleft():
                compute()

    def __len__(self) -> int:
        return len(self._waiting)
