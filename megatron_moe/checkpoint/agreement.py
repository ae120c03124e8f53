"""Success and failure are common to all ranks: what one rank meets, every rank raises.

    rank 3 meets a full disk  ->  every rank raises CheckpointError("cannot write ...: No space left on device ...")

Without this a rank that fails leaves the others waiting in a collective. The objects that travel here are
made by the ranks themselves; nothing of it comes from a file.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_moe.checkpoint.errors import CheckpointError
from megatron_moe.parallel.context import ParallelContext

T = TypeVar("T")


def _try(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result, or what went wrong."""
    try:
        return work(), None
    except Exception as error:
        return None, explain(error)


def explain(error: BaseException) -> str:
    """A message of ours as it is; anything else with its traceback, since it is a defect to be reported."""
    if isinstance(error, CheckpointError):
        return str(error)
    return "".join(traceback.format_exception(error))


def on_first_rank(ctx: ParallelContext, work: Callable[[], T]) -> T:
    """Do it on the first rank of the world and give all ranks the result, or the error.

    Raises:
        CheckpointError: on every rank, if the work raised.
    """
    outcome: list[Any] = [_try(work) if ctx.world.rank == 0 else None]
    if ctx.world.size > 1:
        dist.broadcast_object_list(outcome, src=ctx.world.ranks[0], group=ctx.world.group)
    result, problem = outcome[0]
    if problem is not None:
        raise CheckpointError(problem)
    return result


def on_all_ranks(ctx: ParallelContext, work: Callable[[], T]) -> list[T]:
    """Do it on every rank and give all of them the results in rank order, or the errors.

    Raises:
        CheckpointError: on every rank, if the work raised on any.
    """
    outcomes: list[Any] = [_try(work)]
    if ctx.world.size > 1:
        mine, outcomes = outcomes[0], [None] * ctx.world.size
        dist.all_gather_object(outcomes, mine, group=ctx.world.group)
    _raise({rank: problem for rank, (_, problem) in enumerate(outcomes) if problem is not None})
    return [result for result, _ in outcomes]


@contextmanager
def failures_of_dcp() -> Iterator[None]:
    """``torch.distributed.checkpoint`` gathers failures itself; raise them as ours, on every rank."""
    try:
        yield
    except CheckpointException as error:
        _raise({rank: explain(failure) for rank, (failure, _) in error.failures.items()})


def _raise(problems: dict[int, str]) -> None:
    if not problems:
        return
    distinct: dict[str, list[int]] = {}
    for rank, problem in problems.items():
        distinct.setdefault(problem, []).append(rank)
    if len(distinct) == 1:
        raise CheckpointError(next(iter(distinct)))
    raise CheckpointError("\n".join(f"{_ranks(ranks)}: {problem}" for problem, ranks in distinct.items()))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
