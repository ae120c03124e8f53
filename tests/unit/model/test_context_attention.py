"""Attention over a cut sequence, gathered or round the ring, against plain attention over the whole."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_moe.model.core_attention import attend
from megatron_moe.model.ring_attention import ring_attention
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.parallel.tokens import context_chunks
from tests.helpers.building import fake_context, normal, token_batch
from tests.helpers.ranks import MAX_RANKS
from tests.parity import harness

S, B, H, G, C = 16, 2, 4, 2, 3


def documents(kind: str) -> Tensor | None:
    if kind == "none":
        return None
    ends = torch.tensor([[5, 5], [6, 14], [13, 15]])  # one of a single token, others across chunks
    return (torch.arange(S)[:, None, None] >= ends).sum(1)


def inputs() -> list[Tensor]:
    return [normal(1, S, B, H, C), normal(2, S, B, G, C), normal(3, S, B, G, C), normal(4, S, B, H, C)]


def plain(q: Tensor, k: Tensor, v: Tensor, documents_SB: Tensor | None) -> Tensor:
    """Softmax attention spelled out."""
    k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
    scores = torch.einsum("qbhc,kbhc->bhqk", q, k) / C**0.5
    visible = torch.ones(S, S, dtype=torch.bool).tril().expand(B, 1, S, S)
    if documents_SB is not None:
        visible = visible & (documents_SB.T.unsqueeze(2) == documents_SB.T.unsqueeze(1)).unsqueeze(1)
    return torch.einsum("bhqk,kbhc->qbhc", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def expected(kind: str) -> list[np.ndarray]:
    q, k, v, weight = inputs()
    for x in (q, k, v):
        x.requires_grad_()
    y = plain(q, k, v, documents(kind))
    (y * weight).sum().backward()
    return [t.detach().numpy() for t in (y, q.grad, k.grad, v.grad)]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["none", "documents"])
def test_whole_sequence(kind):
    q, k, v, _ = inputs()
    torch.testing.assert_close(attend(q, k, v, documents(kind)), plain(q, k, v, documents(kind)))
    last = attend(q[12:], k, v, documents(kind))
    torch.testing.assert_close(last, plain(q, k, v, documents(kind))[12:])


def run_on_rank(rank: int, cp: int, kind: str, ring: bool) -> list[np.ndarray]:
    ctx = ParallelContext.create(MeshSizes(cp=cp), rank=rank, groups=harness._groups)
    documents_SB = documents(kind)
    tokens = token_batch(torch.zeros(S, B, dtype=torch.int64), ctx, documents_SB=documents_SB)
    mine = tokens.layout.context_S
    q, k, v, weight = (x[mine] for x in inputs())
    for x in (q, k, v):
        x.requires_grad_()
    if ring:
        y = ring_attention(q, k, v, tokens, ctx.cp)
    else:
        whole_k, whole_v = tokens.layout.gather_context(k), tokens.layout.gather_context(v)
        parts = []
        for q_c, chunk in zip(q.chunk(2), context_chunks(rank, cp), strict=True):
            end = (chunk + 1) * S // (2 * cp)
            seen = None if documents_SB is None else documents_SB[:end]
            parts.append(attend(q_c, whole_k[:end], whole_v[:end], seen))
        y = torch.cat(parts)
    (y * weight).sum().backward()
    return [t.detach().numpy() for t in (y, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize("ring", [False, True], ids=["gathered", "ring"])
@pytest.mark.parametrize("kind", ["none", "documents"])
@pytest.mark.parametrize("cp", [2, 4])
def test_cut_sequence(ranks, cp, kind, ring):
    ranks.run(MAX_RANKS, harness.make_groups, MeshSizes(cp=cp))
    results = ranks.run(cp, run_on_rank, cp, kind, ring)
    order = torch.cat(
        [
            token_batch(torch.zeros(S, 1, dtype=torch.int64), fake_context(MeshSizes(cp=cp), r)).layout.context_S
            for r in range(cp)
        ]
    )
    for index, whole in enumerate(expected(kind)):
        found = np.concatenate([result[index] for result in results])
        np.testing.assert_allclose(found, whole[order.numpy()], rtol=1e-10, atol=1e-12)
