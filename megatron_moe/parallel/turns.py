"""Computations that take turns: each goes on until it has something under way, then the next one goes on.

    part 1   attention, route, dispatch ~                      experts, combine ~                    attention ...
    part 2                               attention, dispatch ~                    experts, combine ~
                                         ~ under way: nothing of it is needed before the next turn

A computation is a generator that yields where a transfer has begun and returns its result. The order of turns follows
from the code alone, so ranks that run the same code begin their transfers in the same order.
"""

from collections.abc import Generator, Sequence

from torch import Tensor

Steps = Generator[None, None, Tensor]


def finished(steps: Steps) -> Tensor:
    """The result of a computation that is alone."""
    (result,) = in_turns([steps])
    return result


def in_turns(computations: Sequence[Steps]) -> list[Tensor]:
    """The results of several, which take turns."""
    results: dict[int, Tensor] = {}
    while len(results) < len(computations):
        for i, steps in enumerate(computations):
            if i not in results:
                try:
                    next(steps)
                except StopIteration as end:
                    results[i] = end.value
    return [results[i] for i in range(len(computations))]


def begun(steps: Steps) -> Steps:
    """Go on to the first transfer now, and with the rest as part of another computation."""
    next(steps)

    def rest() -> Steps:
        yield
        return (yield from steps)

    return rest()
