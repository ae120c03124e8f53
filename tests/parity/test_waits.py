"""Every place in a training step that waits for the device is in the table of docs/performance.md, and only those."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron_moe.config import normalise
from megatron_moe.config.schema import Config
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.training.build import build_machine
from megatron_moe.training.faults import FaultGuard
from megatron_moe.training.statistics import collect
from megatron_moe.training.step import train_step
from tests.helpers.ranks import RankPool
from tests.helpers.waits import to_host, waits
from tests.parity.harness import BASE, _groups, batches, layout, make_groups, vary

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
FUSED = {"params_dtype": "float32", "moe_expert_backend": "grouped_mm"}  # as on a GPU, where nobody asks for counts
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "alone": ("dp=1,mbs=4", FUSED),
    "capacity": ("dp=1,mbs=4", {"moe_router": "gshard_top2", "moe_expert_capacity_factor": 1.0}),
    "ep": ("tp=2,ep=2,mbs=4", {**FUSED, "moe_router_enable_expert_bias": True}),
    "deduplicated": ("dp=2,ep=2,mbs=4", {"moe_dispatch_deduplicate": True, "add_bias_linear": True}),
    "gathered": ("dp=2,ep=2,mbs=4,zero=3,dispatcher=allgather", {}),
    "in parts": ("dp=2,ep=2,mbs=4,overlap=2", {}),
    "pipeline": ("cp=2,pp=2,schedule=zb-h1,mbs=4,cp_comm=p2p", {**DOCUMENTS, "mtp_num_layers": 1}),
}


def waits_of_a_step(rank: int, config: Config, sizes: MeshSizes) -> Counter[tuple[str, str]]:
    """Of the second step, as the loop takes it, with the record that follows."""
    ctx = ParallelContext.single()
    if sizes.world > 1:
        ctx = ParallelContext.create(sizes, rank=rank, groups=_groups)
    config, _ = normalise(config, sizes.world)
    machine, guard = build_machine(config, ctx), FaultGuard(config, ctx)
    data = batches(config, 0, ctx.dp.rank, ctx.dp.size, padded=False)
    for tensor in (value for batch in data for value in vars(batch).values()):
        assert isinstance(tensor, Tensor)
        to_host(tensor)
    train_step(machine, data, 1, 1e-2, guard.accept)
    with waits() as found:
        train_step(machine, data, 2, 1e-2, guard.accept)
        collect(machine)
    return found


def waits_of(name: str, ranks: RankPool, **others: Any) -> Counter[tuple[str, str]]:
    """Of a case, over its ranks."""
    text, features = CASES[name]
    values, world_size = layout(text)
    config = vary(BASE, **features, **others, **values)
    sizes = MeshSizes.of(config.parallel, world_size)
    if world_size == 1:
        return waits_of_a_step(0, config, sizes)
    ranks.run(ranks.size, make_groups, sizes)
    return sum(ranks.run(world_size, waits_of_a_step, config, sizes), Counter())


@pytest.fixture(scope="module")
def found(ranks: RankPool) -> dict[str, Counter[tuple[str, str]]]:
    return {name: waits_of(name, ranks) for name in CASES}


def test_the_page_lists_them_all(found: dict[str, Counter[tuple[str, str]]]) -> None:
    listed = set(re.findall(r"^\| `([^`]+\.py [^`]+)` \|", PAGE.read_text(), flags=re.MULTILINE))
    places = {place for counts in found.values() for place, _ in counts}
    assert places - listed == set(), "the host waits where docs/performance.md does not say so"
    assert listed - places == set(), "docs/performance.md names places that do not wait"


def test_one_process_waits_for_loss_and_norm_alone(found: dict[str, Counter[tuple[str, str]]]) -> None:
    assert found["alone"] == {
        ("training/step.py total_loss", "__float__"): 1,
        ("optim/grad_norm.py gradient_norm", "__float__"): 1,
        ("training/statistics.py collect", "cpu"): 1,
    }


@pytest.mark.parametrize("name", ["capacity", "deduplicated", "gathered", "in parts"])
def test_a_recomputation_waits_for_nothing_more(
    name: str, found: dict[str, Counter[tuple[str, str]]], ranks: RankPool
) -> None:
    assert waits_of(name, ranks, recompute_granularity="full") == found[name]
