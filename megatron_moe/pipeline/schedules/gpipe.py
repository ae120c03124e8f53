"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965).

::

    rank 0  F0 F1 F2 F3 .........B0    B1    B2    B3
    rank 1  ...F0 F1 F2 F3 B0    B1    B2    B3    ......

Every micro-batch stays alive until its backward: the memory grows with their number.
"""

from megatron_moe.pipeline.actions import Step
from megatron_moe.pipeline.schedules.spec import ClosedForm, RankWriter, ScheduleSpec, Times, no_problems


def generate(pp: int, num_microbatches: int, num_virtual: int) -> list[list[Step]]:
    return [_rank(rank, num_microbatches) for rank in range(pp)]


def _rank(rank: int, num_microbatches: int) -> list[Step]:
    writer = RankWriter()
    for _ in range(num_microbatches):
        writer.forward(rank)
    for _ in range(num_microbatches):
        writer.backward(rank)
    return writer.steps


def closed_form(pp: int, num_microbatches: int, num_virtual: int, times: Times) -> ClosedForm:
    value = (pp - 1) * (times.forward + times.backward + times.weight)
    return ClosedForm("(p-1)(F+B+W)", value)


GPIPE = ScheduleSpec(
    name="gpipe",
    summary="all forwards, then all backwards",
    generate=generate,
    placement="loop",
    chunks=1,
    problems=no_problems,
    closed_form=closed_form,
)
