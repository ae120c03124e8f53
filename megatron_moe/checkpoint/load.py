"""Loading: verify, compare with the model, then read every box that this rank holds, in place."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from megatron_moe.checkpoint import folder as folders
from megatron_moe.checkpoint.agreement import failures_of_dcp, on_all_ranks, on_first_rank
from megatron_moe.checkpoint.checksums import damage
from megatron_moe.checkpoint.entries import MODEL, Entry
from megatron_moe.checkpoint.errors import CheckpointError
from megatron_moe.checkpoint.index import read_index
from megatron_moe.checkpoint.offline import read_run
from megatron_moe.checkpoint.planner import EntryLoadPlanner
from megatron_moe.checkpoint.store import CheckpointReader
from megatron_moe.parallel.context import ParallelContext


def load_checkpoint(
    folder: str | Path,
    iteration: int | None,
    entries: Sequence[Entry],
    ctx: ParallelContext,
    *,
    weights_only: bool = False,
    strict: bool = True,
    verify: bool = True,
) -> dict[str, Any]:
    """Fill the tensors of the entries from a checkpoint; call it on all ranks, under any layout.

    With sharded optimizer state, gather the weights afterwards (``GradientReducer.gather_weights``).

    Args:
        folder: holds the checkpoints of a run.
        iteration: None: the latest.
        entries: this rank's, from :func:`entries_of`.
        weights_only: load weights and buffers, and leave the optimizer as it is.
        strict: a tensor that only the model or only the checkpoint has is an error; else it is let be.
        verify: compare the checksums of all files first; the ranks share the reading.

    Returns:
        The scalars it was saved with.

    Raises:
        CheckpointError: on every rank: there is none, it is damaged (naming the newest older one that is
            not), or it does not fit the model (listing all that does not). No tensor has been touched then.
    """
    if verify:
        path = verify_checkpoint(folder, iteration, ctx)
    else:
        path = on_first_rank(ctx, lambda: _resolve(folder, iteration))
    metadata = on_all_ranks(ctx, lambda: read_index(path))[ctx.world.rank]
    prefix = MODEL if weights_only else ""
    with failures_of_dcp(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a process alone is meant
        dcp.load(
            {},
            storage_reader=CheckpointReader(path, metadata),
            planner=EntryLoadPlanner(entries, strict=strict, prefix=prefix, where=str(path)),
            process_group=ctx.world.group,
            no_dist=ctx.world.size == 1,
        )
    return on_first_rank(ctx, lambda: read_run(path)["scalars"])


def verify_checkpoint(folder: str | Path, iteration: int | None, ctx: ParallelContext) -> Path:
    """Compare the checksums of all files of a checkpoint (None: the latest), sharing the reading; call it on all ranks.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: on every rank: there is none, or it is damaged; names the newest older one that is whole.
    """
    path = on_first_rank(ctx, lambda: _resolve(folder, iteration))
    share = slice(ctx.world.rank, None, ctx.world.size)
    problems = [p for found in on_all_ranks(ctx, lambda: damage(path, share)) for p in found]
    if problems:
        raise CheckpointError(on_first_rank(ctx, lambda: _damaged(list(dict.fromkeys(problems)), folder, path)))
    return path


def _resolve(folder: str | Path, iteration: int | None) -> Path:
    if iteration is None:
        iteration = folders.find_latest(folder)
    if iteration is None:
        raise CheckpointError(f"{folder} holds no checkpoint.")
    return folders.checkpoint_path(folder, iteration)


def _damaged(problems: list[str], folder: str | Path, path: Path) -> str:
    """The message for a damaged checkpoint, with the way out."""
    before = next(i for i in folders.saved_iterations(folder) if folders.checkpoint_path(folder, i) == path)
    whole = newest_whole(folder, before)
    advice = "There is no older one that is whole."
    if whole is not None:
        advice = (
            f"The newest older one that is whole is of iteration {whole}: load it with --ckpt-step {whole}; "
            "--auto-recover does so by itself."
        )
    return "\n".join([f"the checkpoint {path} cannot be trusted:", *(f"  {p}" for p in problems), advice])


def newest_whole(folder: str | Path, before: int | None = None) -> int | None:
    """The last iteration in a folder, below ``before``, whose files are all as they were written; None without one."""
    saved = (i for i in reversed(folders.saved_iterations(folder)) if before is None or i < before)
    return next((i for i in saved if not damage(folders.checkpoint_path(folder, i))), None)
