"""Saving while training goes on: what this rank writes is copied to host memory, and a thread does the rest.

    training   step | copy | step  step  step | step       step       | wait, copy | step ...
    writer                 |=== write, agree, rename =================|            |=== ...

The copy is all that training waits for. Writers of different ranks agree over a process group of their own, so that
their messages never mix with training's. One save is under way at most: a second waits for the first. What a writer
meets is kept until somebody asks.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.checkpoint.entries import Box, Entry
from megatron_moe.checkpoint.save import save_checkpoint
from megatron_moe.parallel.context import ParallelContext


class BackgroundWriter:
    """Writes checkpoints of one run in a thread.

    Args:
        group: joins the same ranks as ``ctx.world``, and nothing else uses it; tensors of its messages are on the
            host. None for a process alone.
    """

    def __init__(self, ctx: ParallelContext, group: dist.ProcessGroup | None) -> None:
        assert (group is None) == (ctx.world.size == 1)
        self._ctx = replace(ctx, world=ctx.world._replace(group=group), device=torch.device("cpu"))
        self._copies: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None

    def save(
        self,
        folder: str | Path,
        iteration: int,
        entries: Sequence[Entry],
        scalars: dict[str, Any],
        config_text: str,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        """:func:`save_checkpoint` with the values of now, once the save before is done; returns after the copy.

        Raises:
            CheckpointError: the save before failed; this one has not begun.
        """
        self.wait()
        staged = self._stage(entries)

        def work() -> None:
            try:
                save_checkpoint(folder, iteration, staged, scalars, config_text, self._ctx, keep_last, keep_every)
            except BaseException as problem:
                self._problem = problem

        self._thread = threading.Thread(target=work, name="checkpoint writer", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the last save is known to have failed on this rank; :meth:`wait` raises why."""
        return self._problem is not None

    def wait(self) -> None:
        """Until nothing is being written.

        Raises:
            CheckpointError: the last save failed. Raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _stage(self, entries: Sequence[Entry]) -> list[Entry]:
        """Entries whose boxes to write are copies in host memory, which is kept from save to save."""
        staged, on_device = [], False
        for entry in entries:
            boxes = []
            for box in entry.written:
                source, key = box.tensor.detach(), (entry.name, box.offsets)
                if key not in self._copies:
                    pinned = source.device.type == "cuda"
                    self._copies[key] = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
                self._copies[key].copy_(source, non_blocking=True)
                on_device |= source.device.type == "cuda"
                boxes.append(Box(box.offsets, box.sizes, self._copies[key]))
            staged.append(replace(entry, held=(), written=tuple(boxes)))
        if on_device:
            torch.cuda.current_stream().synchronize()
        return staged
