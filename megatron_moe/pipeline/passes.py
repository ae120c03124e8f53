"""Passes over schedules: pure functions that insert what a generator leaves out.

::

    generator      1F0                  1B0
    + communication   1RECV_F0 1F0 1SEND_F0   1RECV_B0 1B0 1SEND_B0
    + reduction       ... 1B7 1SEND_B7 1REDUCE_GRAD
"""

from dataclasses import replace

from megatron_moe.pipeline.actions import COMPUTE, SENDS, Action, Kind, Schedule, Step
from megatron_moe.pipeline.simulate import Durations, simulate
from megatron_moe.pipeline.validate import results, send_of


def add_communication(schedule: Schedule, durations: Durations | None = None) -> Schedule:
    """Inserts a send and a receive wherever a result goes to another rank; takes what a generator made.

    The rule: put all steps of all ranks in one order, that of their ends in the simulation; after each
    step come its sends, and each send is written into the list of its rank together with its receive into
    the list of the other rank. So a send follows directly what it sends, and a receive stands before the
    first step that ends after the data are there: before its consumer, and, if the receiver is busy just
    then, before what keeps it busy, so that data can travel under computation.

    Why it cannot deadlock, even if sends and receives block: every list is a part of one common order in
    which all inputs of a step come before it. The first item of that order that is not yet done never has
    to wait: a step has its inputs, and a send and its receive, neighbours in the order, are reached by both
    ranks together. (`prove_no_deadlock` checks it for a given schedule.)

    durations shape the common order and so where receives stand; they cannot make it wrong. By default
    F = B = W and communication takes a little: if it took nothing, neighbours would end their steps at the
    same moment, and half of the receives would stand one step later than they could.
    """
    assert all(part.kind in COMPUTE for rank in range(schedule.num_ranks) for part in schedule.actions(rank))
    ranks: list[list[Step]] = [[] for _ in schedule.ranks]
    for event in simulate(schedule, durations or Durations(comm=0.1)).events:
        ranks[event.rank].append(event.step)
        for send in _sends(schedule, event.step):
            ranks[event.rank].append(send)
            ranks[schedule.rank_of(send.partner.stage)].append(send.partner)
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


def _sends(schedule: Schedule, step: Step) -> list[Action]:
    """What has to be sent after a step: outputs to the next stage, input gradients to the previous one."""
    candidates = [send_of(result) for part in step.parts for result in results(part) if result.kind in (Kind.F, Kind.I)]
    return [
        send
        for send in candidates
        if 0 <= send.partner.stage < schedule.num_stages
        and schedule.rank_of(send.partner.stage) != schedule.rank_of(send.stage)
    ]


def add_grad_reduction(schedule: Schedule) -> Schedule:
    """Inserts REDUCE_GRAD for each stage right after its last weight gradient.

    If that step is followed by sends, after these: a neighbour waits for them, nobody for the reduction.
    """
    return replace(schedule, ranks=tuple(_reduced(steps) for steps in schedule.ranks))


def _reduced(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    last = {part.stage: i for i, step in enumerate(steps) for part in step.parts if part.kind in (Kind.B, Kind.W)}
    due: set[int] = set()
    written: list[Step] = []
    for i, step in enumerate(steps):
        if step.parts[0].kind not in SENDS:
            written += [Action(Kind.REDUCE_GRAD, stage) for stage in sorted(due)]
            due.clear()
        written.append(step)
        due |= {stage for stage, index in last.items() if index == i}
    return (*written, *(Action(Kind.REDUCE_GRAD, stage) for stage in sorted(due)))
