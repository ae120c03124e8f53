"""What a step says of its MoE layers: against numbers counted by hand, for layers of different sizes, over ranks."""

import math
from typing import Any

import pytest
import torch

from megatron_moe.config import normalise
from megatron_moe.config.schema import Config
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.training.build import Machine, build_machine
from megatron_moe.training.faults import routers_that_are_not_finite
from megatron_moe.training.statistics import MoEStatistics, collect
from megatron_moe.training.step import train_step
from tests.helpers.ranks import MAX_RANKS, RankPool
from tests.parity.harness import BASE, GLOBAL_BATCH, SEQ_LENGTH, _groups, batches, layout, make_groups, vary

PYRAMID: dict[str, Any] = {"num_experts": None, "moe_num_experts_per_layer": "[4]+[8]"}
NUM_TOKENS = GLOBAL_BATCH * SEQ_LENGTH


def stepped(config: Config, ctx: ParallelContext, num_steps: int = 1) -> Machine:
    config, _ = normalise(config, ctx.world.size)
    machine = build_machine(config, ctx)
    for iteration in range(1, num_steps + 1):
        train_step(machine, batches(config, 0, ctx.dp.rank, ctx.dp.size, False), iteration, 1e-2)
    return machine


def test_numbers_by_hand() -> None:
    losses = {"moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (0.5,), "moe_z_loss_coeff": 0.1}
    bias = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.25}
    capacity = {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"}
    machine = stepped(vary(BASE, **PYRAMID, **losses, **bias, **capacity, micro_batch_size=2), ParallelContext.single())
    found = collect(machine)
    assert found.num_experts == {1: 4, 3: 8}
    assert found.chosen_LE.shape == (2, 8) and found.chosen_LE.sum(1).tolist() == [2 * NUM_TOKENS] * 2
    assert found.chosen_LE[0, 4:].tolist() == [0] * 4
    load = found.expert_load()
    assert [len(shares) for shares in load.values()] == [4, 8] and list(load) == ["layer 1", "layer 3"]
    by_layer, scalars = found.by_layer(), found.scalars()
    for row, (name, shares) in enumerate(load.items()):
        numbers = by_layer[name]
        assert sum(shares) == pytest.approx(1)
        assert numbers["load_max_over_mean"] == pytest.approx(max(shares) * len(shares))
        kept = int(found.kept_LE[row].sum()) / (2 * NUM_TOKENS)
        assert 0 < numbers["dropped_share"] == pytest.approx(1 - kept)
        assert 0 < numbers["router_entropy"] <= math.log(len(shares))
        assert 0 < numbers["mean_gate"] < 1
        assert numbers["bias_range"] == 0.5  # one step up, one step down
        assert 0.9 < numbers["aux_loss"] < len(shares) / 2  # before its coefficient
        assert numbers["z_loss"] > 0 and numbers["dispatch_bytes"] == 0
    assert scalars["load_max_over_mean"] == max(numbers["load_max_over_mean"] for numbers in by_layer.values())
    assert scalars["aux_loss"] == pytest.approx(sum(numbers["aux_loss"] for numbers in by_layer.values()) / 2)
    assert "dispatch_bytes" not in scalars


def test_prediction_modules_are_layers_after_the_last() -> None:
    machine = stepped(vary(BASE, mtp_num_layers=2, moe_layer_freq="[0,1]*2"), ParallelContext.single())
    found = collect(machine)
    assert list(found.expert_load()) == list(found.by_layer()) == ["layer 1", "layer 3", "layer 4", "layer 5"]
    ends = [NUM_TOKENS, NUM_TOKENS, NUM_TOKENS - GLOBAL_BATCH, NUM_TOKENS - 2 * GLOBAL_BATCH]
    assert found.chosen_LE.sum(1).tolist() == [2 * tokens for tokens in ends]  # the last places have no token ahead
    for row, layer in ((2, 4), (3, 5)):
        (statistics,) = machine.gates[layer].statistics.values()
        assert found.chosen_LE[row].tolist() == statistics.routing.chosen_E.tolist()
    dense_end = stepped(vary(BASE, mtp_num_layers=1, moe_layer_freq="[1,0]*2"), ParallelContext.single())
    assert list(collect(dense_end).by_layer()) == ["layer 0", "layer 2"]


def test_dense_models_and_models_without_losses_have_little_to_say() -> None:
    dense = collect(stepped(vary(BASE, num_experts=None), ParallelContext.single()))
    assert dense.scalars() == dense.expert_load() == dense.by_layer() == {}
    plain = vary(BASE, moe_router_load_balancing_type=("none",), moe_aux_loss_coeff=())
    names = {"dropped_share", "router_entropy", "mean_gate", "load_max_over_mean"}
    assert set(collect(stepped(plain, ParallelContext.single())).scalars()) == names


def collected(rank: int, config: Config, sizes: MeshSizes) -> tuple[MoEStatistics, int]:
    ctx = ParallelContext.create(sizes, rank=rank, groups=_groups)
    ctx.traffic.clear()
    machine = stepped(config, ctx)
    on_the_way = ctx.traffic.bytes_on(("ep", "etp"))
    return collect(machine), on_the_way


@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "full"}], ids=["kept", "recomputed"])
def test_bytes_are_those_of_the_forward_pass(recompute: dict[str, Any], ranks: RankPool) -> None:
    """Rows there and back, each copy's weight, and the counts; by the loads, everything that leaves its rank."""
    sizes = MeshSizes(dp=2, ep=2)
    ranks.run(MAX_RANKS, make_groups, sizes)
    fields, _ = layout("dp=2,ep=2,mbs=2")
    results = ranks.run(2, collected, vary(BASE, **fields, **recompute), sizes)
    assert results[0][0].by_layer() == results[1][0].by_layer()
    total = int(results[0][0].dispatch_bytes_L.sum())
    sent = sum(num_bytes for _, num_bytes in results)
    row, weight, count = 8 * BASE.model.hidden_size, 8, 8
    counts = 2 * 2 * 2 * 4 * count  # layers x ranks x micro-batches x experts of the peer
    copies = (total - counts) // (2 * row + weight)
    assert total == copies * (2 * row + weight) + counts and 0 < copies < 2 * 2 * NUM_TOKENS
    again = copies * (row + weight) if recompute else 0  # counts are not exchanged again, nor are results
    assert sent == total + copies * (2 * row + weight) + again


def test_scores_that_are_not_finite_are_counted_by_layer() -> None:
    config, _ = normalise(vary(BASE, num_layers=2, moe_layer_freq="1", micro_batch_size=2), 1)
    machine = build_machine(config, ParallelContext.single())
    with torch.no_grad():
        machine.gates[1].weight[3] = math.inf
    train_step(machine, batches(config, 0, 0, 1, False), 1, 1e-2, accept=lambda loss, norm: False)
    assert routers_that_are_not_finite(machine.gates, 2, machine.ctx) == f"layer 1: {NUM_TOKENS}"
