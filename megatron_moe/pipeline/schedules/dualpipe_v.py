"""DualPipeV: forward and backward of different micro-batches run as pairs, stages in a V.

From DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1), cut in half: rank r holds stages r and
2p-1-r, as in ZB-V, instead of two copies of the parameters. In the steady state each rank repeats

    (F on the way down ; B on the way up)   (F on the way up ; B on the way down)

and inside such a pair the all-to-all of one half hides behind the computation of the other: that, not
the bubble, is what it is for. In the eight phases below "down" is stage r and "up" is stage 2p-1-r.
"""

from megatron_moe.pipeline.actions import Step
from megatron_moe.pipeline.schedules.spec import ClosedForm, RankWriter, ScheduleSpec, Times, local_stages


def generate(pp: int, num_microbatches: int, num_virtual: int) -> list[list[Step]]:
    return [_rank(rank, pp, num_microbatches) for rank in range(pp)]


def _rank(rank: int, pp: int, num_microbatches: int) -> list[Step]:
    down, up = local_stages("v", rank, pp, 2)
    below = pp - 1 - rank  # ranks between this one and the turn of the V
    writer = RankWriter()
    for _ in range(2 * below):  # 1. fill the way down
        writer.forward(down)
    for _ in range(rank + 1):  # 2. the first micro-batches come back
        writer.forward(down)
        writer.forward(up)
    for _ in range(below):  # 3. the first backwards; weight gradients fill the gaps
        writer.input(up)
        writer.weight()
        writer.forward(up)
    for turn in range(num_microbatches - 2 * pp + rank + 1):  # 4. steady state
        if turn == 0 and below == 0:
            # At the turn of the V the backward waits for this very rank's forward; a pair would wait longer.
            writer.forward(down)
            writer.backward(up)
        else:
            writer.overlap(down, up)
        writer.overlap(up, down)
    for _ in range(below):  # 5. no forward is left on the way down
        writer.backward(up)
        writer.overlap(up, down)
    _drain(writer, rank, below, down, up)
    return writer.steps


def _drain(writer: RankWriter, rank: int, below: int, down: int, up: int) -> None:
    """Phases 6 to 8: backwards alone; in their second half the weight gradients wait for the end."""
    for position, stage in enumerate([up, down] * (rank + 1)):  # 6.
        if position <= rank:
            writer.backward(stage)
        else:
            writer.input(stage)
    for _ in range(below):  # 7.
        writer.weight()
        writer.input(down)
    writer.all_weights()  # 8.


def problems(pp: int, num_microbatches: int, num_virtual: int) -> list[str]:
    if num_microbatches >= 2 * pp:
        return []
    return [
        f"--pipeline-schedule dualpipe-v needs at least 2 micro-batches per pipeline rank, so {2 * pp} with "
        f"--pipeline-model-parallel-size {pp}, but there are {num_microbatches}; raise --global-batch-size, "
        f"lower --micro-batch-size, or choose zb-v, which admits any number."
    ]


def closed_form(pp: int, num_microbatches: int, num_virtual: int, times: Times) -> ClosedForm | None:
    if not times.forward == times.backward == times.weight:
        return None
    return ClosedForm("(p-1)F if F=B=W", (pp - 1) * times.forward)


DUALPIPE_V = ScheduleSpec(
    name="dualpipe-v",
    summary="overlapped pairs of forward and backward, two stages per rank in a V",
    generate=generate,
    placement="v",
    chunks=2,
    problems=problems,
    closed_form=closed_form,
)
