"""Weight gradients, at once or deferred, computed straight into the buffer in which they are accumulated.

A schedule that splits (zero bubble) opens the stage's queue; every linear then computes only its input gradient and
leaves a closure. Draining the queue computes the weight gradients: one backward in all, nothing twice.

The product of a weight gradient has the accumulated gradient as its output: no tensor of the weight's size is made,
cleared or added (Megatron's gradient accumulation fusion).
"""

from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_moe.parallel.sharding import GradientWriter, ShardedParameter

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
            self._current = []  # what has been drained must not be kept until the next backward pass

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


def leave_gradient(parameter: Tensor, write: GradientWriter, queue: WeightGradientQueue | None) -> Tensor | None:
    """What a backward pass returns as the gradient of a weight, having seen to it that it is computed.

    Args:
        parameter: a parameter, or a part of one, whose gradient autograd adds to that of the whole.

    Returns:
        None where it is accumulated, now or when the queue is drained; else the gradient, for autograd.
    """
    accumulate = parameter.accumulate if isinstance(parameter, ShardedParameter) else None
    if queue is not None and queue.deferring:
        assert accumulate is not None, "a deferred gradient needs someone who collects it"
        queue.push(lambda: accumulate(write, 1))
        return None
    if accumulate is not None:
        accumulate(write, 1)
        return None
    gradient = torch.empty_like(parameter)
    write(gradient, 0.0)
    return gradient


def write_product(out: Tensor, a: Tensor, b: Tensor, beta: float) -> None:
    """out [m, n] = beta out + a [m, k] @ b [k, n], without a temporary where the types are equal."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif beta == 0:
        out.copy_(a @ b)
    else:
        out.add_(a @ b)
