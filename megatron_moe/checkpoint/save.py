"""Saving: all ranks write beside, agree that it worked, and the first rank gives the checkpoint its name."""

import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from megatron_moe.checkpoint import folder as folders
from megatron_moe.checkpoint.agreement import failures_of_dcp, on_first_rank
from megatron_moe.checkpoint.entries import Entry
from megatron_moe.checkpoint.offline import CONFIG_FILE, RUN_FILE
from megatron_moe.checkpoint.planner import EntrySavePlanner
from megatron_moe.checkpoint.store import CheckpointWriter
from megatron_moe.parallel.context import ParallelContext


def save_checkpoint(
    folder: str | Path,
    iteration: int,
    entries: Sequence[Entry],
    scalars: dict[str, Any],
    config_text: str,
    ctx: ParallelContext,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Path:
    """Write a checkpoint; call it on all ranks, which must see the same folder (a shared file system).

    Args:
        folder: holds the checkpoints of a run; made if it is not there.
        iteration: of this one. One of the same iteration is replaced once the new one is whole.
        entries: this rank's, from :func:`entries_of`.
        scalars: further state as JSON can hold it, given back by :func:`load_checkpoint`.
        config_text: the resolved configuration, kept as text.
        keep_last: remove all but so many of the newest.
        keep_every: never remove one whose iteration is a multiple of this.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: on every rank, whichever failed; what was saved before is untouched.
    """
    run = {
        "iteration": iteration,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "world_size": ctx.world.size,
        "layout": asdict(ctx.sizes),
        "scalars": scalars,
    }
    texts = {RUN_FILE: json.dumps(run, indent=1), CONFIG_FILE: config_text}
    written = on_first_rank(ctx, lambda: folders.begin(folder, iteration))
    try:
        with failures_of_dcp(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a process alone is meant
            dcp.save(
                {},
                storage_writer=CheckpointWriter(written, ctx.world.rank, texts),
                planner=EntrySavePlanner(entries),
                process_group=ctx.world.group,
                no_dist=ctx.world.size == 1,
            )
        path = on_first_rank(ctx, lambda: folders.commit(written, folder, iteration))
    except Exception:
        if ctx.world.rank == 0:
            folders.discard(written)
        raise
    if keep_last is not None:
        on_first_rank(ctx, lambda: folders.prune(folder, iteration, keep_last, keep_every))
    return path
