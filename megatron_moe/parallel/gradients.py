"""Flat buffers of weights and gradients, reduced over the axis each parameter declares; ZeRO sharding of both.

A bucket holds parameters that are summed over the same axis, back to back:

    weights  [ p0 | p1 | p2 ... | pad ]      parameters are views into it
    grads    [ g0 | g1 | g2 ... | pad ]      ``main_grad`` are views into it; float32 (float64 for float64)
             |<- shard 0 ->|<- shard 1 ->|   equal ranges, whatever the borders of parameters

    strategy             gradients are                         the optimizer steps
    no_shard             all-reduced once per step             everything
    optim                reduce-scattered once per step        its range, then all-gathers the weights
    optim_grads          reduce-scattered per micro-batch      its range, then all-gathers the weights

Only sums: the loss is already divided by the global number of valid tokens. A range that cuts through parameters is
a union of boxes in logical coordinates (``megatron_moe.checkpoint``), so it reshards freely all the same.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import Axis, ParallelContext
from megatron_moe.parallel.sharding import ShardedParameter
from megatron_moe.parallel.weight_gradients import accumulate


@dataclass(frozen=True)
class Piece:
    """What of one parameter this rank's optimizer owns: elements [start, stop) of the flattened local piece."""

    parameter: ShardedParameter
    start: int
    stop: int
    weight: Tensor  # [stop - start] view of the weights
    grad: Tensor  # [stop - start] view of the reduced gradients
    replicas: int  # ranks of the stage whose optimizer owns these same elements


class Bucket:
    """Parameters summed over one axis: their flat weights and gradients."""

    def __init__(self, parameters: list[ShardedParameter], axis: Axis, num_shards: int, dtype: torch.dtype) -> None:
        self.parameters, self.axis, self.num_shards = parameters, axis, num_shards
        total = sum(p.numel() for p in parameters)
        self.shard_size = -(-total // num_shards)
        first = parameters[0]
        self.weights = torch.zeros(self.shard_size * num_shards, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(self.shard_size * num_shards, dtype=dtype, device=first.device)
        self.offsets: list[int] = []
        offset = 0
        for p in parameters:
            self.offsets.append(offset)
            view = self.weights[offset : offset + p.numel()].view(p.shape)
            view.copy_(p.data)
            p.data = view
            p.main_grad = self.grads[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
        self.shard = slice(0, total)
        if num_shards > 1:
            self.shard = slice(axis.rank * self.shard_size, (axis.rank + 1) * self.shard_size)
            self.shard_grads = torch.zeros(self.shard_size, dtype=dtype, device=first.device)
        else:
            self.shard_grads = self.grads

    def reduce(self) -> None:
        """Partial sums -> sums: in place, or into ``shard_grads`` (added to what is there)."""
        if self.num_shards == 1:
            collectives.sum_(self.grads, self.axis)
        else:
            self.shard_grads += collectives.scatter_sum_dim0(self.grads, self.axis)
            self.grads.zero_()

    def sum_copies(self, ends: Axis) -> None:
        """Add up the gradients of a tensor that the first and the last stage both hold."""
        if self.parameters[0].spec.tied:
            collectives.sum_(self.shard_grads, ends)

    def gather_weights(self) -> None:
        """After the optimizer's step: every rank's range of the weights -> all weights on every rank."""
        if self.num_shards > 1:
            self.weights.copy_(collectives.gather_dim0(self.weights[self.shard], self.axis))

    def zero(self) -> None:
        """Forget the gradients."""
        self.grads.zero_()
        self.shard_grads.zero_()

    def pieces(self, ctx: ParallelContext) -> Iterator[Piece]:
        """What this rank's optimizer owns of each parameter, where that is anything."""
        base = self.shard.start if self.num_shards > 1 else 0
        for p, offset in zip(self.parameters, self.offsets, strict=True):
            start, stop = max(offset, self.shard.start), min(offset + p.numel(), self.shard.stop)
            if start < stop:
                yield Piece(
                    parameter=p,
                    start=start - offset,
                    stop=stop - offset,
                    weight=self.weights[start:stop],
                    grad=self.shard_grads[start - base : stop - base],
                    replicas=p.spec.num_replicas(ctx) // self.num_shards,
                )


class GradientReducer:
    """The buckets of one model (all stages of this rank): accumulate, reduce, step ranges, gather."""

    def __init__(
        self, parameters: Iterable[ShardedParameter], ctx: ParallelContext, strategy: str, bucket_numel: int = 1 << 25
    ) -> None:
        self.ctx, self.strategy = ctx, strategy
        self.buckets: list[Bucket] = []
        # A tied tensor has buckets of its own, so that both stages cut it into the same ranges.
        by_kind: dict[tuple[str, torch.dtype, bool], list[ShardedParameter]] = {}
        for p in parameters:
            by_kind.setdefault((p.spec.sum_axis, p.dtype, p.spec.tied), []).append(p)
            p.register_post_accumulate_grad_hook(self._collect)  # type: ignore[arg-type]
        for (axis_name, dtype, _), members in by_kind.items():
            axis = ctx.axis(axis_name)
            num_shards = 1 if strategy == "no_shard" else axis.size
            main_dtype = torch.promote_types(dtype, torch.float32)
            for group in _cut(members, bucket_numel):
                self.buckets.append(Bucket(group, axis, num_shards, main_dtype))

    @staticmethod
    def _collect(parameter: ShardedParameter) -> None:
        """Move what autograd produced into the accumulated gradient, in that one's precision."""
        if parameter.grad is not None:  # None: the schedule deferred it, and the queue accumulates it later
            accumulate(parameter, parameter.grad)
            parameter.grad = None

    def end_microbatch(self) -> None:
        """With sharded gradients, reduce what this micro-batch left, so that only ranges are kept."""
        if self.strategy == "optim_grads":
            self._reduce_all()

    def reduce(self) -> None:
        """After the last micro-batch: gradients become those of the global batch."""
        if self.strategy != "optim_grads":
            self._reduce_all()

    def _reduce_all(self) -> None:
        for bucket in self.buckets:
            bucket.reduce()

    def sum_copies(self) -> None:
        """Once all stages are reduced: tied tensors get the gradients of both stages that hold them."""
        for bucket in self.buckets:
            bucket.sum_copies(self.ctx.ends)

    def gather_weights(self) -> None:
        """After the optimizer's step."""
        for bucket in self.buckets:
            bucket.gather_weights()

    def zero(self) -> None:
        """Before the first micro-batch."""
        for bucket in self.buckets:
            bucket.zero()

    def pieces(self) -> list[Piece]:
        """All that this rank's optimizer owns."""
        return [piece for bucket in self.buckets for piece in bucket.pieces(self.ctx)]


def _cut(parameters: list[ShardedParameter], limit: int) -> Iterator[list[ShardedParameter]]:
    """Runs of parameters of at most ``limit`` elements (one parameter at least)."""
    run: list[ShardedParameter] = []
    total = 0
    for p in parameters:
        if run and total + p.numel() > limit:
            yield run
            run, total = [], 0
        run.append(p)
        total += p.numel()
    if run:
        yield run
