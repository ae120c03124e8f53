"""The schedules that exist, by the name that `--pipeline-schedule` takes."""

from megatron_moe.pipeline.actions import Schedule, ScheduleError
from megatron_moe.pipeline.schedules.dualpipe_v import DUALPIPE_V
from megatron_moe.pipeline.schedules.gpipe import GPIPE
from megatron_moe.pipeline.schedules.interleaved import INTERLEAVED_1F1B
from megatron_moe.pipeline.schedules.one_f_one_b import ONE_F_ONE_B
from megatron_moe.pipeline.schedules.spec import ScheduleSpec
from megatron_moe.pipeline.schedules.zb_h1 import ZB_H1
from megatron_moe.pipeline.schedules.zb_v import ZB_V

SCHEDULES: dict[str, ScheduleSpec] = {
    spec.name: spec for spec in (GPIPE, ONE_F_ONE_B, INTERLEAVED_1F1B, ZB_H1, ZB_V, DUALPIPE_V)
}


def schedule_problems(name: str, pp: int, num_microbatches: int, num_virtual: int | None = None) -> list[str]:
    """Why this schedule cannot be made: one full sentence per reason, none if it can.

    num_virtual is the number of stages per rank; None takes the schedule's own (2 where it is free).
    """
    if name not in SCHEDULES:
        return [f"--pipeline-schedule {name} is not known; choose one of {', '.join(SCHEDULES)}."]
    if pp < 1:
        return [f"--pipeline-model-parallel-size must be at least 1, but it is {pp}."]
    if num_microbatches < 1:
        return [f"A training step needs at least 1 micro-batch, but there are {num_microbatches}."]
    spec = SCHEDULES[name]
    if spec.chunks is not None and num_virtual not in (None, spec.chunks):
        plural = "stage" if spec.chunks == 1 else "stages"
        return [
            f"--pipeline-schedule {name} has {spec.chunks} {plural} per rank, but "
            f"--num-virtual-stages-per-pipeline-rank is {num_virtual}; leave it out or set it to "
            f"{spec.chunks}."
        ]
    return spec.problems(pp, num_microbatches, chunks_per_rank(name, num_virtual))


def chunks_per_rank(name: str, num_virtual: int | None = None) -> int:
    """How many stages each rank holds under this schedule."""
    return SCHEDULES[name].chunks or (2 if num_virtual is None else num_virtual)


def make_schedule(name: str, pp: int, num_microbatches: int, num_virtual: int | None = None) -> Schedule:
    """The schedule of this name for pp ranks; computation only (see `passes.py` for the rest).

    Raises ScheduleError with every reason why it cannot be made.
    """
    problems = schedule_problems(name, pp, num_microbatches, num_virtual)
    if problems:
        raise ScheduleError("\n".join(problems))
    return SCHEDULES[name].build(pp, num_microbatches, chunks_per_rank(name, num_virtual))
