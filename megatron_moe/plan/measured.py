"""From measurements of a cluster to a table, the names of what is slow, and a cluster file: ``--check-cluster FILE``.

Slow is what reaches less than 70 % of the median of its peers: devices among devices, groups among those of the same
axis and collective, links among those that also stay inside a node, or also leave it.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

from megatron_moe.config.schema import Config
from megatron_moe.training import launch
from megatron_moe.training.cluster_check import Measured, Timing, measure
from megatron_moe.training.utilization import GPU_PEAK_TFLOPS

T = TypeVar("T")
SLOW = 0.7
_ATTENTION = 0.45 / 0.65  # of matrix products, as in configs/clusters: it is not measured


def check_cluster(config: Config, path: str) -> int:
    """Measure on all ranks; rank 0 prints the table and writes the file. Returns the exit status."""
    try:
        ctx = launch.join(config)
    except (ValueError, RuntimeError) as error:
        print(f"error: a rank could not join the others: {error}", file=sys.stderr, flush=True)
        return launch.EXIT_USER_ERROR
    if ctx.world.size == 1:
        print("error: --check-cluster measures links, and one rank has none; use torchrun.", file=sys.stderr)
        return launch.EXIT_USER_ERROR
    launch.together(lambda: _refuse(path))
    measured = measure(ctx)
    launch.together(lambda: _write(path, cluster_file(measured)) if launch.is_main_rank() else None)
    if launch.is_main_rank():
        print(table(measured), f"written: {path}", sep="\n", flush=True)
    launch.leave()
    return 0


def _refuse(path: str) -> None:
    """Complain before the measurement, not after it."""
    if launch.is_main_rank() and not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--check-cluster {path}: there is no such folder.")


def _write(path: str, text: str) -> None:
    beside = Path(f"{path}.tmp")
    beside.write_text(text)
    os.replace(beside, path)


# --- what is slow -----------------------------------------------------------------------------------------------


def slow_ranks(measured: Measured) -> list[int]:
    """Ranks all of whose links are slow while those of others are not, the slowest first.

    Where two ranks have but the link between them, that says nothing of one of them alone.
    """
    slow = set(map(_pair, slow_links(measured)))
    links: dict[int, dict[tuple[int, ...], float]] = {}
    for link in measured.links:
        for rank in link.ranks:
            peers = links.setdefault(rank, {})
            peers[_pair(link)] = min(link.gb_per_s, peers.get(_pair(link), link.gb_per_s))
    found = [rank for rank, own in links.items() if len(own) > 1 and slow.issuperset(own)]
    return sorted(found, key=lambda rank: max(links[rank].values()))


def slow_links(measured: Measured) -> list[Timing]:
    """Links that are slow among their peers, the slowest first; one of several axes by its best measurement."""
    links = [max(same, key=lambda link: link.gb_per_s) for same in _by(measured.links, lambda link: link.ranks)]
    return sorted(
        (link for peers in _by(links, lambda link: nodes(measured, link.ranks) > 1) for link in _slow(peers)),
        key=lambda link: link.gb_per_s,
    )


def slow_groups(measured: Measured) -> list[Timing]:
    """Groups that are slow among those of their axis and collective."""
    return [group for peers in _by(measured.groups, lambda g: (g.axis, g.collective)) for group in _slow(peers)]


def slow_devices(measured: Measured) -> list[tuple[int, str]]:
    """Ranks whose device is slow, with what it is slow at."""
    rates = {"memory": [device.memory_gb_per_s for device in measured.devices]}
    rates |= {f"{t} products": [d.tflops[t] for d in measured.devices] for t in measured.devices[0].tflops}
    return [
        (rank, f"{what} at {100 * rate / median(all_):.0f} % of the median")
        for what, all_ in rates.items()
        for rank, rate in enumerate(all_)
        if rate < SLOW * median(all_)
    ]


def _pair(link: Timing) -> tuple[int, ...]:
    return tuple(sorted(link.ranks))


def _slow(peers: Sequence[Timing]) -> list[Timing]:
    usual = median(timing.gb_per_s for timing in peers)
    return [timing for timing in peers if timing.gb_per_s < SLOW * usual]


def _by(items: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    found: dict[object, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def nodes(measured: Measured, ranks: Iterable[int]) -> int:
    """How many hosts ranks are on."""
    return len({measured.devices[rank].host for rank in ranks})


# --- for people -------------------------------------------------------------------------------------------------


def table(measured: Measured) -> str:
    """Medians of each axis and collective, then a line for everything that is slow."""
    hosts = dict.fromkeys(device.host for device in measured.devices)
    lines = [f"{len(measured.devices)} ranks on {len(hosts)} hosts; device {measured.devices[0].name}", ""]
    lines += ["axis    collective      of ranks  groups  latency us   GB/s  slowest"]
    for peers in _by([*measured.groups, *measured.links], lambda t: (t.axis, t.collective)):
        first, rates = peers[0], [timing.gb_per_s for timing in peers]
        latency = median(timing.microseconds for timing in peers)
        lines.append(
            f"{first.axis:<7} {first.collective:<14} {len(first.ranks):9d} {len(peers):7d} {latency:11.1f}"
            f" {median(rates):6.3g} {min(rates):8.3g}"
        )
    return "\n".join(
        [*lines, "", *(_complaints(measured) or [f"nothing is below {SLOW:.0%} of the median of its peers"])]
    )


def _complaints(measured: Measured) -> list[str]:
    def host(rank: int) -> str:
        return f"rank {rank} on {measured.devices[rank].host}"

    whole = slow_ranks(measured)
    found = [f"slow device: {host(rank)}, {what}" for rank, what in slow_devices(measured)]
    found += [f"slow rank: {host(rank)}, all of whose links are slow" for rank in whole]
    found += [
        f"slow link: {host(link.ranks[0])} to {host(link.ranks[1])}, {link.gb_per_s:.3g} GB/s ({link.axis})"
        for link in slow_links(measured)
        if not set(link.ranks) & set(whole)
    ]
    return found + [
        f"slow group: {group.axis} {group.collective} of ranks {', '.join(map(str, group.ranks))}, "
        f"{group.gb_per_s:.3g} GB/s"
        for group in slow_groups(measured)
    ]


# --- for the planner --------------------------------------------------------------------------------------------


def cluster_file(measured: Measured) -> str:
    """A file as in configs/clusters: rates that were reached, so that efficiencies are 1 but for matrix products.

    Those of bfloat16 are held against the peak of a known GPU; other types' peaks follow from the same efficiency.
    """
    devices = measured.devices
    hosts = [device.host for device in devices]
    inside, between = _rates(measured, False), _rates(measured, True)
    gb_per_s, microseconds = inside or between or (0.0, 0.0)
    network_gb_per_s, network_microseconds = between or (gb_per_s, microseconds)
    reached = {name: median(device.tflops[name] for device in devices) for name in devices[0].tflops}
    known = next((peak for part, peak in GPU_PEAK_TFLOPS.items() if part in devices[0].name), reached["bfloat16"])
    efficiency = min(1.0, reached["bfloat16"] / known)
    peaks = ", ".join(f"{name}: {value / efficiency:.4g}" for name, value in reached.items())
    missing = [] if inside else ["No group stayed inside a node: its rates are the network's."]
    missing += [] if between else ["No group left its node: the network's rates are the node's."]
    lines = [
        f"# Measured with --check-cluster: {len(devices)} ranks on {len(set(hosts))} hosts, {devices[0].name}.",
        "# Rates are those that were reached, so their efficiencies are 1. Attention's is not measured: it is in",
        "# proportion to that of matrix products, as in the files of configs/clusters.",
        *(f"# {sentence}" for sentence in missing),
        f"gpus_per_node: {max(map(hosts.count, hosts))}",
        f"memory_gb: {min(device.memory_gb for device in devices):.4g}",
        f"memory_gb_per_s: {median(device.memory_gb_per_s for device in devices):.4g}",
        f"peak_tflops: {{{peaks}}}",
        f"node_gb_per_s: {gb_per_s:.4g}",
        f"node_microseconds: {microseconds:.4g}",
        f"network_gb_per_s: {network_gb_per_s:.4g}",
        f"network_microseconds: {network_microseconds:.4g}",
        f"efficiency: {{matmul: {efficiency:.3g}, attention: {efficiency * _ATTENTION:.3g}, "
        "memory: 1, node: 1, network: 1}",
    ]
    return "\n".join(lines) + "\n"


def _rates(measured: Measured, outside: bool) -> tuple[float, float] | None:
    """Medians of GB/s and microseconds of what leaves its node, or of what does not; None where there is nothing."""

    def of_device(timing: Timing) -> float:
        """A device's share of the network, by the inverse of ``estimate.collective_seconds``."""
        size = len(timing.ranks)
        in_node = size / nodes(measured, timing.ranks)
        part = (size - in_node) / (size - 1) if timing.collective == "all_to_all" else 1 / in_node
        return timing.gb_per_s * (part if outside else 1.0)

    found = [t for t in (*measured.groups, *measured.links) if (nodes(measured, t.ranks) > 1) == outside]
    return (median(map(of_device, found)), median(t.microseconds for t in found)) if found else None
