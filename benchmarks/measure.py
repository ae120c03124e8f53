"""What all benchmarks share: time a step while the machine is ours, and say on what machine it was.

A machine shared with others makes times that mean nothing. While a step runs, the share of the cores that other
processes used is read from ``/proc/stat``; steps during which others used more than ``FOREIGN_LIMIT`` of the machine
are repeated, and the median of the quiet ones counts.
"""

import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOREIGN_LIMIT = 0.06


@dataclass(frozen=True)
class Timing:
    """Times of a step.

    Attributes:
        seconds: median of the quiet steps (of all, where fewer than three were quiet).
        cpu_seconds: median processor time per rank, which other people's work changes least.
        foreign: mean share of the machine that others used.
        peak_mib: largest resident set of each rank since its start.
    """

    seconds: float
    cpu_seconds: float
    quiet: int
    total: int
    foreign: float
    peak_mib: list[int]


def measure(step: Callable[[], Any], *, steps: int = 12, warm_up: int = 4, most_seconds: float = 60.0) -> Timing:
    """Time ``step`` on all ranks together until ``steps`` of them were quiet, or time is up."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    for _ in range(warm_up):
        step()
    quiet, everything, foreign, cpu = [], [], [], []
    deadline = time.monotonic() + most_seconds
    while len(quiet) < steps:
        _barrier(world)
        busy_before, mine_before, start = _busy_seconds(), _own_seconds(), time.perf_counter()
        step()
        _barrier(world)
        seconds, mine = time.perf_counter() - start, _own_seconds() - mine_before
        ours, busy, seconds, late = _agreed(
            [mine, _busy_seconds() - busy_before, seconds, float(time.monotonic() > deadline)], world
        )
        share = max(0.0, busy - ours) / (seconds * (os.cpu_count() or 1))
        everything.append(seconds)
        foreign.append(share)
        cpu.append(ours / world)
        if share < FOREIGN_LIMIT:
            quiet.append(seconds)
        if late:
            break
    used = quiet if len(quiet) >= 3 else everything
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024])
    peaks = [torch.zeros_like(peak) for _ in range(world)]
    if world > 1:
        dist.all_gather(peaks, peak)
    else:
        peaks = [peak]
    return Timing(
        statistics.median(used),
        statistics.median(cpu),
        len(quiet),
        len(everything),
        statistics.mean(foreign),
        [int(p) for p in peaks],
    )


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    found: dict[str, Any] = {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def product_gflops(
    rows: int, inner: int, columns: int, seconds: float = 0.5, layout: str = "nt", batch: int = 1
) -> float:
    """Rate of ``batch`` products [rows, inner] x [inner, columns] in float32 with the threads of this process.

    ``layout`` is BLAS's: "t" for an operand that lies transposed in memory, "n" for one that does not. "nt" is a linear
    layer's forward pass, "nn" its input's gradient, "tn" its weight's.
    """
    a, b = _operand(batch, rows, inner, layout[0]), _operand(batch, inner, columns, layout[1])
    for _ in range(3):
        out = torch.matmul(a, b)
    times, stop = [], time.perf_counter() + seconds
    while time.perf_counter() < stop:
        start = time.perf_counter()
        torch.matmul(a, b, out=out)
        times.append(time.perf_counter() - start)
    return 2 * batch * rows * inner * columns / statistics.median(times) / 1e9


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table with the keys of the first row as its head."""
    head = list(rows[0])
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(str(row.get(key, '')) for key in head)} |" for row in rows)])


def as_json(timing: Timing, **more: Any) -> str:
    """One line for other programs."""
    return json.dumps(more | {k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(timing).items()})


def _operand(batch: int, rows: int, columns: int, kind: str) -> torch.Tensor:
    """Random matrices [batch, rows, columns], without the batch where it is one."""
    made = torch.randn(batch, columns, rows).transpose(1, 2) if kind == "t" else torch.randn(batch, rows, columns)
    return made[0] if batch == 1 else made


def _barrier(world: int) -> None:
    if world > 1:
        dist.barrier()


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _busy_seconds() -> float:
    """Seconds that all cores together have worked since the machine started."""
    with open("/proc/stat") as file:
        fields = [int(x) for x in file.readline().split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _agreed(values: list[float], world: int) -> list[float]:
    """Processor time summed over ranks; the rest as rank 0 saw it."""
    if world > 1:
        if dist.get_rank() > 0:
            values = [values[0], 0.0, 0.0, 0.0]
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()
    return values
