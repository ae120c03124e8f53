"""``--check-cluster`` on real ranks: a rank that is made slow is named, and the planner takes what it writes."""

import time
from pathlib import Path
from unittest.mock import patch

import torch

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.plan.cluster import read_cluster
from megatron_moe.plan.measured import cluster_file, slow_ranks, table
from megatron_moe.training import cluster_check
from megatron_moe.training.cluster_check import Measured, measure
from tests.helpers.ranks import MAX_RANKS, RankPool
from tests.parity import harness

SLOW_RANK, SIZES = 3, MeshSizes(tp=2, pp=2, ep=2)


def measure_with_a_slow_rank(rank: int) -> Measured:
    def wait(device: torch.device) -> None:
        time.sleep(0.012 * (rank == SLOW_RANK))

    ctx = ParallelContext.create(SIZES, rank=rank, groups=harness._groups)
    with patch.object(cluster_check, "synchronise", wait):
        return measure(ctx, num_bytes=1 << 14, seconds=0.01, repeats=2)


def test_a_slow_rank_is_named(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(MAX_RANKS, harness.make_groups, SIZES)
    measured, *others = ranks.run(SIZES.world, measure_with_a_slow_rank)
    assert all(other == measured for other in others), "every rank knows all"
    assert slow_ranks(measured)[0] == SLOW_RANK, table(measured)
    found = {(t.axis, t.collective) for t in measured.groups}
    assert ("tp", "all_gather") in found and ("ep", "all_to_all") in found
    assert {link.axis for link in measured.links} == {"tp", "pp", "ep"}
    (tmp_path / "here.yaml").write_text(cluster_file(measured))
    assert read_cluster(tmp_path / "here.yaml").gpus_per_node == 4
