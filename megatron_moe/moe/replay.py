"""A recomputed layer does not decide again: it replays what its first forward pass decided.

    forward pass     decided(make)  ->  make(), and noted in the region's log
    recomputation    decided(make)  ->  the next note; ``make`` is not called

What goes through ``decided``: every order, coin and top-k of a router or a capacity, and integers exchanged with other
ranks. Scores and weights are computed again and stay differentiable, but whatever happened to them in between (noise, a
kernel that adds in another order) cannot send a token elsewhere, and counts are not exchanged twice. A router that
chooses by ``routing.best_ids`` needs to know nothing of this.

The log belongs to one call of one region: to a layer and a micro-batch. It lives and dies with the autograd graph.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class _Pass:
    """A pass through a recomputed region, as a context: the first notes, later ones read from the beginning."""

    def __init__(self, notes: list[Any], *, replays: bool) -> None:
        self._notes, self.replays = notes, replays

    def __enter__(self) -> None:
        assert _current.get() is None, "recomputed regions do not nest"
        self._num_read = 0
        self._token = _current.set(self)

    def __exit__(self, *exception: object) -> None:
        _current.reset(self._token)

    def decided(self, make: Callable[[], T]) -> T:
        if self.replays:
            assert self._num_read < len(self._notes), "the recomputation decides more than the forward pass did"
            self._num_read += 1
            return self._notes[self._num_read - 1]
        token = _current.set(None)  # a decision inside a decision is a part of it
        try:
            self._notes.append(make())
        finally:
            _current.reset(token)
        return self._notes[-1]


_current: ContextVar[_Pass | None] = ContextVar("pass through a recomputed region", default=None)


def record_and_replay() -> tuple[_Pass, _Pass]:
    """Contexts for the forward pass and the recomputation of one region: ``checkpoint``'s ``context_fn``."""
    notes: list[Any] = []
    return _Pass(notes, replays=False), _Pass(notes, replays=True)


def decided(make: Callable[[], T]) -> T:
    """A decision, made at most once per forward pass.

    Args:
        make: makes it; integers or truth values without gradient, never changed afterwards.
    """
    current = _current.get()
    return make() if current is None else current.decided(make)


def replaying() -> bool:
    """Whether a region is being computed again: its result is not asked for, only what its backward pass keeps."""
    current = _current.get()
    return current is not None and current.replays
