"""A rank that works longer than the others is named; the others are seen to wait."""

import time

import torch

from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.training.stragglers import StragglerClock, describe
from tests.helpers.ranks import MAX_RANKS, RankPool
from tests.parity import harness


def work_unevenly(rank: int) -> dict[str, list[float]]:
    ctx = ParallelContext.create(MeshSizes(dp=2), rank=rank, groups=harness._groups)
    clock = StragglerClock(ctx, wanted=True)
    for _ in range(3):
        collectives.sum_(torch.zeros(1), ctx.world)
        clock._clock.take()  # type: ignore[union-attr]
        start = time.perf_counter()
        time.sleep(0.3 if rank == 1 else 0.02)
        collectives.sum_(torch.zeros(1), ctx.world)
        clock.step(time.perf_counter() - start)
        report = clock.report()
    return report


def test_the_slow_rank_waits_least(ranks: RankPool) -> None:
    ranks.run(MAX_RANKS, harness.make_groups, MeshSizes(dp=2))
    first, second = ranks.run(2, work_unevenly)
    assert first == second
    assert first["rank_waiting_share"][0] > 0.5 > 0.2 > first["rank_waiting_share"][1]
    assert first["rank_busy_seconds"][0] < 0.2 < 0.3 <= first["rank_busy_seconds"][1]


def test_only_those_that_stand_out_are_named() -> None:
    even = describe([1.0, 1.1, 1.0], [0.1, 0.0, 0.1])
    assert even == "stragglers: none; busy 1.000 to 1.100 s a step, waiting 0% to 10%"
    uneven = describe([1.0, 1.0, 3.0, 1.0], [0.6, 0.6, 0.0, 0.6])
    assert uneven.startswith("stragglers: rank 2 busy 3.000 s, 3.0x the median;")


def test_nothing_is_measured_unless_wanted() -> None:
    ctx = ParallelContext.single()
    clock = StragglerClock(ctx, wanted=False)
    clock.step(1.0)
    assert clock.report() == {} and ctx.traffic.clock is None
