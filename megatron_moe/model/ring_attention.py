"""Causal attention whose keys and values are passed round the context-parallel ring (arXiv:2310.01889).

    rank i has chunks i and 2 cp - 1 - i of 2 cp (parallel/tokens.py), as queries and as keys. A query chunk sees a key
    chunk whole if that is earlier, causally if it is the same, else not at all:

          keys of rank:   0 [0 7]   1 [1 6]   2 [2 5]   3 [3 4]      cp = 4, queries of rank 1:
          query chunk 1     #  .      \\  .      .  .      .  .       # whole   \\ causal   . nothing
          query chunk 6     #  .      #  \\      #  #      #  #       3 blocks of its own, 2 of any other rank

Every rank has as many blocks to do at every step; blocks that see nothing, for order or for documents, are skipped.
A block leaves a softmax of its own keys only; two of them merge by the logarithms of their sums:

    lse = log(e^lse_a + e^lse_b)        out = out_a e^(lse_a - lse) + out_b e^(lse_b - lse)

The backward pass needs no scores of other blocks: with the final lse and delta = sum(grad * out), block by block,

    p = e^(scores - lse)    dv += p^T grad    ds = p (grad v^T - delta)    dq += ds k    dk += ds^T q

Keys and values go round once more; their gradients follow one step behind, each rank adding its share, and arrive at
their owner after cp - 1 steps. What is sent travels while the blocks at hand are computed.

A sink (``core_attention.py``) is a block of one key without a value, merged first: out = 0, lse = sink. Its own
gradient is the sum of -e^(sink - lse) delta.

Letters here: Z chunks, c positions of a chunk, N = R c rows: the R query heads of a group times the positions.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megatron_moe.parallel.collectives import RingShift, round_the_ring
from megatron_moe.parallel.context import Axis
from megatron_moe.parallel.tokens import TokenBatch, context_chunks


class Block(NamedTuple):
    """A chunk of queries against a chunk of keys, as halves (0 or 1) of what their ranks hold.

    Attributes:
        causal: the same chunk: causal inside; else an earlier one.
        documents: [B, c] of the queries and of the keys, where attention heeds them.
        reach: query i sees keys i - reach and later, as positions inside their chunks; None where it sees all.
    """

    query_half: int
    key_half: int
    causal: bool
    documents: tuple[Tensor, Tensor] | None
    reach: int | None


def ring_attention(
    q_SBHC: Tensor,
    k_SBGC: Tensor,
    v_SBGC: Tensor,
    tokens: TokenBatch,
    axis: Axis,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries over the whole sequence.

    Args:
        q_SBHC: [S / cp, B, H, C]; heads h with equal h // (H / G) share a key head.
        k_SBGC, v_SBGC: [S / cp, B, G, C] and [S / cp, B, G, C']; only these G heads are sent.
        axis: the context-parallel axis.
        scale, window, sinks_H: as in :func:`~megatron_moe.model.core_attention.attend`.

    Returns:
        [S / cp, B, H, C'].
    """
    blocks = [visible_blocks(tokens, axis.rank, owner, axis.size, window) for owner in range(axis.size)]
    scale = q_SBHC.shape[-1] ** -0.5 if scale is None else scale
    return _RingAttention.apply(q_SBHC, k_SBGC, v_SBGC, sinks_H, scale, blocks, axis)  # type: ignore[return-value]


def visible_blocks(
    tokens: TokenBatch, query_rank: int, key_rank: int, cp: int, window: int | None = None
) -> list[Block]:
    """What a rank's queries see of a rank's keys. Asks the host alone (``TokenBatch.document_bounds``)."""
    bounds, blocks = tokens.document_bounds, []
    size = tokens.layout.seq_length // (2 * cp)
    for query_half, query_chunk in enumerate(context_chunks(query_rank, cp)):
        for key_half, key_chunk in enumerate(context_chunks(key_rank, cp)):
            if key_chunk > query_chunk:
                continue
            reach = None
            if window is not None:
                reach = window - (query_chunk - key_chunk) * size
                if reach <= -size:
                    continue  # even the first query is too far from the last key
                reach = None if reach >= size - 1 else reach
            documents = None
            if bounds is not None and tokens.documents_SB is not None:
                pairs = zip(bounds[query_chunk], bounds[key_chunk], strict=True)
                if not any(q_first <= k_last and k_first <= q_last for (q_first, q_last), (k_first, k_last) in pairs):
                    continue
                chunks = tokens.documents_SB.T.chunk(2 * cp, 1)
                documents = chunks[query_chunk], chunks[key_chunk]
            blocks.append(Block(query_half, key_half, query_chunk == key_chunk, documents, reach))
    return blocks


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q_SBHC: Tensor,
        k_SBGC: Tensor,
        v_SBGC: Tensor,
        sinks_H: Tensor | None,
        scale: float,
        blocks: list[list[Block]],
        axis: Axis,
    ) -> Tensor:
        num_groups, channels = k_SBGC.shape[2:]
        q_ZBGNC = _by_chunk(q_SBHC, num_groups)
        kv_ZBGcC = _by_chunk(torch.cat([k_SBGC, v_SBGC], -1), num_groups)
        out_ZBGNC = _wide(q_ZBGNC).new_zeros(*q_ZBGNC.shape[:-1], v_SBGC.shape[-1])
        lse_ZBGN = out_ZBGNC.new_full(out_ZBGNC.shape[:-1], -torch.inf)
        if sinks_H is not None:
            lse_ZBGN.copy_(_per_row(sinks_H, lse_ZBGN))
        for owner, kv in round_the_ring(kv_ZBGcC, axis):
            for block in blocks[owner]:
                half, k_BGcC, v_BGcC = block.query_half, *_keys_values(kv[block.key_half], channels)
                scores_BGNc = _scores(_wide(q_ZBGNC[half]) * scale, k_BGcC, block)
                _merge(out_ZBGNC[half], lse_ZBGN[half], scores_BGNc, v_BGcC)
        ctx.save_for_backward(q_ZBGNC, kv_ZBGcC, out_ZBGNC, lse_ZBGN, sinks_H)  # type: ignore[arg-type]
        ctx.scale, ctx.blocks, ctx.axis, ctx.channels = scale, blocks, axis, channels  # type: ignore[attr-defined]
        return _by_position(out_ZBGNC, q_SBHC.shape[2] // num_groups).to(q_SBHC.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_SBHC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_ZBGNC, kv_ZBGcC, out_ZBGNC, lse_ZBGN, sinks_H = ctx.saved_tensors  # type: ignore[attr-defined]
        scale, blocks, axis, channels = ctx.scale, ctx.blocks, ctx.axis, ctx.channels  # type: ignore[attr-defined]
        num_groups = q_ZBGNC.shape[2]
        grad_ZBGNC = _wide(_by_chunk(grad_SBHC, num_groups))
        delta_ZBGN = (grad_ZBGNC * out_ZBGNC).sum(-1)
        dq_ZBGNC = torch.zeros_like(_wide(q_ZBGNC))
        own, travelling = torch.zeros_like(_wide(kv_ZBGcC)), None
        for owner, kv in round_the_ring(kv_ZBGcC, axis):
            dkv = own if owner == axis.rank else torch.zeros_like(own)
            for block in blocks[owner]:
                half, k_BGcC, v_BGcC = block.query_half, *_keys_values(kv[block.key_half], channels)
                rows = q_ZBGNC[half], grad_ZBGNC[half], lse_ZBGN[half], delta_ZBGN[half]
                dq, dk, dv = _block_gradients(*rows, k_BGcC, v_BGcC, block, scale)
                dq_ZBGNC[half] += dq
                dkv[block.key_half, ..., :channels] += dk
                dkv[block.key_half, ..., channels:] += dv
            if owner != axis.rank:
                # What the previous rank and those before it added for the same keys comes one step behind.
                dkv = dkv if travelling is None else dkv + travelling.wait()
                travelling = RingShift(dkv, axis)
        own = own if travelling is None else own + travelling.wait()
        dk, dv = _by_position(own, 1).to(kv_ZBGcC.dtype).split([channels, own.shape[-1] - channels], -1)
        dq_SBHC = _by_position(dq_ZBGNC, grad_SBHC.shape[2] // num_groups).to(q_ZBGNC.dtype)
        dsinks_H = None
        if sinks_H is not None:
            share_ZBGN = (_per_row(sinks_H, lse_ZBGN) - lse_ZBGN).exp_().mul_(delta_ZBGN)
            dsinks_H = -share_ZBGN.unflatten(3, (sinks_H.numel() // num_groups, -1)).sum((0, 1, 4)).flatten()
            dsinks_H = dsinks_H.to(sinks_H.dtype)
        return dq_SBHC, dk, dv, dsinks_H, None, None, None


def _per_row(sinks_H: Tensor, rows_ZBGN: Tensor) -> Tensor:
    """The sink of each row's head, in the shape [1, 1, G, N]."""
    num_groups, num_rows = rows_ZBGN.shape[2:]
    sinks_GR = sinks_H.to(rows_ZBGN.dtype).view(num_groups, -1)
    return sinks_GR.repeat_interleave(num_rows // sinks_GR.shape[1], 1)[None, None]


def _scores(q_BGNC: Tensor, k_BGcC: Tensor, block: Block) -> Tensor:
    """[B, G, N, c] scores of scaled queries, -inf where a query may not look."""
    scores_BGNc = q_BGNC @ k_BGcC.transpose(-1, -2)
    num_keys = k_BGcC.shape[-2]
    hidden_Bcc = None
    if block.causal or block.reach is not None:
        ones_cc = torch.ones(num_keys, num_keys, dtype=torch.bool, device=scores_BGNc.device)
        later_cc = ones_cc.triu(1) if block.causal else ~ones_cc
        hidden_Bcc = (later_cc if block.reach is None else later_cc | ones_cc.tril(-block.reach - 1)).unsqueeze(0)
    if block.documents is not None:
        queries_Bc, keys_Bc = block.documents
        other_Bcc = queries_Bc.unsqueeze(2) != keys_Bc.unsqueeze(1)
        hidden_Bcc = other_Bcc if hidden_Bcc is None else other_Bcc | hidden_Bcc
    if hidden_Bcc is None:
        return scores_BGNc
    by_head = scores_BGNc.unflatten(2, (-1, num_keys))
    return by_head.masked_fill_(hidden_Bcc[:, None, None], -torch.inf).flatten(2, 3)


def _merge(out_BGNC: Tensor, lse_BGN: Tensor, scores_BGNc: Tensor, v_BGcC: Tensor) -> None:
    """Add the keys of a block to a softmax so far, in place."""
    merged_BGN = torch.logaddexp(lse_BGN, scores_BGNc.logsumexp(-1))
    # -inf - -inf: a row that has seen no key yet stays at nothing.
    base_BGN1 = merged_BGN.masked_fill(merged_BGN == -torch.inf, 0.0).unsqueeze(-1)
    out_BGNC.mul_((lse_BGN.unsqueeze(-1) - base_BGN1).exp_()).add_((scores_BGNc - base_BGN1).exp_() @ v_BGcC)
    lse_BGN.copy_(merged_BGN)


def _block_gradients(
    q_BGNC: Tensor,
    grad_BGNC: Tensor,
    lse_BGN: Tensor,
    delta_BGN: Tensor,
    k_BGcC: Tensor,
    v_BGcC: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's part of the gradients of q, k and v; the sum over the query heads of a group is in the product."""
    q_BGNC = _wide(q_BGNC) * scale
    p_BGNc = (_scores(q_BGNC, k_BGcC, block) - lse_BGN.unsqueeze(-1)).exp_()
    dv_BGcC = p_BGNc.transpose(-1, -2) @ grad_BGNC
    ds_BGNc = p_BGNc.mul_(grad_BGNC @ v_BGcC.transpose(-1, -2) - delta_BGN.unsqueeze(-1))
    return (ds_BGNc @ k_BGcC) * scale, ds_BGNc.transpose(-1, -2) @ q_BGNC, dv_BGcC


def _wide(x: Tensor) -> Tensor:
    """In float32 at least: softmax and sums over the ring are not rounded to the activations' type."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _keys_values(kv: Tensor, channels: int) -> Any:
    return _wide(kv).tensor_split([channels], -1)


def _by_chunk(x_SBHC: Tensor, num_groups: int) -> Tensor:
    """[2 c, B, H, C] -> [2, B, G, (H / G) c, C]."""
    x_ZcBGRC = x_SBHC.unflatten(0, (2, -1)).unflatten(3, (num_groups, -1))
    return x_ZcBGRC.permute(0, 2, 3, 4, 1, 5).flatten(3, 4)


def _by_position(x_ZBGNC: Tensor, heads_per_group: int) -> Tensor:
    """[2, B, G, (H / G) c, C] -> [2 c, B, H, C]."""
    return x_ZBGNC.unflatten(3, (heads_per_group, -1)).permute(0, 4, 1, 2, 3, 5).flatten(3, 4).flatten(0, 1)
