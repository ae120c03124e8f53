"""Windows and sinks of attention against the formula written out, in one process and in the ring."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_moe.model.core_attention import attend
from megatron_moe.model.ring_attention import ring_attention, visible_blocks
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from tests.helpers.building import fake_context, normal, token_batch

S, B, H, G, C, VALUE = 12, 2, 4, 2, 6, 5
DOCUMENTS_SB = torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3]).T
CASES: list[dict[str, Any]] = [
    {},
    {"window": 3},
    {"window": 0},
    {"sinks": True},
    {"sinks": True, "scale": 0.3, "documents": True},
    {"sinks": True, "window": 4, "documents": True},
    {"window": 100, "scale": 2.0},
]


def written_out(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, **rules: Any) -> Tensor:
    num_queries, num_keys = len(q), len(k)
    k, v = (x.repeat_interleave(H // G, 2) for x in (k, v))
    scale = rules.get("scale") or C**-0.5
    scores = torch.einsum("qbhc,sbhc->bhqs", q, k) * scale
    places = torch.arange(num_keys)
    distance = places[num_keys - num_queries :, None] - places
    visible = (distance >= 0).expand(B, 1, -1, -1)
    if rules.get("window") is not None:
        visible = visible & (distance <= rules["window"])
    if documents is not None:
        visible = visible & (documents[num_keys - num_queries :].T[:, None, :, None] == documents.T[:, None, None])
    scores = scores.masked_fill(~visible, -torch.inf)
    if rules.get("sinks_H") is not None:
        column = rules["sinks_H"].view(1, H, 1, 1).expand(B, H, num_queries, 1)
        shares = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    return torch.einsum("bhqs,sbho->qbho", shares, v)


def leaves(num_queries: int, case: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any], Tensor | None]:
    inputs = [normal(1, num_queries, B, H, C), normal(2, S, B, G, C), normal(3, S, B, G, VALUE)]
    rules = {key: case[key] for key in ("window", "scale") if key in case}
    if "sinks" in case:
        inputs.append(normal(4, H))
    inputs = [x.requires_grad_() for x in inputs]
    if "sinks" in case:
        rules["sinks_H"] = inputs[3]
    return inputs, rules, DOCUMENTS_SB if "documents" in case else None


@pytest.mark.parametrize("num_queries", [S, 5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_process(case: dict[str, Any], num_queries: int) -> None:
    inputs, rules, documents_SB = leaves(num_queries, case)
    found, expected = (f(*inputs[:3], documents_SB, **rules) for f in (attend, written_out))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    grad = normal(5, *found.shape)
    pairs = zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ring_of_one(case: dict[str, Any]) -> None:
    """A ring of one rank has two chunks, so it does all kinds of blocks."""
    inputs, rules, documents_SB = leaves(S, case)
    tokens = token_batch(torch.zeros(S, B, dtype=torch.int64), documents_SB=documents_SB)
    found = ring_attention(*inputs[:3], tokens, ParallelContext.single().cp, **rules)
    expected = written_out(*inputs[:3], documents_SB, **rules)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    grad = normal(5, *found.shape)
    pairs = zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("window", "pairs"), [(None, 36), (0, 8), (1, 15), (4, 15), (5, 21), (28, 36)])
def test_blocks_beyond_the_window_are_skipped(window: int | None, pairs: int) -> None:
    """8 chunks of 4: a window of w reaches ceil(w / 4) chunks back."""
    ctx = fake_context(MeshSizes(cp=4), 0)
    tokens = token_batch(torch.zeros(32, 1, dtype=torch.int64), ctx)
    found = [visible_blocks(tokens, query, key, 4, window) for query in range(4) for key in range(4)]
    assert sum(map(len, found)) == pairs
