"""The core that all kinds of attention share: scores, softmax and weighted values, with the sequence cut over cp.

    q [S / cp, B, H, C]   k [S / cp, B, G, C]   v [S / cp, B, G, C']  -->  [S / cp, B, H, C']

    causal                key <= query
    documents             the same document
    window w              key >= query - w
    sink s of a head      softmax over (s, scores): s takes its share of the sum and gives no value

A query always sees its own key.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_moe.config.schema import ModelConfig
from megatron_moe.kernels.scaled import scaled_product
from megatron_moe.model.recompute import recomputed
from megatron_moe.model.ring_attention import ring_attention
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.linear import RowParallelLinear
from megatron_moe.parallel.products import PLAIN, Product
from megatron_moe.parallel.sharding import Initial, ShardSpec, empty_parameter
from megatron_moe.parallel.tokens import TokenBatch, context_chunks
from megatron_moe.parallel.weight_gradients import WeightGradientQueue


class Cache(Protocol):
    """Something that keeps rows of earlier tokens (``model/cache.py``)."""

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Add rows; returns all."""
        ...


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """What a layer tells its attention.

    Attributes:
        output_std: standard deviation of the output projection's initial weights.
        window: how many tokens to its left a token sees; None for all.
        cp_comm_type: how queries meet the keys of other context-parallel ranks: ``allgather``, or ``p2p`` in a ring.
        recompute_core: keep query, key and value alone of scores, softmax and weighted values.
        recompute_up_projection: keep latents in place of the queries, keys and values made of them.
    """

    sequence_parallel: bool
    output_std: float
    window: int | None = None
    cp_comm_type: str = "allgather"
    recompute_core: bool = False
    recompute_up_projection: bool = False
    queue: WeightGradientQueue | None = None


class CoreAttention(nn.Module):
    """What is behind the projections of queries, keys and values: the core and the output projection.

    Args:
        scale: factor of the scores.
        value_channels: channels of a value head (C').
    """

    def __init__(
        self,
        config: ModelConfig,
        ctx: ParallelContext,
        dtype: torch.dtype,
        settings: AttentionSettings,
        *,
        scale: float,
        value_channels: int,
    ) -> None:
        super().__init__()
        self.ctx, self.scale, self.window = ctx, scale, settings.window
        self.sequence_parallel, self.recompute_core = settings.sequence_parallel, settings.recompute_core
        self.ring = settings.cp_comm_type == "p2p" and ctx.cp.size > 1
        heads = config.num_attention_heads
        self.output = RowParallelLinear(
            heads * value_channels,
            config.hidden_size,
            ctx,
            dtype,
            sequence_parallel=settings.sequence_parallel,
            bias=config.add_bias_linear,
            initial=Initial("normal", settings.output_std),
            queue=settings.queue,
            product=attention_product(config, ctx, dtype),
        )
        self.cache: Cache | None = None
        self.sinks: Tensor | None = None
        if config.softmax_type == "learnable":
            spec = ShardSpec((heads,), shards=(("tp", 0),), initial=Initial("constant", 0.0), decay=False)
            self.sinks = empty_parameter(spec, ctx, dtype)
        elif config.softmax_type == "off-by-one":
            self.sinks = torch.zeros(heads // ctx.tp.size, dtype=dtype, device=ctx.device)

    def remembered(self, *new: Tensor) -> tuple[Tensor, ...]:
        """What keys and values are made of, with that of the tokens before in generation: [S, ...] of each."""
        return new if self.cache is None else self.cache.extend(*new)

    def attend(self, q_SBHC: Tensor, k_SBGC: Tensor, v_SBGC: Tensor, tokens: TokenBatch) -> Tensor:
        """Queries, keys and values of this rank's heads and context -> rows of the residual stream [S', B, D]."""
        if self.recompute_core:
            y_SBHC = recomputed(self.core, q_SBHC, k_SBGC, v_SBGC, tokens)
        else:
            y_SBHC = self.core(q_SBHC, k_SBGC, v_SBGC, tokens)
        return self.output(y_SBHC.flatten(2))

    def core(self, q_SBHC: Tensor, k_SBGC: Tensor, v_SBGC: Tensor, tokens: TokenBatch) -> Tensor:
        """Scores and weighted values: q [S/cp, B, H, C] against the keys and values of the whole sequence."""
        cp, seq_length = self.ctx.cp, tokens.layout.seq_length
        rules = {"scale": self.scale, "window": self.window, "sinks_H": self.sinks}
        if self.ring:
            return ring_attention(q_SBHC, k_SBGC, v_SBGC, tokens, cp, **rules)
        if cp.size == 1:
            return attend(q_SBHC, k_SBGC, v_SBGC, tokens.documents_SB, **rules)
        kv = tokens.layout.gather_context(torch.cat([k_SBGC, v_SBGC], -1))
        k_SBGC, v_SBGC = kv.split([k_SBGC.shape[-1], v_SBGC.shape[-1]], -1)
        parts = []
        for q_cBHC, chunk in zip(q_SBHC.chunk(2), context_chunks(cp.rank, cp.size), strict=True):
            end = (chunk + 1) * seq_length // (2 * cp.size)  # later keys are seen by none of these queries
            start = 0 if self.window is None else max(0, end - len(q_cBHC) - self.window)  # nor are earlier ones
            documents_SB = None if tokens.documents_SB is None else tokens.documents_SB[start:end]
            parts.append(attend(q_cBHC, k_SBGC[start:end], v_SBGC[start:end], documents_SB, **rules))
        return torch.cat(parts)


def attention_product(config: ModelConfig, ctx: ParallelContext, dtype: torch.dtype) -> Product:
    """How attention's projections multiply.

    Their inputs are kept as they are: query, key and value share one, and the core keeps its result itself.
    """
    scaled = scaled_product(config, ctx.device, dtype)
    return PLAIN if scaled is None else scaled.keeping_given_rows()


def attend(
    q_QBHC: Tensor,
    k_SBGC: Tensor,
    v_SBGC: Tensor,
    documents_SB: Tensor | None,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last Q positions over S >= Q keys: [Q, B, H, C'].

    Args:
        documents_SB: documents of the keys, where attention stays inside one; None where it may cross.
        scale: factor of the scores. Default: C^-1/2.
        window: how many keys before its own a query sees. Default: all.
        sinks_H: one more exponent in the sum of each head's softmax. Default: none.
    """
    num_queries, num_keys = q_QBHC.shape[0], k_SBGC.shape[0]
    factor = q_QBHC.shape[-1] ** -0.5 if scale is None else scale
    mask = None
    if window is not None and window >= num_keys - 1:
        window = None
    if documents_SB is not None or window is not None:
        mask = _visible(num_queries, num_keys, documents_SB, window, q_QBHC.device)
    if sinks_H is not None:
        q_QBHC, k_SBGC, v_SBGC = _with_sink(q_QBHC, k_SBGC, v_SBGC, sinks_H / factor)
        mask = None if mask is None else F.pad(mask, (1, 0), value=True)
        num_keys += 1
    single = num_queries == 1  # sees all keys
    if mask is None and not single and num_queries < num_keys:
        from torch.nn.attention.bias import causal_lower_right  # brings torch's compiler along, 150 MiB

        mask = causal_lower_right(num_queries, num_keys)
    if single:  # heads that share a key as queries of one head: no kernel then copies keys and values for each
        q_QBHC = q_QBHC.unflatten(2, (k_SBGC.shape[2], -1)).transpose(0, 3).squeeze(3)
    y_BHQC = F.scaled_dot_product_attention(
        q_QBHC.permute(1, 2, 0, 3),
        k_SBGC.permute(1, 2, 0, 3),
        v_SBGC.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=mask is None and not single,
        scale=factor,
        enable_gqa=q_QBHC.shape[2] != k_SBGC.shape[2],
    )
    return y_BHQC.flatten(1, 2).unsqueeze(0) if single else y_BHQC.permute(2, 0, 1, 3)


def _visible(
    num_queries: int, num_keys: int, documents_SB: Tensor | None, window: int | None, device: torch.device
) -> Tensor:
    """Bool [B or 1, 1, Q, S]: which keys the last Q positions see."""
    first = num_keys - num_queries
    if documents_SB is None:
        mask_BQS = torch.ones(1, num_queries, num_keys, dtype=torch.bool, device=device)
    else:
        mask_BQS = documents_SB[first:].T.unsqueeze(2) == documents_SB.T.unsqueeze(1)
    mask_BQS = mask_BQS.tril(first)
    if window is not None:
        mask_BQS = mask_BQS.triu(first - window)
    return mask_BQS.unsqueeze(1)


def _with_sink(q_QBHC: Tensor, k_SBGC: Tensor, v_SBGC: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A key before all others whose score is the sink, in a channel of its own, and whose value is zero.

    So every kernel of softmax attention can do it. First, because every query sees the first key.
    """
    num_queries, batch, heads, _ = q_QBHC.shape
    sinks_QBH1 = sinks_H.to(q_QBHC.dtype).view(1, 1, heads, 1).expand(num_queries, batch, heads, 1)
    key_1BGC = F.pad(torch.zeros_like(k_SBGC[:1]), (0, 1), value=1.0)
    k_SBGC = torch.cat([key_1BGC, F.pad(k_SBGC, (0, 1))])
    return torch.cat([q_QBHC, sinks_QBH1], -1), k_SBGC, F.pad(v_SBGC, (0, 0, 0, 0, 0, 0, 1, 0))
