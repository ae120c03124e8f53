"""ZB-V: zero bubble with two stages per rank in a V (Qi et al., arXiv 2401.10241, section 6).

Rank r holds stage r on the way down and stage 2p-1-r on the way up, so the first rank also holds the
last stage, and a micro-batch that turns at the last rank comes back to where it started::

    rank 0   0 |        | 7
    rank 1     1 |    | 6
    rank 2       2 || 5
    rank 3        3  4

With F = B = W no rank waits between its first and its last action, at the memory of 1F1B.
"""

from megatron_moe.pipeline.actions import Kind, Step
from megatron_moe.pipeline.schedules.spec import (
    ClosedForm,
    RankWriter,
    ScheduleSpec,
    Times,
    local_stages,
    no_problems,
)


def generate(pp: int, num_microbatches: int, num_virtual: int) -> list[list[Step]]:
    # Fewer than 2p-1 micro-batches do not fill the V. We write the list for 2p-1 and leave out what
    # belongs to micro-batches that are not there; a list without deadlock keeps that property.
    filled = max(num_microbatches, 2 * pp - 1)
    return [
        [step for step in _rank(rank, pp, filled) if step.parts[0].microbatch < num_microbatches] for rank in range(pp)
    ]


def _rank(rank: int, pp: int, num_microbatches: int) -> list[Step]:
    down, up = local_stages("v", rank, pp, 2)
    writer = RankWriter()
    for _ in range(2 * (pp - rank) - 1):  # Until the first micro-batch comes back up.
        writer.forward(down)
    for _ in range(rank):
        writer.forward(up)
        writer.forward(down)
    for _ in range(pp - rank):
        writer.forward(up)
        writer.input(up)
        writer.weight(up)

    while writer.done(Kind.F, up) < num_microbatches:
        if writer.done(Kind.F, down) < num_microbatches:
            writer.forward(down)
        writer.input(down)
        writer.weight(down)
        writer.forward(up)
        writer.input(up)
        writer.weight(up)

    # Nothing is left to hide behind: hurry the input gradients, which others wait for.
    for _ in range(rank):
        writer.input(down)
        writer.input(up)
    for _ in range(pp - rank):
        writer.input(down)
        writer.weight()
    writer.all_weights()
    return writer.steps


def closed_form(pp: int, num_microbatches: int, num_virtual: int, times: Times) -> ClosedForm | None:
    equal = times.forward == times.backward == times.weight
    if not equal or num_microbatches < 2 * pp:
        return None
    return ClosedForm("0 if F=B=W", 0.0, of="span")


ZB_V = ScheduleSpec(
    name="zb-v",
    summary="zero bubble, two stages per rank in a V",
    generate=generate,
    placement="v",
    chunks=2,
    problems=no_problems,
    closed_form=closed_form,
)
