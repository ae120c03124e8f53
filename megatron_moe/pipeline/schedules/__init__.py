"""One file per schedule; `SCHEDULES` lists them by name."""

from megatron_moe.pipeline.schedules.registry import (
    SCHEDULES,
    chunks_per_rank,
    make_schedule,
    schedule_problems,
)
from megatron_moe.pipeline.schedules.spec import ClosedForm, ScheduleSpec, Times

__all__ = [
    "SCHEDULES",
    "ClosedForm",
    "ScheduleSpec",
    "Times",
    "chunks_per_rank",
    "make_schedule",
    "schedule_problems",
]
