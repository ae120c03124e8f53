"""What a cluster gives to a layout: each rank's device, each collective of each group, each link between neighbours.

    group   all ranks of an axis run one of its collectives at once; a small message gives the latency, a large the rate
    link    neighbours on the ring of a group, one sends and one receives:    0 -> 1   2 -> 3    then    1 -> 2   3 -> 0
    device  matrix products and copies, on all ranks at once

Times are the best of several, on the slowest rank that took part. A rank that is slow by itself makes all its links
slow, and nobody else's: so it is found.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import Axis, ParallelContext
from megatron_moe.training.utilization import matmul_tflops

_SUMS = ("all_reduce", "reduce_scatter", "all_gather")
AXES = {
    "tp": _SUMS,
    "cp": (),  # rings: the links are what they use
    "dp_cp": _SUMS,
    "pp": (),
    "etp": ("reduce_scatter", "all_gather"),
    "ep": ("all_to_all",),
    "edp": _SUMS,
}
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_SMALL_NUMEL = 4  # float32 numbers for each rank of a group


@dataclass(frozen=True)
class Timing:
    """What a group took for a collective, or two ranks for a message (``send``, from the first to the second).

    Attributes:
        gb_per_s: bytes that each rank sent, by the ring formulas, over the time of a large message.
    """

    axis: str
    collective: str
    ranks: tuple[int, ...]
    microseconds: float
    gb_per_s: float


@dataclass(frozen=True)
class Device:
    """A rank's device; TFLOP/s by the name of a type."""

    host: str
    name: str
    memory_gb: float
    memory_gb_per_s: float
    tflops: dict[str, float]


@dataclass(frozen=True)
class Measured:
    """Of all ranks."""

    devices: list[Device]
    groups: list[Timing]
    links: list[Timing]


@torch.no_grad()
def measure(ctx: ParallelContext, num_bytes: int | None = None, seconds: float = 0.2, repeats: int = 5) -> Measured:
    """Measure devices, groups and links; call it on all ranks, which all get the result.

    Args:
        num_bytes: of the large messages. Default: 64 MiB, 1 MiB on a CPU.
        seconds: spent on each rate of a device.
        repeats: times that each message is sent.
    """
    num_bytes = num_bytes or (1 << 20 if ctx.device.type == "cpu" else 1 << 26)
    device = _device(ctx, seconds)
    groups, links = [], []
    for name, uses in AXES.items():
        axis = ctx.axis(name)
        if axis.size > 1:
            groups += [_group(ctx, axis, collective, num_bytes, repeats) for collective in uses]
            links += _links(ctx, axis, num_bytes, repeats)
    everything: list[tuple[Device, list[Timing], list[Timing]]] = [(device, groups, links)]
    if ctx.world.size > 1:
        everything = [(device, [], [])] * ctx.world.size
        dist.all_gather_object(everything, (device, groups, links), group=ctx.world.group)
    return Measured(
        [of_rank for of_rank, _, _ in everything],
        _slowest([timing for _, timings, _ in everything for timing in timings]),
        _slowest([timing for _, _, timings in everything for timing in timings]),
    )


def _slowest(timings: list[Timing]) -> list[Timing]:
    """One timing of each: that of the slowest rank."""
    found: dict[tuple[str, str, tuple[int, ...]], Timing] = {}
    for timing in timings:
        key = (timing.axis, timing.collective, timing.ranks)
        other = found.setdefault(key, timing)
        latency, rate = max(timing.microseconds, other.microseconds), min(timing.gb_per_s, other.gb_per_s)
        found[key] = Timing(*key, latency, rate)
    return list(found.values())


# --- messages -------------------------------------------------------------------------------------------------


def _run(collective: str, tensor: Tensor, axis: Axis) -> None:
    """A collective in which each rank's whole tensor, or the gathered one, has the size of ``tensor``."""
    if collective == "all_reduce":
        collectives.sum_(tensor, axis)
    elif collective == "reduce_scatter":
        collectives.scatter_sum_dim0(tensor, axis)
    elif collective == "all_gather":
        collectives.gather_dim0(tensor[: tensor.shape[0] // axis.size], axis)
    else:
        share = [tensor.shape[0] // axis.size] * axis.size
        collectives.exchange_rows(tensor, share, share, axis)


def _group(ctx: ParallelContext, axis: Axis, collective: str, num_bytes: int, repeats: int) -> Timing:
    def message(numel: int) -> tuple[float, int]:
        tensor = torch.ones(max(numel // axis.size, 1) * axis.size, device=ctx.device)
        before = axis.traffic.sent_bytes[axis.name, collective]
        _run(collective, tensor, axis)  # connections are made at first use
        sent = axis.traffic.sent_bytes[axis.name, collective] - before
        return _best(ctx, repeats, partial(_run, collective, tensor, axis)), sent

    latency, _ = message(_SMALL_NUMEL * axis.size)
    seconds, sent = message(num_bytes // 4)
    return Timing(axis.name, collective, axis.ranks, latency * 1e6, sent / seconds / 1e9)


def _links(ctx: ParallelContext, axis: Axis, num_bytes: int, repeats: int) -> list[Timing]:
    """Both links of this rank on the ring of a group. All ranks of the world must call it: they begin together."""
    found = []
    tensors = [torch.empty(numel, device=ctx.device) for numel in (_SMALL_NUMEL, num_bytes // 4)]
    for turn in range(2 + axis.size % 2):
        pair = _pair(axis, turn)
        latency, seconds = (_best(ctx, repeats, partial(_send, ctx, axis, pair, tensor)) for tensor in tensors)
        if pair is not None:
            found.append(Timing(axis.name, "send", pair, latency * 1e6, num_bytes / seconds / 1e9))
    return found


def _pair(axis: Axis, turn: int) -> tuple[int, int] | None:
    """(sender, receiver) of this rank in a turn: every second rank sends; an odd ring's last has its own turn."""
    for sender in range(axis.size):
        last_of_odd = axis.size % 2 == 1 and sender == axis.size - 1
        receiver = (sender + 1) % axis.size
        if axis.rank in (sender, receiver) and turn == (2 if last_of_odd else sender % 2):
            return axis.ranks[sender], axis.ranks[receiver]
    return None


def _send(ctx: ParallelContext, axis: Axis, pair: tuple[int, int] | None, tensor: Tensor) -> None:
    if pair is not None and ctx.rank == pair[0]:
        dist.send(tensor, pair[1], group=axis.group)
    elif pair is not None:
        dist.recv(tensor, pair[0], group=axis.group)


def _best(ctx: ParallelContext, repeats: int, action: Callable[[], Any]) -> float:
    """Seconds of the fastest of several calls, each begun by all ranks together."""
    best = float("inf")
    for _ in range(repeats + 1):  # the first one connects and allocates, and is seldom the fastest
        collectives.sum_(torch.zeros(1, device=ctx.device), ctx.world)
        synchronise(ctx.device)
        start = time.perf_counter()
        action()
        synchronise(ctx.device)
        best = min(best, time.perf_counter() - start)
    return best


def synchronise(device: torch.device) -> None:
    """Until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- devices --------------------------------------------------------------------------------------------------


def _device(ctx: ParallelContext, seconds: float) -> Device:
    host = platform.node()
    hosts: list[str] = [host]
    if ctx.world.size > 1:
        hosts = [""] * ctx.world.size
        dist.all_gather_object(hosts, host, group=ctx.world.group)
    cuda = ctx.device.type == "cuda"
    if cuda:
        name, memory = torch.cuda.get_device_name(ctx.device), torch.cuda.get_device_properties(ctx.device).total_memory
    else:
        name, memory = platform.machine(), _host_bytes() // hosts.count(host)
    tflops = {str(dtype).removeprefix("torch."): matmul_tflops(ctx.device, dtype, seconds) for dtype in _DTYPES}
    source = torch.ones(1 << (28 if cuda else 22), device=ctx.device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() * source.element_size() / _best(ctx, 3, partial(target.copy_, source))
    return Device(host, name, memory / 1e9, copied / 1e9, tflops)


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
