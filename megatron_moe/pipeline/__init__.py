"""Pipeline parallelism: schedules as data, passes, simulator and drawer, and the cut into stages."""

from megatron_moe.pipeline.actions import Action, Kind, Pair, Schedule, ScheduleError, Step
from megatron_moe.pipeline.partition import LayoutError, StageLayout, balance, layout_problems, parse_layout
from megatron_moe.pipeline.passes import add_communication, add_grad_reduction
from megatron_moe.pipeline.schedules import SCHEDULES, chunks_per_rank, make_schedule, schedule_problems

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "LayoutError",
    "Pair",
    "Schedule",
    "ScheduleError",
    "StageLayout",
    "Step",
    "add_communication",
    "add_grad_reduction",
    "balance",
    "chunks_per_rank",
    "layout_problems",
    "make_schedule",
    "parse_layout",
    "schedule_problems",
]
