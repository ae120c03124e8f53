"""1F1B: one forward, one backward in turn (PipeDream-Flush; Narayanan et al., arXiv 2104.04473, section 2.2).

::

    rank 0  F0 F1 ......B0    F2 B1    F3 B2    ...B3
    rank 1  ...F0 B0    F1 B1    F2 B2    F3 B3    ......

Rank r runs p-1-r forwards to warm up, so it never holds more than p-r micro-batches.
"""

from megatron_moe.pipeline.actions import Step
from megatron_moe.pipeline.schedules.gpipe import closed_form
from megatron_moe.pipeline.schedules.spec import RankWriter, ScheduleSpec, no_problems


def generate(pp: int, num_microbatches: int, num_virtual: int) -> list[list[Step]]:
    return [_rank(rank, pp, num_microbatches) for rank in range(pp)]


def _rank(rank: int, pp: int, num_microbatches: int) -> list[Step]:
    warm_up = min(pp - 1 - rank, num_microbatches)
    writer = RankWriter()
    for _ in range(warm_up):
        writer.forward(rank)
    for _ in range(num_microbatches - warm_up):
        writer.forward(rank)
        writer.backward(rank)
    for _ in range(warm_up):
        writer.backward(rank)
    return writer.steps


ONE_F_ONE_B = ScheduleSpec(
    name="1f1b",
    summary="one forward, one backward in turn",
    generate=generate,
    placement="loop",
    chunks=1,
    problems=no_problems,
    closed_form=closed_form,  # The bubble of GPipe; only the memory is less.
)
