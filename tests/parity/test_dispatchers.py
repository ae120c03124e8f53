"""Dispatchers: each against one process, and alone with the most uneven loads."""

from typing import Any

import pytest
import torch

from megatron_moe.moe.dispatchers import DISPATCHERS
from megatron_moe.moe.routing import Routing
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from tests.helpers.ranks import MAX_RANKS, RankPool
from tests.parity.harness import BASE, _groups, differences, layout, make_groups, trace, vary

NUM_EXPERTS, HIDDEN, PER_TOKEN = 4, 3, 2


@pytest.mark.parametrize(
    ("text", "values", "padded"),
    [
        ("dp=4,ep=4,mbs=2,dispatcher=allgather", {}, False),
        # Drops and padding: copies differ from rank to rank.
        (
            "tp=2,cp=2,dp=2,ep=4,etp=2,mbs=4,dispatcher=allgather",
            {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "probs"},
            True,
        ),
        ("pp=2,dp=2,ep=2,mbs=2,schedule=zb-v,dispatcher=allgather", {"recompute_granularity": "full"}, False),
        ("dp=4,ep=4,mbs=2,deduplicate=1", {"moe_router_topk": 3}, False),
        (
            "tp=2,cp=2,dp=2,ep=4,etp=2,mbs=4,deduplicate=1",
            {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "probs"},
            True,
        ),
        ("pp=2,dp=2,ep=2,mbs=2,schedule=zb-v,deduplicate=1", {"recompute_granularity": "full"}, False),
        ("dp=4,ep=4,overlap=3,zero=2", {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 16}, True),
        ("pp=2,dp=2,ep=2,schedule=zb-h1,overlap=2,dispatcher=allgather", {"moe_expert_capacity_factor": 0.8}, False),
    ],
)
def test_against_one_process(text: str, values: dict[str, Any], padded: bool, ranks: RankPool) -> None:
    fields, world_size = layout(text)
    base = vary(BASE, **values)
    expected = trace(base, 1, ranks, padded=padded)
    assert differences(trace(vary(base, **fields), world_size, ranks, padded=padded), expected) == []


def dispatch_uneven(rank: int, name: str, sizes: MeshSizes, num_tokens: list[int], skewed: bool) -> list[float]:
    """Expert e multiplies by e + 1: errors of the outputs and of the gradients of tokens and weights."""
    ctx = ParallelContext.create(sizes, rank=rank, groups=_groups)
    generator = torch.Generator().manual_seed(rank)
    count = num_tokens[rank]
    x_TD = torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    ids_TK = torch.rand(count, NUM_EXPERTS, generator=generator).argsort(1)[:, :PER_TOKEN]
    weights_TK = torch.rand(count, PER_TOKEN, generator=generator, dtype=torch.float64)
    keep_TK = torch.rand(count, PER_TOKEN, generator=generator) < 0.7
    if skewed:  # everything to the last expert
        ids_TK, keep_TK = torch.full_like(ids_TK, NUM_EXPERTS - 1), torch.tensor([True, False]).expand(count, -1)
    token_ids_N, slots_N = keep_TK.nonzero().unbind(1)
    ids_N, weights_N = ids_TK[token_ids_N, slots_N], weights_TK[token_ids_N, slots_N].requires_grad_()

    def gradients(y_TD: torch.Tensor) -> list[torch.Tensor]:
        grads = torch.autograd.grad(y_TD.square().sum(), [x_TD, weights_N])
        return [y_TD, *grads]

    dispatcher = DISPATCHERS[name](NUM_EXPERTS, ctx)
    dispatched = dispatcher.dispatch(x_TD, Routing(token_ids_N, ids_N, weights_N))()
    num_local = NUM_EXPERTS // ctx.ep.size
    assert int(dispatched.counts_L.sum()) == dispatched.rows_RD.shape[0]
    factor_L = torch.arange(num_local, dtype=torch.float64) + ctx.ep.rank * num_local + 1
    factor_R = factor_L.repeat_interleave(dispatched.counts_L) / ctx.etp.size * dispatched.weights_R
    found = gradients(dispatcher.combine(dispatched.rows_RD * factor_R.unsqueeze(1), dispatched)())
    scaled_ND = x_TD[token_ids_N] * (weights_N * (ids_N + 1)).unsqueeze(1)
    expected = gradients(torch.zeros_like(x_TD).index_add(0, token_ids_N, scaled_ND))
    return [float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("name", sorted(DISPATCHERS))
@pytest.mark.parametrize(
    ("sizes", "num_tokens", "skewed"),
    [
        (MeshSizes(dp=4, ep=4), [3, 0, 5, 1], False),
        (MeshSizes(dp=4, ep=2, etp=2), [0, 4, 2, 0], True),
        (MeshSizes(dp=2, ep=2), [0, 0], False),
    ],
)
def test_uneven(name: str, sizes: MeshSizes, num_tokens: list[int], skewed: bool, ranks: RankPool) -> None:
    """Ranks without tokens, ranks without rows, all copies to one expert, no token at all."""
    ranks.run(MAX_RANKS, make_groups, sizes)
    for errors in ranks.run(sizes.world, dispatch_uneven, name, sizes, num_tokens, skewed):
        assert max(errors) < 1e-12
