"""Short ways to build what most tests of the model need: a place on a mesh, a micro-batch, a parameter."""

from typing import Any

import torch
from torch import Tensor

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes, all_groups
from megatron_moe.parallel.sharding import ShardedParameter, ShardSpec
from megatron_moe.parallel.tokens import SequenceLayout, StepInfo, TokenBatch


def fake_context(sizes: MeshSizes, rank: int) -> ParallelContext:
    """A rank's place on a mesh without any process group: good for everything but communication."""
    groups: dict[tuple[int, ...], Any] = dict.fromkeys(all_groups(sizes))
    return ParallelContext.create(sizes, rank=rank, groups=groups)


def token_batch(
    ids_SB: Tensor,
    ctx: ParallelContext | None = None,
    *,
    labels_SB: Tensor | None = None,
    padding_SB: Tensor | None = None,
    documents_SB: Tensor | None = None,
    sequence_parallel: bool = False,
    training: bool = True,
    iteration: int = 1,
    seed: int = 7,
) -> TokenBatch:
    """A micro-batch that is the whole global batch; every token that is no padding has a loss."""
    seq_length, batch = ids_SB.shape
    ctx = ParallelContext.single() if ctx is None else ctx
    mask_SB = torch.ones_like(ids_SB, dtype=torch.bool) if padding_SB is None else ~padding_SB
    num_tokens = float(mask_SB.sum())
    return TokenBatch(
        ids_SB=ids_SB,
        labels_SB=ids_SB if labels_SB is None else labels_SB,
        loss_mask_SB=mask_SB,
        positions_SB=torch.arange(seq_length).unsqueeze(1).expand(-1, batch),
        documents_SB=documents_SB,
        padding_SB=padding_SB,
        sample_ids_B=torch.arange(batch),
        microbatch=0,
        layout=SequenceLayout(seq_length, ctx, sequence_parallel),
        step=StepInfo(seed, iteration, training, num_tokens, num_tokens),
    )


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def whole_parameter(values: Tensor, **spec: Any) -> ShardedParameter:
    """A parameter that no axis cuts."""
    return ShardedParameter(values, ShardSpec(tuple(values.shape), **spec))
