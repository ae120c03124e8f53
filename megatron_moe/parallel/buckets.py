"""A bucket: parameters that are summed over the same axis, back to back in flat buffers of weights and gradients.

    weights  [ p0 | p1 | p2 ... | pad ]      parameters are views into it
    grads    [ g0 | g1 | g2 ... | pad ]      ``main_grad`` are views into it; float32 (float64 for float64)
             |<- shard 0 ->|<- shard 1 ->|   equal ranges, whatever the borders of parameters

A buffer that is not needed for now gives its memory back; views stay valid and see the data again after a gather.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import Axis, ParallelContext
from megatron_moe.parallel.sharding import GradientWriter, ShardedParameter


@dataclass(frozen=True)
class Sharding:
    """What data-parallel ranks share out (``--data-parallel-sharding-strategy``); each includes those before it."""

    optimizer: bool = False  # ZeRO-1
    gradients: bool = False  # ZeRO-2: reduced per micro-batch, full gradients never outlive it
    parameters: bool = False  # ZeRO-3: gathered around each use

    @staticmethod
    def of(strategy: str) -> "Sharding":
        """From the flag's value."""
        level = ("no_shard", "optim", "optim_grads", "optim_grads_params").index(strategy)
        return Sharding(optimizer=level >= 1, gradients=level >= 2, parameters=level >= 3)


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
    """Flat weights and gradients of some parameters, and their reduction over one axis."""

    def __init__(self, parameters: list[ShardedParameter], axis: Axis, sharding: Sharding, dtype: torch.dtype) -> None:
        self.parameters, self.axis, self.sharding = parameters, axis, sharding
        self.num_shards = axis.size if sharding.optimizer else 1
        self.total = sum(p.numel() for p in parameters)
        shard_size = -(-self.total // self.num_shards)
        rank = axis.rank if self.num_shards > 1 else 0
        self.shard = slice(rank * shard_size, (rank + 1) * shard_size)
        like = parameters[0]
        self.weights = torch.zeros(shard_size * self.num_shards, dtype=like.dtype, device=like.device)
        self.grads = torch.zeros(shard_size * self.num_shards, dtype=dtype, device=like.device)
        self.offsets = self._lay_out()
        self.shard_grads = self.grads if self.num_shards == 1 else self.grads.new_zeros(shard_size)
        self.shard_weights = self.weights[self.shard]
        self.reducing = False
        self._work: dist.Work | None = None
        self._gathering: dist.Work | None = None
        self._received: Tensor | None = None
        self._contributions = 0  # uses in this step whose gradients are accumulated
        self._untouched = set(parameters)  # no gradient is in their part of the buffer yet, but garbage
        if self.num_shards > 1 and sharding.gradients:
            _free(self.grads)
        if self.num_shards > 1 and sharding.parameters:
            self.shard_weights = self.shard_weights.clone()
            _free(self.weights)

    def _lay_out(self) -> list[int]:
        """Move the parameters into the flat weights; returns where each starts."""
        offsets, offset = [], 0
        for p in self.parameters:
            offsets.append(offset)
            view = self.weights[offset : offset + p.numel()].view(p.shape)
            view.copy_(p.data)
            p.data = view
            p.main_grad = self.grads[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
        return offsets

    def accumulate(
        self, parameter: ShardedParameter, write: GradientWriter, num_uses: int, num_microbatches: int
    ) -> bool:
        """Let the gradient of some uses be written or added; begin to reduce when the last due is there. True if begun.

        The first of a step overwrites, so that nobody has to clear the buffer and a product can go straight into it.

        Sharded gradients are reduced after as many uses as a micro-batch makes. Where a schedule defers weight
        gradients these may belong to two micro-batches, which a sum does not mind; what comes while the others are
        being reduced waits for them.
        """
        if self.reducing:
            self.finish_reduce()
        if _is_free(self.grads):
            _allocate(self.grads)
            self._forget()
        write(parameter.main_grad, 0.0 if parameter in self._untouched else 1.0)
        self._untouched.discard(parameter)
        before, self._contributions = self._contributions, self._contributions + num_uses
        due = sum(p.passes_per_microbatch * p.uses_per_pass for p in self.parameters)
        if not self.sharding.gradients:
            due *= num_microbatches
        if before // due < self._contributions // due:  # several uses at once may pass a multiple by
            self.start_reduce()
        return self.reducing

    def start_reduce(self) -> None:
        """Begin: partial sums -> sums, in place or of this rank's range. Work may go on until ``finish_reduce``."""
        if self.reducing or _is_free(self.grads):
            return
        self.reducing = True
        for parameter in self._untouched:
            parameter.main_grad.zero_()
        self._untouched.clear()
        if self.num_shards == 1:
            self._work = collectives.start_sum(self.grads, self.axis)
        else:
            self._received, self._work = collectives.start_scatter_sum_dim0(self.grads, self.axis)

    def finish_reduce(self) -> None:
        """Wait for the reduction; a shard is added to what earlier micro-batches left."""
        self.reducing = False
        if self._work is not None:
            with self.axis.traffic.waiting():
                self._work.wait()
            self._work = None
        if self._received is not None:
            self.shard_grads += self._received
            self._received = None
            if self.sharding.gradients:
                _free(self.grads)
            else:
                self._forget()

    @property
    def num_bytes_under_way(self) -> int:
        """Bytes that the end of a reduction of sharded gradients frees."""
        buffers = () if self._received is None else (self._received, self.grads)
        return sum(buffer.untyped_storage().nbytes() for buffer in buffers)

    def sum_copies(self, ends: Axis) -> None:
        """Add up the gradients of a tensor that the first and the last stage both hold."""
        if self.parameters[0].spec.tied:
            collectives.sum_(self.shard_grads, ends)

    def begin_gather(self) -> None:
        """Begin: this rank's range of the weights -> all weights, where they are not here."""
        if _is_free(self.weights):
            _allocate(self.weights)
            # Through ``data``: autograd must not take a gather for a change of the weights it has saved.
            self._gathering = collectives.start_gather_dim0(self.weights.data, self.shard_weights, self.axis)

    def gather(self) -> None:
        """See to it that all weights are here."""
        self.begin_gather()
        self._finish_gather()

    def _finish_gather(self) -> None:
        if self._gathering is not None:
            with self.axis.traffic.waiting():
                self._gathering.wait()
            self._gathering = None

    def collect_weights(self) -> None:
        """Every rank's range of the weights -> all weights on every rank. Through ``data``, as above."""
        if self.num_shards > 1:
            self.weights.data.copy_(collectives.gather_dim0(self.shard_weights, self.axis))

    def release(self) -> None:
        """Give the memory of the weights back, where only ranges are kept."""
        if self.num_shards > 1 and self.sharding.parameters:
            self._finish_gather()
            _free(self.weights)

    def zero(self) -> None:
        """Forget the gradients."""
        if not _is_free(self.grads):
            self._forget()
        if self.num_shards > 1:
            self.shard_grads.zero_()
        self._contributions = 0

    def _forget(self) -> None:
        self._untouched = set(self.parameters)
        self.grads[self.total :].zero_()

    def pieces(self, ctx: ParallelContext) -> Iterator[Piece]:
        """What this rank's optimizer owns of each parameter, where that is anything."""
        for p, offset in zip(self.parameters, self.offsets, strict=True):
            start, stop = max(offset, self.shard.start), min(offset + p.numel(), self.shard.stop)
            if start < stop:
                mine = slice(start - self.shard.start, stop - self.shard.start)
                yield Piece(
                    parameter=p,
                    start=start - offset,
                    stop=stop - offset,
                    weight=self.shard_weights[mine],
                    grad=self.shard_grads[mine],
                    replicas=p.spec.num_replicas(ctx) // self.num_shards,
                )


def _is_free(buffer: Tensor) -> bool:
    return buffer.numel() > 0 and buffer.untyped_storage().size() == 0


def _free(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(0)


def _allocate(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
