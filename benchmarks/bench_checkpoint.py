"""Checkpoints against the disk they lie on: throughput, stall, memory.

    python benchmarks/bench_checkpoint.py --folder /mnt/scratch --gigabytes 1
    torchrun --nproc-per-node 4 benchmarks/bench_checkpoint.py ...      every rank has its share of the state

One run measures, several times in turn, since disks have moods:

    dd          the same bytes by `dd conv=fsync`            what the disk gives
    save        a checkpoint, from call to return            throughput, as a share of dd's
    async save  the same in the background                   stall: call to return, as a share of a save's
    load        with checksums                               throughput
    memory      the rank's largest resident size during a save and a load, above what it was before

The state is one process's or torchrun's ranks' share of random float32 tensors of 16 MiB.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from megatron_moe.checkpoint import BackgroundWriter, Box, Entry, load_checkpoint, save_checkpoint
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes

TENSOR_NUMEL = 1 << 22


def join() -> ParallelContext:
    """This rank among torchrun's, or a process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    return ParallelContext.create(MeshSizes(dp=size))


def state(total_bytes: int, ctx: ParallelContext) -> list[Entry]:
    """This rank's share of the state."""
    count = max(1, total_bytes // (4 * TENSOR_NUMEL * ctx.world.size))
    entries = []
    for i in range(count):
        tensor = torch.randn(TENSOR_NUMEL, generator=torch.Generator().manual_seed(i))
        box = Box((0,), (TENSOR_NUMEL,), tensor)
        entries.append(Entry(f"model.{ctx.rank}.{i}", (TENSOR_NUMEL,), torch.float32, (box,), (box,)))
    return entries


def timed(ctx: ParallelContext, work: Callable[[], object]) -> float:
    """Seconds until all ranks have done it."""
    if ctx.world.size > 1:
        dist.barrier(ctx.world.group)
    start = time.perf_counter()
    work()
    if ctx.world.size > 1:
        dist.barrier(ctx.world.group)
    return time.perf_counter() - start


def dd(folder: Path, source: Path) -> None:
    """Write and sync as many bytes as the source, which is in memory, has."""
    target = folder / f"dd.{os.getpid()}"
    subprocess.run(
        ["dd", f"if={source}", f"of={target}", "bs=16M", "conv=fsync"], check=True, stderr=subprocess.DEVNULL
    )
    target.unlink()


class PeakMemory:
    """Largest resident size of this process while it is entered, above that at its entrance, in MiB."""

    def __enter__(self) -> "PeakMemory":
        self._stop, self._before, self.mebibytes = threading.Event(), self._resident(), 0.0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.mebibytes = max(self.mebibytes, (self._resident() - self._before) / 2**20)

    @staticmethod
    def _resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


def measure(folder: Path, ctx: ParallelContext, total_bytes: int, repeats: int) -> dict[str, float]:
    """Medians over the repeats."""
    entries = state(total_bytes, ctx)
    num_bytes = sum(box.tensor.nbytes for entry in entries for box in entry.written)
    group = dist.new_group(list(ctx.world.ranks), backend="gloo") if ctx.world.size > 1 else None
    writer = BackgroundWriter(ctx, group)  # type: ignore[arg-type]
    seconds: dict[str, list[float]] = {"dd": [], "save": [], "stall": [], "async": [], "load": []}
    save_peak = load_peak = 0.0
    source = Path("/dev/shm") / f"dd.{os.getpid()}"
    source.write_bytes(bytes(num_bytes))
    for repeat in range(repeats + 1):  # the first makes the writer's buffers and warms up
        found = {"dd": timed(ctx, lambda: dd(folder, source))}
        with PeakMemory() as peak:
            found["save"] = timed(ctx, lambda: save_checkpoint(folder / "sync", 1, entries, {}, "", ctx))
        save_peak = max(save_peak, peak.mebibytes)
        start = time.perf_counter()
        found["stall"] = timed(ctx, lambda: writer.save(folder / "async", 1, entries, {}, ""))
        timed(ctx, writer.wait)
        found["async"] = time.perf_counter() - start
        with PeakMemory() as peak:
            found["load"] = timed(ctx, lambda: load_checkpoint(folder / "sync", 1, entries, ctx))
        load_peak = max(load_peak, peak.mebibytes)
        if repeat > 0:
            for name, value in found.items():
                seconds[name].append(value)
    source.unlink()
    medians = {name: median(values) for name, values in seconds.items()}
    total = num_bytes * ctx.world.size / 1e9
    return {
        "gigabytes": total,
        **{f"{name}_seconds": value for name, value in medians.items()},
        "dd_gb_per_s": total / medians["dd"],
        "save_gb_per_s": total / medians["save"],
        "save_share_of_dd": median(d / s for d, s in zip(seconds["dd"], seconds["save"], strict=True)),
        "stall_share_of_save": median(a / s for a, s in zip(seconds["stall"], seconds["save"], strict=True)),
        "load_gb_per_s": total / medians["load"],
        "peak_extra_mib_of_save": save_peak,
        "peak_extra_mib_of_load": load_peak,
        "mib_of_a_rank": num_bytes / 2**20,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a JSON object on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(argv)
    ctx = join()
    names = [tempfile.mkdtemp(dir=arguments.folder) if ctx.rank == 0 else ""]
    if ctx.world.size > 1:
        dist.broadcast_object_list(names, src=0, group=ctx.world.group)
    folder = Path(names[0])
    try:
        result = measure(folder, ctx, int(arguments.gigabytes * 1e9), arguments.repeats)
        if ctx.rank == 0:
            print(json.dumps({key: round(value, 4) for key, value in result.items()}, indent=1))
    finally:
        if ctx.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
