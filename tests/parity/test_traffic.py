"""Communication is counted: what a step sends is what the formulas of docs/communication.md say, to the byte."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_moe.config import normalise
from megatron_moe.moe.gate import Gate
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.pipeline.schedules import SCHEDULES
from megatron_moe.training import step
from megatron_moe.training.build import Machine
from megatron_moe.training.parity import trace
from tests.helpers.ranks import RankPool
from tests.parity.harness import BASE, layout, vary
from tests.parity.traffic_formulas import Formulas, Sent, rows_without_duplicates

DENSE: dict[str, Any] = {"num_experts": None}
PADDED_VOCABULARY = 68  # 67 tokens, stored as a multiple of 4


@contextmanager
def noting_copies(machine: Machine) -> Iterator[None]:
    """Notes beside the traffic how many copies a rank routed, how many of them to experts elsewhere, and to how many
    other ranks its tokens went."""
    right, right_forward, ctx = step.update_loads, Gate.forward, machine.ctx

    def noting_choices(gate: Gate, *arguments: Any) -> Any:
        choice, loss = right_forward(gate, *arguments)
        for expert_ids in choice.expert_ids_GTK.flatten(0, 1).tolist():
            peers = {expert_id // (gate.num_experts // ctx.ep.size) for expert_id in expert_ids if expert_id >= 0}
            ctx.traffic.add("copies", "distinct", len(peers - {ctx.ep.rank}))
        return choice, loss

    def noting(machine: Machine) -> None:
        for gate in machine.gates.values():
            for statistics in gate.statistics.values():
                kept_PL = statistics.routing.kept_E.view(ctx.ep.size, -1)
                ctx.traffic.add("copies", "routed", int(kept_PL.sum()))
                ctx.traffic.add("copies", "remote", int(kept_PL.sum() - kept_PL[ctx.ep.rank].sum()))
        right(machine)

    with patch.object(step, "update_loads", noting), patch.object(Gate, "forward", noting_choices):
        yield


def measured(text: str, features: dict[str, Any], ranks: RankPool) -> tuple[Sent, Formulas, dict[str, tuple[int, ...]]]:
    """(what all ranks sent in a step, empty formulas for it, logical shapes)."""
    values, world_size = layout(text)
    config, _ = normalise(vary(BASE, **features, **values), world_size)
    found = trace(config, world_size, ranks, prepare=noting_copies)
    total = Sent()
    for rank in found.traffic:
        for key, (calls, sent_bytes) in rank.items():
            total.calls[key] += calls
            total.sent_bytes[key] += sent_bytes
    shapes = {name: weight.shape for name, weight in found.weights.items()}
    shapes["embedding.weight"] = (PADDED_VOCABULARY, shapes["embedding.weight"][1])
    return total, Formulas(config, MeshSizes.of(config.parallel, world_size)), shapes


def copies(total: Sent) -> tuple[int, int]:
    """(remote, all) copies that were routed."""
    return total.sent_bytes["copies", "remote"], total.sent_bytes["copies", "routed"]


def on(sent: Sent, axes: tuple[str, ...] | None) -> tuple[dict[Any, int], dict[Any, int]]:
    """Calls and bytes on some axes, or on all."""
    parts = ({k: v for k, v in part.items() if k[0] != "copies"} for part in (sent.calls, sent.sent_bytes))
    calls, sent_bytes = ({k: v for k, v in part.items() if axes is None or k[0] in axes} for part in parts)
    return calls, sent_bytes


def check(total: Sent, formulas: Formulas, axes: tuple[str, ...] | None = None) -> None:
    """Equal on these axes, call by call and byte by byte."""
    assert on(total, axes) == on(formulas.sent, axes)


@pytest.mark.parametrize("text", ["tp=2", "tp=4", "tp=2,mbs=4,dp=2"])
def test_tensor_parallel(text: str, ranks: RankPool) -> None:
    total, formulas, _ = measured(text, DENSE, ranks)
    formulas.tensor_parallel()
    check(total, formulas, ("tp", "cp", "seq", "pp", "ep", "etp"))


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("tp=2", {}),
        ("tp=4,sp=1", DENSE),
        ("tp=2,dp=2,ep=4", {"moe_shared_expert_intermediate_size": 16}),
        ("tp=2,cp=2,ep=2", {}),
    ],
)
def test_sequence_parallel_leaves_out_the_half_of_experts(text: str, features: dict[str, Any], ranks: RankPool) -> None:
    total, formulas, _ = measured(text, features, ranks)
    formulas.tensor_parallel()
    if features.get("num_experts", 8) is not None:
        formulas.balance_counts()
        formulas.all_to_all(*copies(total))
    if formulas.sizes.cp > 1:
        formulas.context_parallel()
    check(total, formulas, ("tp", "cp", "seq", "ep", "etp"))


@pytest.mark.parametrize("text", ["dp=2,ep=2", "dp=4,ep=4,mbs=2", "dp=4,ep=2,etp=2", "dp=2,etp=2"])
def test_experts_by_all_to_all(text: str, ranks: RankPool) -> None:
    """Exactly the rows that were routed to other ranks: nothing is padded, nothing is sent to oneself."""
    total, formulas, shapes = measured(text, {}, ranks)
    formulas.all_to_all(*copies(total))
    formulas.gradients(shapes)
    formulas.scalars()
    check(total, formulas)


@pytest.mark.parametrize("text", ["dp=2,ep=2", "dp=4,ep=4,mbs=2"])
def test_experts_by_all_to_all_without_duplicates(text: str, ranks: RankPool) -> None:
    """One row for each token and each other rank with experts of it, there and back, forward and backward."""
    total, formulas, shapes = measured(f"{text},deduplicate=1", {"moe_router_topk": 4}, ranks)
    distinct, (remote, _) = total.sent_bytes["copies", "distinct"], copies(total)
    assert distinct < remote, "nothing was there twice"
    formulas.all_to_all_without_duplicates(distinct, remote)
    formulas.gradients(shapes)
    formulas.scalars()
    check(total, formulas)


def test_number_of_rows_without_duplicates() -> None:
    """Tokens that choose K of E experts at random have experts on e (1 - C(E - L, K) / C(E, K)) ranks."""
    num_tokens, num_experts, topk, num_ranks = 4000, 64, 6, 8
    ids_TK = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :topk]
    found = sum(len(set(ranks)) for ranks in (ids_TK // (num_experts // num_ranks)).tolist()) / num_tokens
    expected = rows_without_duplicates(num_experts, topk, num_ranks)
    assert expected == pytest.approx(4.54, abs=0.01), "of 6 copies"
    assert found == pytest.approx(expected, rel=0.01)


def test_experts_by_all_gather(ranks: RankPool) -> None:
    total, formulas, _ = measured("dp=4,ep=4,dispatcher=allgather", {}, ranks)
    formulas.all_gather_dispatch()
    check(total, formulas, ("ep",))


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("text", ["dp=4,ep=2", "dp=2,mbs=2"])
def test_data_parallel(text: str, zero: int, ranks: RankPool) -> None:
    total, formulas, shapes = measured(f"{text},zero={zero}", {}, ranks)
    formulas.all_to_all(*copies(total))
    formulas.gradients(shapes)
    formulas.scalars()
    check(total, formulas)


@pytest.mark.parametrize("name", ["allgather", "p2p"])
@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel(name: str, size: int, ranks: RankPool) -> None:
    total, formulas, shapes = measured(f"cp={size},cp_comm={name}", {}, ranks)
    formulas.context_parallel()
    formulas.balance_counts()
    formulas.gradients(shapes)
    formulas.scalars()
    check(total, formulas)


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipeline(name: str, ranks: RankPool) -> None:
    """p v - 1 boundaries; of the 2 p - 1 of a V, the one at its point is inside a rank."""
    total, formulas, _ = measured(f"pp=2,tp=2,schedule={name}", {}, ranks)
    chunks = SCHEDULES[name].chunks
    formulas.pipeline({1: 1, 2: 2, None: 3}[chunks])
    formulas.scalars()
    check(total, formulas, ("pp",))


def test_a_capacity_gathers_scores_not_tokens(ranks: RankPool) -> None:
    """The excess over the formulas: the scores of a group that spans ranks, E numbers a token against h."""
    features: dict[str, Any] = {"moe_expert_capacity_factor": 1.0}
    total, formulas, _ = measured("cp=2", features, ranks)
    formulas.context_parallel()
    formulas.balance_counts()
    scores = formulas.tokens * formulas.sizes.cp * 8 * 8  # T x E float64
    runs = formulas.pattern.count(True) * formulas.m * formulas.stage
    formulas.ring("cp", "all_gather", runs, scores)
    formulas.ring("cp", "reduce_scatter", runs, scores)
    check(total, formulas, ("cp",))
