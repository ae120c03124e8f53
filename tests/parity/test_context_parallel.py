"""Context parallelism: ring and all-gather against one process, and the ring's own promises."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.model.core_attention import attend
from megatron_moe.model.ring_attention import ring_attention, visible_blocks
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.parallel.tokens import SequenceLayout, StepInfo, TokenBatch
from tests.helpers.ranks import MAX_RANKS, RankPool
from tests.parity.harness import BASE, Trace, _groups, differences, layout, make_groups, trace, vary

PACKED = {"reset_attention_mask": True, "reset_position_ids": True}
SEQ_LENGTH, BATCH, HEADS, GROUPS, KEY_CHANNELS, VALUE_CHANNELS = 32, 2, 6, 3, 4, 5


@pytest.fixture(scope="module")
def reference(ranks: RankPool) -> Trace:
    return trace(vary(BASE, **PACKED), 1, ranks)


@pytest.mark.parametrize(
    "text",
    [
        "cp=2,mbs=4",
        "cp=2,cp_comm=p2p,mbs=4",
        "cp=4,cp_comm=p2p,dp=2,ep=8,mbs=2",
        "tp=4,cp=2,cp_comm=p2p,ep=2,mbs=4",  # 2 key heads on 4 tp ranks
        "cp=2,cp_comm=p2p,pp=2,schedule=zb-v,mbs=2",
    ],
)
def test_packed_documents(text: str, reference: Trace, ranks: RankPool) -> None:
    values, world_size = layout(text)
    assert differences(trace(vary(BASE, **PACKED, **values), world_size, ranks), reference) == []


def test_ring_under_full_recomputation(ranks: RankPool) -> None:
    values, world_size = layout("cp=4,cp_comm=p2p,mbs=8")
    ring = trace(vary(BASE, recompute_granularity="full", **values), world_size, ranks)
    assert differences(ring, trace(BASE, 1, ranks)) == []


def token_batch(ctx: ParallelContext, documents_SB: Tensor | None) -> TokenBatch:
    zeros_SB = torch.zeros(SEQ_LENGTH, BATCH, dtype=torch.int64)
    return TokenBatch(
        ids_SB=zeros_SB,
        labels_SB=zeros_SB,
        loss_mask_SB=zeros_SB.bool(),
        positions_SB=zeros_SB,
        documents_SB=documents_SB,
        padding_SB=None,
        sample_ids_B=zeros_SB[0],
        microbatch=0,
        layout=SequenceLayout(SEQ_LENGTH, ctx, sequence_parallel=False),
        step=StepInfo(0, 1, True, 1.0, 1.0),
    )


def packed_documents() -> Tensor:
    """[S, B]: other borders in each sequence, none of them at a chunk's."""
    starts_SB = torch.zeros(SEQ_LENGTH, BATCH, dtype=torch.int64)
    starts_SB[[3, 17], [0, 0]] = 1
    starts_SB[[9, 10, 25], [1, 1, 1]] = 1
    return starts_SB.cumsum(0)


def run_ring(rank: int, cp: int, packed: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Errors of this rank's outputs and gradients against attention over the whole sequence, and what it sent."""
    ctx = ParallelContext.create(MeshSizes(cp=cp), rank=rank, groups=_groups)
    tokens = token_batch(ctx, packed_documents() if packed else None)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, channels: int) -> Tensor:
        return torch.randn(SEQ_LENGTH, BATCH, heads, channels, generator=generator, dtype=torch.float64)

    whole = draw(HEADS, KEY_CHANNELS), draw(GROUPS, KEY_CHANNELS), draw(GROUPS, VALUE_CHANNELS)
    grad = draw(HEADS, VALUE_CHANNELS)
    q, k, v = leaves = [x.to(dtype).double().clone().requires_grad_() for x in whole]
    expected = attend(q, k, v, tokens.documents_SB)
    expected.backward(grad)
    q, k, v = mine = [tokens.context(x).to(dtype).requires_grad_() for x in whole]
    found = ring_attention(q, k, v, tokens, ctx.cp)
    found.backward(tokens.context(grad).to(dtype))
    pairs = [(found, expected), *((m.grad, x.grad) for m, x in zip(mine, leaves, strict=True))]
    errors = [float((a.double() - tokens.context(b)).detach().abs().max() / b.detach().abs().max()) for a, b in pairs]
    traffic = ctx.traffic
    return {"errors": errors, "calls": dict(traffic.calls), "bytes": dict(traffic.sent_bytes)}


@pytest.mark.parametrize(
    ("cp", "packed", "dtype", "tolerance"),
    [(2, True, torch.float64, 1e-12), (4, False, torch.float64, 1e-12), (4, True, torch.bfloat16, 2e-2)],
)
def test_ring_is_attention(cp: int, packed: bool, dtype: torch.dtype, tolerance: float, ranks: RankPool) -> None:
    """Outputs and gradients; only grouped keys and values are sent, cp - 1 times, their gradients as often."""
    ranks.run(MAX_RANKS, make_groups, MeshSizes(cp=cp))
    size = SEQ_LENGTH // cp * BATCH * GROUPS * (KEY_CHANNELS + VALUE_CHANNELS)
    grad_bytes = 8 if dtype == torch.float64 else 4  # gradients travel in float32 at least
    for result in ranks.run(cp, run_ring, cp, packed, dtype):
        assert max(result["errors"]) < tolerance
        assert result["calls"] == {("cp", "send"): 3 * (cp - 1)}
        assert result["bytes"] == {("cp", "send"): (cp - 1) * size * (2 * dtype.itemsize + grad_bytes)}


@pytest.mark.parametrize("cp", [2, 3, 8])
def test_blocks_are_the_causal_triangle_in_equal_shares(cp: int) -> None:
    tokens = token_batch(ParallelContext.single(), None)
    chunks = [(rank, 2 * cp - 1 - rank) for rank in range(cp)]
    seen = []
    for query_rank, key_rank in itertools.product(range(cp), repeat=2):
        blocks = visible_blocks(tokens, query_rank, key_rank, cp)
        assert len(blocks) == (3 if query_rank == key_rank else 2)
        for block in blocks:
            query, key = chunks[query_rank][block.query_half], chunks[key_rank][block.key_half]
            assert block.causal == (query == key)
            seen.append((query, key))
    assert sorted(seen) == [(query, key) for query in range(2 * cp) for key in range(query + 1)]


def test_blocks_between_documents_are_skipped(ranks: RankPool) -> None:
    ranks.run(MAX_RANKS, make_groups, MeshSizes(cp=2))
    assert ranks.run(2, count_blocks) == [3, 3]


def count_blocks(rank: int) -> int:
    """Chunks of 8: documents of 16 in one sequence, of 8 in the other, so 2 x 2 + 2 diagonal blocks in all."""
    ctx = ParallelContext.create(MeshSizes(cp=2), rank=rank, groups=_groups)
    positions_S = torch.arange(SEQ_LENGTH)
    tokens = token_batch(ctx, torch.stack([positions_S // 16, positions_S // 8], 1))
    return sum(len(visible_blocks(tokens, rank, owner, 2)) for owner in range(2))
