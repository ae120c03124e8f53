"""ZB-H1: 1F1B with weight gradients moved into the bubble (Qi et al., arXiv 2401.10241, section 2.1).

::

    rank 0  F0 F1 ...I0 W0 F2 I1 W1 F3 I2 W2 I3 W3
    rank 1  ...F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3

The order of F and I is that of 1F1B. Rank r does the weight gradient of micro-batch j after the input
gradient of micro-batch j+r: the later a rank, the more of them wait, and they fill its tail. What waits
replaces what 1F1B would hold of later forwards, so the peak stays at that of 1F1B's first rank.
"""

from megatron_moe.pipeline.actions import Step
from megatron_moe.pipeline.schedules.spec import ClosedForm, RankWriter, ScheduleSpec, Times, no_problems


def generate(pp: int, num_microbatches: int, num_virtual: int) -> list[list[Step]]:
    return [_rank(rank, pp, num_microbatches) for rank in range(pp)]


def _rank(rank: int, pp: int, num_microbatches: int) -> list[Step]:
    warm_up = min(pp - 1 - rank, num_microbatches)
    writer = RankWriter()
    for _ in range(warm_up):
        writer.forward(rank)
    for microbatch in range(num_microbatches):
        if microbatch < num_microbatches - warm_up:
            writer.forward(rank)
        writer.input(rank)
        if microbatch >= rank:
            writer.weight()
    writer.all_weights()
    return writer.steps


def closed_form(pp: int, num_microbatches: int, num_virtual: int, times: Times) -> ClosedForm | None:
    """The paper gives (p-1)(F+B-W), which holds while W is the shortest of the three."""
    if num_microbatches < pp:
        return None
    shortest = min(times.forward, times.backward, times.weight)
    value = (pp - 1) * (times.forward + times.backward - shortest)
    return ClosedForm("(p-1)(F+B-min(F,B,W))", value)


ZB_H1 = ScheduleSpec(
    name="zb-h1",
    summary="1F1B with weight gradients in the bubble",
    generate=generate,
    placement="loop",
    chunks=1,
    problems=no_problems,
    closed_form=closed_form,
)
