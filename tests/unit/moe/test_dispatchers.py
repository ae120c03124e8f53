"""Dispatchers on several ranks against one process: rows, weights, sums and gradients, with empty experts and ranks."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_moe.moe.dispatchers import DISPATCHERS, build_dispatcher
from megatron_moe.moe.dispatchers.deduplicated import DeduplicatingDispatcher
from megatron_moe.moe.dispatchers.local import LocalDispatcher
from megatron_moe.moe.permute import Copies, add_rows, copy_rows, expert_major, grouped_order
from megatron_moe.moe.routing import Routing
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from tests.helpers.building import normal
from tests.helpers.ranks import MAX_RANKS
from tests.parity import harness

D, E = 3, 4
MESHES = {
    "ep2": MeshSizes(dp=2, ep=2),
    "ep4": MeshSizes(dp=4, ep=4),
    "ep2 etp2": MeshSizes(tp=2, dp=2, etp=2, ep=2),
    "etp2": MeshSizes(tp=2, etp=2),
}
# Tokens and (token, expert) pairs by rank; the last case leaves whole ranks and experts without anything.
CASES: dict[str, list[tuple[int, list[tuple[int, int]]]]] = {
    "even": [(2, [(0, 3), (0, 1), (1, 0), (1, 2)])] * 4,
    "uneven": [(2, [(0, 0), (0, 3), (1, 3)]), (3, [(2, 1), (0, 3)]), (1, []), (2, [(1, 0), (1, 1), (0, 2)])],
    "one expert": [(2, [(0, 2), (1, 2)]), (0, []), (1, [(0, 2)]), (1, [])],
    "nobody": [(1, []), (2, []), (0, []), (1, [])],
}


def given(case: str, rank: int) -> tuple[Tensor, Routing]:
    num_tokens, pairs = CASES[case][rank]
    token_ids, expert_ids = ([pair[i] for pair in pairs] for i in (0, 1))
    return normal(rank, num_tokens, D).requires_grad_(), Routing(
        torch.tensor(token_ids, dtype=torch.int64),
        torch.tensor(expert_ids, dtype=torch.int64),
        normal(10 + rank, len(pairs)).requires_grad_(),
    )


def experts(rows_RD: Tensor, weights_R: Tensor, expert_ids_R: Tensor) -> Tensor:
    """Something else for every expert and not linear."""
    return torch.sin(rows_RD * (expert_ids_R + 1).unsqueeze(1)) * weights_R.unsqueeze(1)


def run_on_rank(rank: int, sizes: MeshSizes, name: str, case: str) -> list[np.ndarray]:
    ctx = ParallelContext.create(sizes, rank=rank, groups=harness._groups)
    x_TD, routing = given(case, rank)
    dispatcher = build_dispatcher("alltoall", E, ctx, deduplicate=True) if name == "deduplicated" else None
    dispatcher = dispatcher or build_dispatcher(name, E, ctx)
    assert type(dispatcher) is (DISPATCHERS | {"deduplicated": DeduplicatingDispatcher})[name]
    there = dispatcher.dispatch(x_TD, routing)()
    num_local = E // ctx.ep.size
    assert there.counts_L.shape == (num_local,)
    expert_ids_R = torch.arange(num_local).repeat_interleave(there.counts_L.cpu()) + ctx.ep.rank * num_local
    y_RD = experts(there.rows_RD, there.weights_R, expert_ids_R)
    y_RD = y_RD * (2.0 + ctx.etp.rank) / sum(2.0 + r for r in range(ctx.etp.size))  # partial over etp
    y_TD = dispatcher.combine(y_RD, there)()
    (y_TD * normal(20 + rank, *y_TD.shape)).sum().backward()
    assert x_TD.grad is not None and routing.weights_N.grad is not None
    return [t.detach().numpy() for t in (y_TD, x_TD.grad, routing.weights_N.grad)]


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("name", [*DISPATCHERS, "deduplicated"])
@pytest.mark.parametrize("mesh", list(MESHES))
def test_against_one_process(ranks, mesh, name, case):
    sizes = MESHES[mesh]
    ranks.run(MAX_RANKS, harness.make_groups, sizes)
    results = ranks.run(sizes.world, run_on_rank, sizes, name, case)
    for rank, found in enumerate(results):
        x_TD, routing = given(case, rank)
        rows_ND = experts(x_TD[routing.token_ids_N], routing.weights_N, routing.expert_ids_N)
        y_TD = torch.zeros(x_TD.shape, dtype=torch.float64).index_add(0, routing.token_ids_N, rows_ND)
        (y_TD * normal(20 + rank, *y_TD.shape)).sum().backward()
        for ours, plain in zip(found, (y_TD.detach(), x_TD.grad, routing.weights_N.grad), strict=True):
            np.testing.assert_allclose(ours, plain, rtol=1e-12, atol=1e-13)


def test_where_all_experts_are_here_nothing_is_sent():
    assert isinstance(build_dispatcher("alltoall", E, ParallelContext.single()), LocalDispatcher)
    x_TD, routing = given("uneven", 0)
    there = LocalDispatcher(E).dispatch(x_TD, routing)()
    assert there.counts_L.tolist() == [1, 0, 0, 2]
    assert torch.equal(there.rows_RD, x_TD[[0, 0, 1]])


def test_orders():
    order_N, counts_E = grouped_order(torch.tensor([2, 0, 2, 3, 0]), 5)
    assert order_N.tolist() == [1, 4, 0, 2, 3] and counts_E.tolist() == [2, 0, 2, 1, 0]
    copies = Copies.of(torch.tensor([2, 0, 2]), 4)
    assert add_rows(torch.tensor([[1.0], [2.0], [4.0]]), copies).flatten().tolist() == [2.0, 0.0, 5.0, 0.0]
    assert copy_rows(torch.tensor([[1.0], [2.0], [4.0], [8.0]]), copies).flatten().tolist() == [4.0, 1.0, 4.0]
    # Rows lie as a0 a0 a1 | b1 b1 | c0: peers a, b, c and experts 0, 1.
    assert expert_major(torch.tensor([[2, 1], [0, 2], [1, 0]])).tolist() == [0, 1, 5, 2, 3, 4]
