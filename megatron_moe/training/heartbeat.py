"""Who is still there, and where: every rank says so once a second, so that one that loses contact can name the others.

A collective that fails says that *a* peer is gone, in the words of gloo or NCCL; one that waits for ever says nothing.
The heartbeats say which rank, on which host, in which action of the schedule, at which line of the program. They go
through the store that the ranks met at.

    rank 5   beats 812   host n3   action 2F1   line parallel/collectives.py:78 exchange_rows < ...   still 4.0 s

A rank that stays at one line for almost as long as a collective may wait, without finishing an action, is taken to
hang: its watchdog prints where every rank is and ends it, before the library does so without a word.
"""

import json
import os
import platform
import secrets
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import megatron_moe
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.pipeline.runtime import Runtime

INTERVAL_SECONDS = 1.0
EXIT_HUNG = 1
_PROGRAM = str(Path(megatron_moe.__file__).parent)
_NUM_CALLERS = 3


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself; ``still`` is for how many seconds it has been at that line in that action."""

    beats: int
    host: str
    action: str
    line: str
    still: float


class Heartbeat:
    """Beats in a thread of its own from its creation on; a world of one rank has none.

    Args:
        runtime: says what the main thread is doing.
        limit: how long a collective may wait.
    """

    def __init__(self, ctx: ParallelContext, runtime: Runtime, limit: timedelta) -> None:
        self._ctx, self._runtime = ctx, runtime
        self._limit = max(limit.total_seconds() - 2 * INTERVAL_SECONDS, 0.8 * limit.total_seconds())
        self._main = threading.main_thread().ident
        self._prefix = _name(ctx)
        self._stop = threading.Event()
        self._last = Beat(0, platform.node(), "", "", 0.0)
        self._place, self._since = ("", "", 0), time.monotonic()
        if ctx.world.size > 1:
            self._beat(self._connect())
            threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    @staticmethod
    def _connect() -> dist.TCPStore:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))

    def _beat(self, store: dist.TCPStore) -> None:
        action, now = self._runtime.current, time.monotonic()
        line = line_of(self._main) if self._last.beats else "its start"
        place = (action, line, self._runtime.num_done)
        if place != self._place or line.startswith("checkpoint/"):  # a large file takes its time, at one line
            self._place, self._since = place, now
        self._last = Beat(self._last.beats + 1, self._last.host, action, line, round(now - self._since, 1))
        store.set(f"{self._prefix}/{self._ctx.rank}", json.dumps(asdict(self._last)))

    def _run(self) -> None:
        try:
            store = self._connect()
            while not self._stop.wait(INTERVAL_SECONDS):
                self._beat(store)
                if self._last.still > self._limit:
                    self._end(store)
        except (RuntimeError, OSError):
            return  # the store went with its host: ``report`` finds that out and says so

    def _beat_on(self, store: dist.TCPStore, times: int) -> None:
        """Let time pass, and not fall silent in it."""
        for _ in range(times):
            time.sleep(INTERVAL_SECONDS)
            self._beat(store)

    def _end(self, store: dist.TCPStore) -> None:
        """Say where every rank is, unless another rank does, and leave."""
        if store.add(f"{self._prefix}/told", 1) == 1:
            story = f"error on {self._ctx.describe()}: nothing has moved here for {self._last.still:.0f} s"
            print(f"{story}{self.report()}", file=sys.stderr, flush=True)
        else:
            self._beat_on(store, 5)  # a launcher ends all ranks when one does: let the other finish its story
        os._exit(EXIT_HUNG)

    def report(self) -> str:
        """Where every rank is, those that have fallen silent first; takes three intervals to be sure."""
        if self._ctx.world.size == 1:
            return ""
        try:
            store = self._connect()
            before = self._read(store)
            self._beat_on(store, 3)
            after = self._read(store)
        except (RuntimeError, OSError):
            return "\n  lost contact with the store at MASTER_ADDR: rank 0's host, or the launcher, is gone"
        silent = {r for r, beat in after.items() if beat.beats == before[r].beats and r != self._ctx.rank}
        return describe(before, silent)  # where they were first: by now some may be leaving too

    def _read(self, store: dist.TCPStore) -> dict[int, Beat]:
        return {r: Beat(**json.loads(store.get(f"{self._prefix}/{r}"))) for r in self._ctx.world.ranks}

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()


def _name(ctx: ParallelContext) -> str:
    """Where the beats of this start of the run are in the store, which may have those of an earlier one."""
    name = [secrets.token_hex(8)]
    if ctx.world.size > 1:
        dist.broadcast_object_list(name, src=ctx.world.ranks[0], group=ctx.world.group)
    return f"heartbeat/{name[0]}"


def line_of(thread: int | None) -> str:
    """Where a thread is in this program, without other libraries: innermost lines, ``file:line function < caller``."""
    frame, lines = sys._current_frames().get(thread or 0), []
    while frame is not None and len(lines) < _NUM_CALLERS:
        path = frame.f_code.co_filename
        if path.startswith(_PROGRAM):
            lines.append(f"{os.path.relpath(path, _PROGRAM)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines) or "outside of the program"


def describe(beats: dict[int, Beat], silent: set[int]) -> str:
    """A line for each rank that has fallen silent, and one for each place where others are."""
    lines = [
        f"lost contact with rank {rank} on host {beats[rank].host}, last seen in action {beats[rank].action} at "
        f"{beats[rank].line}"
        for rank in sorted(silent)
    ]
    places: dict[tuple[str, str, str], list[int]] = {}
    for rank, beat in beats.items():
        if rank not in silent:
            places.setdefault((beat.host, beat.action, beat.line), []).append(rank)
    for (host, action, line), ranks in places.items():
        still = max(beats[rank].still for rank in ranks)
        named = ", ".join(map(str, ranks[:16])) + ", ..." * (len(ranks) > 16)
        lines.append(f"rank {named} on host {host}: action {action} at {line}, for {still:.0f} s")
    return "".join(f"\n  {line}" for line in lines)
