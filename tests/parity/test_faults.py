"""The harness sees what other frameworks did not: each silent fault, planted, turns it red."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_moe.training.build import Machine
from megatron_moe.training.parity import Prepare, Trace, compare, trace
from tests.helpers.ranks import RankPool
from tests.parity import faults
from tests.parity.harness import BASE, layout, vary

JITTER: dict[str, Any] = {"moe_input_jitter_eps": 0.1}
CAPACITY: dict[str, Any] = {"moe_expert_capacity_factor": 1.0}
BIAS: dict[str, Any] = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}

# fault, layout, features, what must be among the first things reported
FAULTS: list[tuple[Prepare, str, dict[str, Any], str]] = [
    (faults.aux_loss_times_tp, "tp=2,ep=2", {}, "gate.weight"),
    (faults.aux_loss_over_cp, "cp=2,ep=2", {}, "gate.weight"),
    (faults.aux_loss_over_dp, "dp=4,ep=2", {}, "gate.weight"),
    (faults.aux_loss_times_accumulation, "dp=2", {}, "gate.weight"),
    (faults.counts_not_reduced, "cp=2", {}, "aux_loss"),
    (faults.expert_gradients_over_dense_group, "dp=4,ep=2", {}, "experts"),
    (faults.partial_gradients_not_over_tp, "tp=2", {}, "gate.weight"),
    (faults.qk_norm_not_over_tp, "tp=2", {"qk_layernorm": True}, "query_norm"),
    (faults.norm_without_experts, "dp=2,ep=2", {}, "gradient norm"),
    (faults.norm_counts_replicas, "dp=2,ep=2", {}, "gradient norm"),
    (faults.mean_of_local_means, "dp=4", {"eod_mask_loss": True}, "loss"),
    (faults.capacity_by_rank, "cp=2", CAPACITY, "loss"),
    (faults.tied_gradient_not_summed, "pp=2", {}, "embedding.weight"),
    (faults.random_numbers_by_rank, "tp=2", JITTER, "loss"),
    (faults.bias_from_local_counts, "dp=2", BIAS, "weight layers.1.moe.gate.bias"),
    (faults.all_to_all_gradient_lost, "dp=2,ep=2", {}, "loss"),
]


@pytest.fixture(scope="module")
def references(ranks: RankPool) -> dict[str, Trace]:
    """One process, for each set of features."""
    return {str(features): trace(vary(BASE, **features), 1, ranks) for _, _, features, _ in FAULTS}


@pytest.mark.parametrize(("fault", "text", "features", "named"), FAULTS, ids=lambda v: getattr(v, "__name__", None))
def test_fault_is_seen(
    fault: Prepare, text: str, features: dict[str, Any], named: str, ranks: RankPool, references: dict[str, Trace]
) -> None:
    values, world_size = layout(text)
    found = trace(vary(BASE, **features, **values), world_size, ranks, prepare=fault)
    words = [str(difference) for difference in compare(found, references[str(features)]).differences]
    assert any(named in word for word in words), words[:5]


@contextmanager
def nothing(machine: Machine) -> Iterator[None]:
    """No fault at all."""
    yield


@pytest.mark.parametrize("text", sorted({text for _, text, _, _ in FAULTS}))
def test_nothing_is_left_behind(text: str, ranks: RankPool, references: dict[str, Trace]) -> None:
    """The same ranks afterwards, without a fault: equal again."""
    values, world_size = layout(text)
    found = trace(vary(BASE, **values), world_size, ranks, prepare=nothing)
    assert compare(found, references["{}"]).differences == []
