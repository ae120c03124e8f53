"""Interleaved 1F1B: 1F1B over v stages per rank (Narayanan et al., arXiv 2104.04473, section 2.2).

Micro-batches go in groups of p: a group visits a rank's first stage, then its second, and so on, before
the next group starts. Backwards take the stages in reverse. With p = 2, v = 2, m = 4::

    forward order of rank 0    0F0 0F1  2F0 2F1  0F2 0F3  2F2 2F3
    backward order             2B0 2B1  0B0 0B1  2B2 2B3  0B2 0B3

Rank r warms up with 2(p-1-r) + (v-1)p forwards (Megatron-LM's number, two per rank below it instead of
one, so that a send and its receive have a slot each). A micro-batch visits each rank v times with stages
1/v the size, so the bubble is v times smaller and v times as many messages are sent.
"""

from megatron_moe.pipeline.actions import Action, Kind, Step
from megatron_moe.pipeline.schedules.spec import ClosedForm, ScheduleSpec, Times, local_stages


def generate(pp: int, num_microbatches: int, num_virtual: int) -> list[list[Step]]:
    return [_rank(rank, pp, num_microbatches, num_virtual) for rank in range(pp)]


def _rank(rank: int, pp: int, num_microbatches: int, num_virtual: int) -> list[Step]:
    stages = local_stages("loop", rank, pp, num_virtual)
    forwards = _visits(Kind.F, stages, pp, num_microbatches)
    backwards = _visits(Kind.B, stages[::-1], pp, num_microbatches)
    warm_up = min(2 * (pp - 1 - rank) + (num_virtual - 1) * pp, len(forwards))

    steps: list[Step] = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        steps += [forward, backward]
    return steps + list(backwards[len(forwards) - warm_up :])


def _visits(kind: Kind, stages: list[int], pp: int, num_microbatches: int) -> list[Action]:
    return [
        Action(kind, stage, microbatch)
        for first in range(0, num_microbatches, pp)
        for stage in stages
        for microbatch in range(first, first + pp)
    ]


def problems(pp: int, num_microbatches: int, num_virtual: int) -> list[str]:
    found = []
    if num_virtual < 2:
        found.append(
            f"--pipeline-schedule interleaved-1f1b needs at least 2 stages per rank, but "
            f"--num-virtual-stages-per-pipeline-rank is {num_virtual}; set it to 2 or more, or choose 1f1b."
        )
    if num_microbatches % pp:
        below, above = num_microbatches // pp * pp, (num_microbatches // pp + 1) * pp
        choices = f"{below} or {above}" if below else f"{above}"
        found.append(
            f"--pipeline-schedule interleaved-1f1b needs a number of micro-batches that is a multiple of "
            f"--pipeline-model-parallel-size {pp}, but it is {num_microbatches}; change "
            f"--global-batch-size or --micro-batch-size so that there are {choices}, or choose 1f1b, "
            f"which admits any number."
        )
    return found


def closed_form(pp: int, num_microbatches: int, num_virtual: int, times: Times) -> ClosedForm:
    value = (pp - 1) * (times.forward + times.backward + times.weight) / num_virtual
    return ClosedForm("(p-1)(F+B+W)/v", value)


INTERLEAVED_1F1B = ScheduleSpec(
    name="interleaved-1f1b",
    summary="1F1B over several stages per rank",
    generate=generate,
    placement="loop",
    chunks=None,
    problems=problems,
    closed_form=closed_form,
)
