"""A living pool of gloo ranks on this machine, for what checks layouts: tests and ``tools/verify_layout.py``.

Starting a process that imports torch costs seconds; handing work to one that lives costs milliseconds. The pool is
forked from a server that has torch loaded, meets over a file store (no ports), and lives until it is stopped.

    pool.run(4, function, *arguments)  ->  [result of rank 0, ..., result of rank 3]

A rank that raises fails the call with its traceback. Ranks that do not answer in time fail it with the stack of every
rank; the pool is then ended and started anew for the next call.
"""

import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE_SECONDS = 3.0  # how long other ranks may go on after one has failed


class RankFailure(RuntimeError):
    """A rank raised, died or hung; the message has every rank's story."""


def _serve(rank: int, world_size: int, folder: str, connection: Connection) -> None:
    """A rank: join the process group, then do what arrives until told to stop."""
    import torch
    import torch.distributed as dist

    with open(Path(folder) / f"stack.{rank}", "w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        while True:
            task = connection.recv_bytes()
            if not task:
                return
            try:
                function, arguments = pickle.loads(task)
                answer = ("done", function(rank, *arguments))
            except BaseException:  # the parent shows it, whatever it is
                answer = ("raised", traceback.format_exc())
            connection.send(answer)


class RankPool:
    """``size`` processes in one gloo world; started at first use."""

    def __init__(self, size: int = 8) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``function(rank, *arguments)`` on ranks 0 .. num_ranks - 1 and return their results.

        Raises:
            RankFailure: a rank raised, died, or none of them moved within ``timeout`` seconds.
        """
        if not self._processes:
            self._start()
        task = pickle.dumps((function, arguments))
        for connection in self._connections[:num_ranks]:
            connection.send_bytes(task)
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < num_ranks and time.monotonic() < deadline:
            waiting = {self._connections[r]: r for r in range(num_ranks) if r not in answers}
            for ready in wait(list(waiting), timeout=0.2):
                rank = waiting[ready]  # type: ignore[index]
                try:
                    answers[rank] = self._connections[rank].recv()
                except EOFError:
                    answers[rank] = ("died", f"exit code {self._processes[rank].exitcode}")
                if answers[rank][0] != "done":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if len(answers) == num_ranks and all(kind == "done" for kind, _ in answers.values()):
            return [answers[rank][1] for rank in range(num_ranks)]
        story = self._story(num_ranks, answers)
        self.stop()
        raise RankFailure(story)

    def stop(self) -> None:
        """End all ranks; the next ``run`` starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy", "megatron_moe.training.parity"])
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self._folder.name, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)

    def _story(self, num_ranks: int, answers: dict[int, tuple[str, Any]]) -> str:
        silent = [rank for rank in range(num_ranks) if rank not in answers]
        for rank in silent:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        lines = []
        for rank in range(num_ranks):
            if rank in answers:
                kind, what = answers[rank]
                lines.append(f"--- rank {rank} {kind}" + (f":\n{what}" if kind != "done" else ""))
            else:
                assert self._folder is not None
                stack = (Path(self._folder.name) / f"stack.{rank}").read_text()
                lines.append(f"--- rank {rank} did not answer; it is at:\n{stack}")
        return "\n".join(["ranks failed", *lines])
