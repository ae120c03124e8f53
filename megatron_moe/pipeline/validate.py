"""What must be true of a schedule before it is worth timing: everything is there, once, and in its place."""

from collections import Counter
from typing import NamedTuple

from megatron_moe.pipeline.actions import COMPUTE, RECVS, SENDS, Action, Kind, Pair, Schedule, ScheduleError


class Result(NamedTuple):
    """What a compute action leaves behind: an output (F), an input gradient (I) or weight gradients (W).

    A full backward leaves both I and W, so whoever needs one does not ask which action made it.
    """

    kind: Kind
    stage: int
    microbatch: int


def required(action: Action, num_stages: int) -> list[Result]:
    """The results that an action needs before it can start.

    ::

        F(s)  <-  F(s-1)            I(s), B(s)  <-  F(s), I(s+1)            W(s)  <-  I(s)
    """
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.F:
        return [Result(Kind.F, stage - 1, microbatch)] if stage > 0 else []
    if kind in (Kind.B, Kind.I):
        later = [Result(Kind.I, stage + 1, microbatch)] if stage + 1 < num_stages else []
        return [Result(Kind.F, stage, microbatch), *later]
    if kind is Kind.W:
        return [Result(Kind.I, stage, microbatch)]
    return []


def results(action: Action) -> list[Result]:
    """The results that a compute action leaves behind; none for the other actions."""
    if action.kind is Kind.B:
        return [Result(kind, action.stage, action.microbatch) for kind in (Kind.I, Kind.W)]
    return [Result(action.kind, action.stage, action.microbatch)] if action.kind in COMPUTE else []


def send_of(result: Result) -> Action:
    """The action that sends a result to the rank of the neighbouring stage."""
    return Action(Kind.SEND_F if result.kind is Kind.F else Kind.SEND_B, result.stage, result.microbatch)


def validate(schedule: Schedule) -> None:
    """Raises ScheduleError unless every (stage, micro-batch) is computed exactly once, where it lives.

    Each F once; each B once, or its I and its W once, the W after the I; every action on the rank that
    holds its stage; if there is any communication, each send with its receive, each once, the send
    after what it sends; a REDUCE_GRAD after the last weight gradient of its stage.
    That the order is possible at all is for the simulator to prove.
    """
    problems = [*_misplaced(schedule), *_miscounted(schedule), *_too_early(schedule)]
    problems += _unmatched_communication(schedule)
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ScheduleError(f"The schedule {schedule.name} is not valid: {shown}.")


def _misplaced(schedule: Schedule) -> list[str]:
    found = []
    for rank, steps in enumerate(schedule.ranks):
        for action in (part for step in steps for part in step.parts):
            if not 0 <= action.stage < schedule.num_stages:
                found.append(f"rank {rank} has {action}, but there are only {schedule.num_stages} stages")
            elif schedule.rank_of(action.stage) != rank:
                home = schedule.rank_of(action.stage)
                found.append(f"rank {rank} has {action}, but stage {action.stage} lives on rank {home}")
        for step in steps:
            if isinstance(step, Pair) and (step.forward.kind, step.backward.kind) != (Kind.F, Kind.B):
                found.append(f"{step} is not a forward and a full backward")
    return found


def _miscounted(schedule: Schedule) -> list[str]:
    counts = Counter(
        result for rank in range(schedule.num_ranks) for action in schedule.actions(rank) for result in results(action)
    )
    expected = {
        Result(kind, stage, microbatch)
        for kind in (Kind.F, Kind.I, Kind.W)
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    }
    names = {Kind.F: "forward", Kind.I: "backward for the input", Kind.W: "backward for the weights"}
    return [
        f"the {names[result.kind]} of stage {result.stage}, micro-batch {result.microbatch}, is there "
        f"{counts[result]} times instead of {int(result in expected)}"
        for result in sorted(expected | set(counts), key=lambda result: (result.kind.value, *result[1:]))
        if counts[result] != int(result in expected)
    ]


def _too_early(schedule: Schedule) -> list[str]:
    """What stands, on one and the same rank, before the action that makes what it works on."""
    found = []
    for rank in range(schedule.num_ranks):
        seen: set[Result] = set()
        sendable: set[Action] = set()
        for action in schedule.actions(rank):
            if action.kind is Kind.W and Result(Kind.I, action.stage, action.microbatch) not in seen:
                found.append(f"rank {rank} has {action} before the backward for the input it belongs to")
            if action.kind in SENDS and action not in sendable:
                found.append(f"rank {rank} has {action} before the action that makes what it sends")
            if action.kind is Kind.REDUCE_GRAD:
                num_done = sum(result[:2] == (Kind.W, action.stage) for result in seen)
                if num_done < schedule.num_microbatches:
                    found.append(f"rank {rank} has {action} before the last weight gradient of the stage")
            made = results(action)
            seen.update(made)
            sendable.update(send_of(result) for result in made if result.kind is not Kind.W)
    return found


def _unmatched_communication(schedule: Schedule) -> list[str]:
    counts = Counter(
        action
        for rank in range(schedule.num_ranks)
        for action in schedule.actions(rank)
        if action.kind in SENDS | RECVS
    )
    if not counts:
        return []
    expected: set[Action] = set()
    for stage in range(schedule.num_stages - 1):
        if schedule.rank_of(stage) != schedule.rank_of(stage + 1):
            for microbatch in range(schedule.num_microbatches):
                for send in (
                    Action(Kind.SEND_F, stage, microbatch),
                    Action(Kind.SEND_B, stage + 1, microbatch),
                ):
                    expected |= {send, send.partner}
    return [
        f"{action} is there {counts[action]} times instead of {int(action in expected)}"
        for action in sorted(expected | set(counts), key=str)
        if counts[action] != int(action in expected)
    ]
