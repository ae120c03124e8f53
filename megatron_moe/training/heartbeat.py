"""Who is still there: every rank says so once a second, so that a rank that loses contact can name the one that is gone.

A collective that fails says that *a* peer is gone, in the words of gloo or NCCL; the heartbeats say which, where, and what it
was doing. They go through the store that the ranks met at.
"""

import json
import os
import platform
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.pipeline.runtime import Runtime

INTERVAL_SECONDS = 1.0


class Heartbeat:
    """Beats in a thread of its own from its creation on; a world of one rank has none."""

    def __init__(self, ctx: ParallelContext, runtime: Runtime) -> None:
        self._ctx, self._runtime = ctx, runtime
        self._stop = threading.Event()
        self._beats = 0
        if ctx.world.size > 1:
            self._beat(self._connect())
            threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    @staticmethod
    def _connect() -> dist.TCPStore:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))

    def _beat(self, store: dist.TCPStore) -> None:
        self._beats += 1
        facts = {"beats": self._beats, "host": platform.node(), "action": self._runtime.current}
        store.set(f"heartbeat/{self._ctx.rank}", json.dumps(facts))

    def _run(self) -> None:
        try:
            store = self._connect()
            while not self._stop.wait(INTERVAL_SECONDS):
                self._beat(store)
        except (RuntimeError, OSError):
            return  # the store went with its host: ``silent`` finds that out and says so

    def silent(self) -> list[str]:
        """Ranks that have stopped beating, each with its host and last action; takes three intervals to be sure."""
        if self._ctx.world.size == 1:
            return []
        try:
            store = self._connect()
            before = self._read(store)
            time.sleep(3 * INTERVAL_SECONDS)
            after = self._read(store)
        except (RuntimeError, OSError):
            return ["the store at MASTER_ADDR cannot be reached: rank 0's host, or the launcher, is gone"]
        return [
            f"rank {rank} on host {facts['host']}, last seen at action {facts['action']}"
            for rank, facts in after.items()
            if facts["beats"] == before[rank]["beats"] and rank != self._ctx.rank
        ]

    def _read(self, store: dist.TCPStore) -> dict[int, dict[str, Any]]:
        return {rank: json.loads(store.get(f"heartbeat/{rank}")) for rank in self._ctx.world.ranks}

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()
