"""What is slow among its peers, and a cluster file whose estimates are the measurements it was made from."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_moe.parallel.layout import MeshSizes, peers
from megatron_moe.plan.cluster import Cluster, read_cluster
from megatron_moe.plan.estimate import collective_seconds
from megatron_moe.plan.measured import cluster_file, slow_devices, slow_groups, slow_links, slow_ranks, table
from megatron_moe.training.cluster_check import Device, Measured, Timing

ROOT = Path(__file__).parents[3]
SIZES = MeshSizes(tp=2, dp=4, ep=8)
DEVICE = Device("", "NVIDIA H100 80GB HBM3", 80, 2500, {"bfloat16": 700, "float32": 45, "float64": 40})


def measured_on(cluster: Cluster) -> Measured:
    """Eight ranks on two hosts, as the planner's own formulas time them."""

    def timing(axis: str, collective: str, ranks: tuple[int, ...]) -> Timing:
        latency = collective_seconds(ranks, collective, 1, 0, cluster)
        return Timing(
            axis,
            collective,
            ranks,
            1e6 * latency,
            1 / (collective_seconds(ranks, collective, 1, 1e9, cluster) - latency),
        )

    kinds = (("tp", "all_gather"), ("dp_cp", "reduce_scatter"), ("ep", "all_to_all"))
    found = {(a, c, peers(rank, a, SIZES)): None for a, c in kinds for rank in range(8)}
    rings = dict.fromkeys(ring for axis in ("tp", "dp_cp") for ring in (peers(rank, axis, SIZES) for rank in range(8)))
    links = [timing("link", "send", (ring[i], ring[(i + 1) % len(ring)])) for ring in rings for i in range(len(ring))]
    devices = [replace(DEVICE, host=f"node{rank // 4}") for rank in range(8)]
    return Measured(devices, [timing(*key) for key in found], links)


@pytest.fixture
def measured() -> Measured:
    cluster = read_cluster(ROOT / "configs" / "clusters" / "h100-sxm.yaml")
    return measured_on(replace(cluster, gpus_per_node=4))


def slowed(measured: Measured, *pairs: tuple[int, int]) -> Measured:
    links = [replace(t, gb_per_s=t.gb_per_s * (0.6 if t.ranks in pairs else 1.0)) for t in measured.links]
    return replace(measured, links=links)


def test_nothing_is_slow_because_it_leaves_its_node(measured: Measured) -> None:
    assert not slow_links(measured) and not slow_ranks(measured) and not slow_groups(measured)
    assert "nothing is below 70% of the median of its peers" in table(measured)


def test_a_slow_link_is_not_a_slow_rank(measured: Measured) -> None:
    said = table(slowed(measured, (2, 4)))
    assert "slow link: rank 2 on node0 to rank 4 on node1, 37.5 GB/s" not in said
    assert "slow link: rank 2 on node0 to rank 4 on node1, 22.5 GB/s (link)" in said and "slow rank" not in said


def test_a_slow_rank_is_named_once(measured: Measured) -> None:
    changed = slowed(measured, *(link.ranks for link in measured.links if 5 in link.ranks))
    assert slow_ranks(changed) == [5]
    assert "slow rank: rank 5 on node1" in table(changed) and "slow link" not in table(changed)


def test_slow_devices_and_groups(measured: Measured) -> None:
    devices = [replace(d, memory_gb_per_s=500) if rank == 6 else d for rank, d in enumerate(measured.devices)]
    groups = [replace(g, gb_per_s=1.0) if g.ranks == (2, 3) else g for g in measured.groups]
    changed = replace(measured, devices=devices, groups=groups)
    assert slow_devices(changed) == [(6, "memory at 20 % of the median")]
    assert [group.ranks for group in slow_groups(changed)] == [(2, 3)]


def test_the_file_gives_the_measurements_back(measured: Measured, tmp_path: Path) -> None:
    (tmp_path / "here.yaml").write_text(cluster_file(measured))
    found = read_cluster(tmp_path / "here.yaml")
    assert (found.gpus_per_node, found.memory_gb, found.peak_tflops["bfloat16"]) == (4, 80, 989)
    assert found.peak_tflops["float64"] * found.efficiency["matmul"] == pytest.approx(40, rel=1e-2)
    again = measured_on(found)
    for before, after in zip(measured.groups + measured.links, again.groups + again.links, strict=True):
        assert (after.microseconds, after.gb_per_s) == pytest.approx((before.microseconds, before.gb_per_s), rel=1e-2)
