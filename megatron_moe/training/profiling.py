"""``--profile-schedule``: what each rank of the pipeline did when, for ``tools/draw_schedule.py --profile``."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.pipeline.runtime import Recorded, Runtime


@contextmanager
def recorded_schedule(runtime: Runtime, ctx: ParallelContext, path: Path) -> Iterator[None]:
    """Record the step inside; the first pipeline of the mesh writes one JSON line per action to ``path``.

    All ranks begin together, so that their clocks, which count from there, can be laid side by side.
    """
    if ctx.world.size > 1:
        dist.barrier()
    runtime.recorded = []
    try:
        yield
    finally:
        mine, runtime.recorded = runtime.recorded, None
    everyone: list[list[Recorded]] = [mine]
    if ctx.pp.size > 1:
        everyone = [[] for _ in range(ctx.pp.size)]
        dist.all_gather_object(everyone, mine, group=ctx.pp.group)
    if ctx.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (
            json.dumps({"rank": rank, "action": event.action, "start": event.start, "end": event.end}) + "\n"
            for rank, events in enumerate(everyone)
            for event in events
        )
        path.write_text("".join(lines), encoding="utf-8")
