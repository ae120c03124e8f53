"""Runs the list of every rank as far as it goes: all finish, or a deadlock is proven and told."""

from collections.abc import Callable

from megatron_moe.pipeline.actions import RECVS, SENDS, Action, Schedule, ScheduleError, Step
from megatron_moe.pipeline.validate import Result, required, results, send_of, validate


class DeadlockError(ScheduleError):
    """No rank can go on; the message says where each one waits."""


def run_lists(
    schedule: Schedule, advance: Callable[[int, Step], bool], is_there: Callable[[int, Result], bool]
) -> None:
    """Runs the list of every rank in order; whatever the order among ranks, the end is the same.

    advance(rank, step) does the step and says True, or says False if it has to wait;
    is_there(rank, result) says whether a result has come to a rank, for the message alone.

    Raises DeadlockError when no rank can go on and not all are done.
    """
    heads = [0] * schedule.num_ranks
    progress = True
    while progress:
        progress = False
        for rank, steps in enumerate(schedule.ranks):
            while heads[rank] < len(steps) and advance(rank, steps[heads[rank]]):
                heads[rank] += 1
                progress = True

    waiting = []
    for rank, steps in enumerate(schedule.ranks):
        if heads[rank] < len(steps):
            step = steps[heads[rank]]
            waiting.append(f"rank {rank} waits at {step} for {_missing(schedule, rank, step, is_there)}")
    if waiting:
        raise DeadlockError(f"The schedule {schedule.name} deadlocks: {'; '.join(waiting)}.")


def _missing(schedule: Schedule, rank: int, step: Step, is_there: Callable[[int, Result], bool]) -> str:
    action = step.parts[0]
    if action.kind in SENDS | RECVS:
        return f"{action.partner} of rank {schedule.rank_of(action.partner.stage)}"
    names = []
    for part in step.parts:
        for result in required(part, schedule.num_stages):
            if not is_there(rank, result):
                home = schedule.rank_of(result.stage)
                names.append(_maker(schedule, result) + (f" of rank {home}" if home != rank else ""))
    return " and ".join(names)


def _maker(schedule: Schedule, result: Result) -> str:
    """The name of the action that makes a result: an input gradient may come from I or from a full B."""
    for action in schedule.actions(schedule.rank_of(result.stage)):
        if result in results(action):
            return str(action)
    raise AssertionError(f"nothing makes {result}; validate comes first")


def prove_no_deadlock(schedule: Schedule) -> None:
    """Proves that a schedule with communication actions finishes even if every send and receive blocks.

    Here a send ends only together with its receive, and a rank does nothing else meanwhile: the strictest
    way in which sends and receives can be executed. What finishes so, finishes with asynchronous ones too,
    and over in-order channels without tags, since the sends of one rank to another and the receives there
    come in the same order.

    Raises ScheduleError if the schedule is not valid and DeadlockError if it does not finish.
    """
    validate(schedule)
    made: set[Result] = set()
    stands_at: dict[int, Action] = {}  # the last send or receive that a rank has come to
    met: set[Action] = set()  # sends and receives that stood opposite each other

    def is_there(rank: int, result: Result) -> bool:
        if schedule.rank_of(result.stage) == rank:
            return result in made
        return send_of(result) in met

    def advance(rank: int, step: Step) -> bool:
        action = step.parts[0]
        if action.kind in SENDS | RECVS:
            stands_at[rank] = action
            if stands_at.get(schedule.rank_of(action.partner.stage)) == action.partner:
                met.update((action, action.partner))
            return action in met
        needs = [result for part in step.parts for result in required(part, schedule.num_stages)]
        if not all(is_there(rank, result) for result in needs):
            return False
        made.update(result for part in step.parts for result in results(part))
        return True

    run_lists(schedule, advance, is_there)
