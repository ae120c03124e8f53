"""The tokens of one micro-batch, and which of them each rank of the sequence axes holds.

Every rank of a pipeline column knows the whole sequences (they are small integers); activations are cut:

    logical positions   0 1 2 3 4 5 6 7 8 9 ...                      S
    context parallel    rank i: chunks i and 2 cp - 1 - i of 2 cp    S / cp       balanced for causal attention
    sequence parallel   a contiguous tp-th of that                   S / cp / tp

Nothing that a token's computation depends on is a fact about a rank: random numbers, groups and positions are keyed by
the logical index.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.random import hash_key, token_uniform


def context_positions(seq_length: int, cp: int, cp_rank: int) -> Tensor:
    """[S / cp] logical positions of a context-parallel rank: chunks i and 2 cp - 1 - i of 2 cp equal ones."""
    if cp == 1:
        return torch.arange(seq_length)
    early, late = context_chunks(cp_rank, cp)
    chunks = torch.arange(seq_length).view(2 * cp, -1)
    return torch.cat([chunks[early], chunks[late]])


def context_chunks(cp_rank: int, cp: int) -> tuple[int, int]:
    """The two chunks, of 2 cp equal ones, of a context-parallel rank."""
    return cp_rank, 2 * cp - 1 - cp_rank


class SequenceLayout:
    """Which logical positions this rank holds between the matrices and inside attention.

    Attributes:
        context_S: [S / cp] positions inside attention and at the loss.
        local_S: [S / cp / tp] positions of the residual stream; tp cuts only under sequence parallelism.
    """

    def __init__(self, seq_length: int, ctx: ParallelContext, sequence_parallel: bool) -> None:
        self.seq_length, self.ctx, self.sequence_parallel = seq_length, ctx, sequence_parallel
        device, cp = ctx.device, ctx.cp.size
        self.context_S = context_positions(seq_length, cp, ctx.cp.rank).to(device)
        self.local_S = self.context_S.chunk(ctx.tp.size)[ctx.tp.rank] if sequence_parallel else self.context_S
        self.axis = ctx.seq if sequence_parallel else ctx.cp
        in_rank_order = torch.cat([context_positions(seq_length, cp, rank) for rank in range(cp)])
        self._to_logical = torch.argsort(in_rank_order).to(device)

    def gather(self, x_local: Tensor) -> Tensor:
        """[S', ...] residual-stream rows -> [S, ...] in logical order; gradients are summed and scattered."""
        return self._reorder(collectives.all_gather(x_local, self.axis))

    def gather_context(self, x_context: Tensor) -> Tensor:
        """[S / cp, ...] rows inside attention -> [S, ...] in logical order; gradients are summed and scattered."""
        return self._reorder(collectives.all_gather(x_context, self.ctx.cp))

    def _reorder(self, x: Tensor) -> Tensor:
        return x if self.ctx.cp.size == 1 else x.index_select(0, self._to_logical)

    @property
    def whole(self) -> bool:
        """Whether the residual stream holds whole sequences."""
        return self.axis.size == 1


@dataclass(frozen=True)
class StepInfo:
    """What all micro-batches of a step share.

    Attributes:
        num_loss_tokens: tokens of the global batch with a loss: the one divisor of the language-model loss.
        num_routed_tokens: tokens of the global batch that are no padding: the one divisor of balance losses.
    """

    seed: int
    iteration: int
    training: bool
    num_loss_tokens: float
    num_routed_tokens: float


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch: whole sequences, sequence first; all tensors [S, B] unless the name says otherwise.

    Attributes:
        ids_SB, labels_SB: vocabulary ids.
        loss_mask_SB: bool, tokens that count in the loss.
        positions_SB: positions for the rotary embedding.
        documents_SB: number of the document inside the sequence, or None where attention may cross documents.
        padding_SB: bool, or None where there is no padding.
        sample_ids_B: index of each sample in the run.
        microbatch: index inside this rank's step; statistics are stored under it.
    """

    ids_SB: Tensor
    labels_SB: Tensor
    loss_mask_SB: Tensor
    positions_SB: Tensor
    documents_SB: Tensor | None
    padding_SB: Tensor | None
    sample_ids_B: Tensor
    microbatch: int
    layout: SequenceLayout
    step: StepInfo

    @cached_property
    def index_SB(self) -> Tensor:
        """Global token index: sample id x sequence length + position."""
        seq_length = self.layout.seq_length
        positions = torch.arange(seq_length, device=self.sample_ids_B.device)
        return self.sample_ids_B.unsqueeze(0) * seq_length + positions.unsqueeze(1)

    @cached_property
    def document_bounds(self) -> list[list[tuple[int, int]]] | None:
        """[2 cp][B] lowest and highest document of each context-parallel chunk, on the host; None without documents.

        Waits for the device, once per micro-batch.
        """
        if self.documents_SB is None:
            return None
        chunks_ZcB = self.documents_SB.unflatten(0, (2 * self.layout.ctx.cp.size, -1))
        lowest_ZB, highest_ZB = chunks_ZcB.amin(1).tolist(), chunks_ZcB.amax(1).tolist()
        return [list(zip(low, high, strict=True)) for low, high in zip(lowest_ZB, highest_ZB, strict=True)]

    def parts(self, num_parts: int) -> list["TokenBatch"]:
        """Equal numbers of its samples, each a micro-batch of its own with a number of its own."""

        def columns(whole_SB: Tensor | None) -> Sequence[Tensor | None]:
            return [None] * num_parts if whole_SB is None else whole_SB.chunk(num_parts, -1)

        names = ("ids_SB", "labels_SB", "loss_mask_SB", "positions_SB", "documents_SB", "padding_SB", "sample_ids_B")
        cut = zip(*(columns(getattr(self, name)) for name in names), strict=True)
        return [
            replace(self, microbatch=self.microbatch * num_parts + part, **dict(zip(names, tensors, strict=True)))
            for part, tensors in enumerate(cut)
        ]

    def local(self, whole_SB: Tensor) -> Tensor:
        """The rows of a whole-sequence tensor that this rank's residual stream holds."""
        return whole_SB.index_select(0, self.layout.local_S)

    def context(self, whole_SB: Tensor) -> Tensor:
        """The rows of a whole-sequence tensor that this rank holds inside attention and at the loss."""
        return whole_SB.index_select(0, self.layout.context_S)

    def uniform(self, index: Tensor, layer: int, use: str, num_columns: int, dtype: torch.dtype) -> Tensor:
        """[*index.shape, num_columns] uniform numbers of these tokens for a use in a layer, this iteration."""
        key = hash_key(self.step.seed, self.step.iteration, layer, use)
        return token_uniform(key, index, num_columns, dtype)
