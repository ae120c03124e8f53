"""A bit that flips on one rank is found, and the parameter and the rank are named."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe.config import normalise
from megatron_moe.config.schema import Config
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.training.build import build_machine
from megatron_moe.training.faults import SharedError
from megatron_moe.training.replicas import check_replicas, digest, first_difference
from megatron_moe.training.step import train_step
from tests.helpers.ranks import MAX_RANKS, RankPool
from tests.parity import harness
from tests.parity.harness import BASE, layout, make_groups, vary


@given(st.integers(0, 99), st.integers(0, 31), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_every_bit_counts(place: int, bit: int, dtype: torch.dtype) -> None:
    tensor = torch.linspace(-3, 5, 100).to(dtype)
    before, raw = digest(tensor), tensor.view(torch.uint8)
    raw[place * dtype.itemsize + bit // 8 % dtype.itemsize] ^= 1 << bit % 8
    assert digest(tensor) != before
    raw[place * dtype.itemsize + bit // 8 % dtype.itemsize] ^= 1 << bit % 8
    assert digest(tensor) == before


def test_the_odd_one_out_is_named() -> None:
    key, other = ("layers.0.norm", ((0, 4),), 0), ("layers.1.norm", ((0, 4),), 0)
    same = {key: 1, other: 2}
    assert first_difference([same, same, {other: 2}]) is None
    found = first_difference([same, same, {key: 1, other: 3}, {key: 9, other: 3}])
    assert found == "the replicas of layers.0.norm differ: rank 3 has other bits than rank 0, 1, 2"
    assert "cannot be told" in str(first_difference([{key: 1}, {key: 2}]))


def train_and_flip(rank: int, config: Config, world_size: int, kind: str | None, culprit: int) -> tuple[str, str]:
    """Two good steps; then a bit of a weight of a kind flips on one rank. (Its name there, what the check says.)"""
    torch.set_num_threads(1)
    config, _ = normalise(config, world_size)
    ctx = ParallelContext.create(MeshSizes.of(config.parallel, world_size), rank=rank, groups=harness._groups)
    machine = build_machine(config, ctx)
    for iteration in (1, 2):
        batches = harness.batches(config, 8 * iteration, ctx.dp.rank, ctx.dp.size, False)
        train_step(machine, batches, iteration, 1e-2)
    check_replicas(machine, 2)
    name = ""
    if kind is not None and rank == culprit:
        piece = next(piece for piece in machine.pieces if kind in piece.parameter.spec.name)
        name, sharded = piece.parameter.spec.name, config.parallel.data_parallel_sharding_strategy.endswith("params")
        (piece.weight if sharded else piece.parameter.data).view(-1).view(torch.uint8)[0] ^= 1
    try:
        check_replicas(machine, 3)
    except SharedError as error:
        return name, str(error)
    return name, "the same"


@pytest.mark.parametrize(
    "text, kind, culprit",
    [
        ("dp=4,ep=2", "norm", 3),
        ("dp=4,ep=2,zero=1", "experts", 1),
        ("tp=2,dp=2,ep=2,pp=2", "norm", 5),
        ("cp=2,dp=2,ep=2,zero=3", None, 2),  # every rank has its own range of everything: nothing to compare
    ],
)
def test_a_flipped_bit(text: str, kind: str | None, culprit: int, ranks: RankPool) -> None:
    values, world_size = layout(text)
    config = vary(BASE, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", **values)
    ranks.run(MAX_RANKS, make_groups, MeshSizes.of(config.parallel, world_size))
    unharmed = ranks.run(world_size, train_and_flip, config, world_size, None, culprit)
    assert unharmed == [("", "the same")] * world_size
    if kind is None:
        return
    found = ranks.run(world_size, train_and_flip, config, world_size, kind, culprit)
    name = found[culprit][0]
    assert len({said for _, said in found}) == 1, "all ranks say the same"
    assert f"iteration 3: the replicas of {name} differ: " in found[0][1]
    named = found[0][1].split("differ: rank ")[1].split(". A device")[0]
    assert str(culprit) in named and ("cannot be told" in named or named.startswith(f"{culprit} has other bits"))
