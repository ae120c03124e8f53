"""Gradient reduction and ZeRO sharding of one stage: what happens to gradients and weights, and when.

    strategy              gradients are                        the optimizer steps   weights are
    no_shard              all-reduced once per step            everything            whole
    optim                 reduce-scattered once per step       its range             gathered once per step
    optim_grads           reduce-scattered per micro-batch     its range             gathered once per step
    optim_grads_params    reduce-scattered per micro-batch     its range             gathered around each use,
                                                                                     the next layer's beforehand

Only sums: the loss is already divided by the global number of valid tokens. A bucket's reduction begins as soon as
its last gradient is there, and overlaps with the rest of the backward pass. One a micro-batch is waited for when the
next unit's begins, so that one unit's whole gradients travel while another's are computed. Ranges that cut through
parameters are boxes in logical coordinates (``megatron_moe.checkpoint``), so they reshard freely all the same.

    backward pass of   layer 3 | layer 2 | layer 1 | layer 0 | next forward pass | next backward pass
    being reduced              | layer 3 | layer 2 | layer 1 | layer 0           |
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megatron_moe.parallel.buckets import Bucket, Piece, Sharding
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sharding import GradientWriter, ShardedParameter

BUCKET_NUMEL = 1 << 25  # 32 Mi elements: large enough for bandwidth, small enough to begin early


class UnderWay:
    """The unit of a rank, of any of its stages, whose gradients of a micro-batch are being reduced: one at a time."""

    def __init__(self) -> None:
        self._unit: list[Bucket] = []

    def begun(self, unit: list[Bucket]) -> None:
        """A bucket of the unit has begun its reduction: wait for those of the unit before."""
        if unit is not self._unit:
            self.finish()
            self._unit = unit

    def finish(self) -> None:
        """Wait until nothing is under way."""
        _finish(self._unit)
        self._unit = []

    @property
    def num_bytes(self) -> int:
        """Whole gradients and results that wait for their reduction to end."""
        return sum(bucket.num_bytes_under_way for bucket in self._unit)


class GradientReducer:
    """The buckets of one stage.

    Args:
        units: parameters by unit of the model (a layer; what is left). With sharded gradients or parameters a
            bucket never mixes units, so that it is complete, or needed, when its unit is.
        under_way: what the stages of a rank share; default: one of its own.
    """

    def __init__(
        self,
        units: Sequence[Sequence[ShardedParameter]],
        ctx: ParallelContext,
        strategy: str,
        under_way: UnderWay | None = None,
    ) -> None:
        self.ctx, self.sharding, self.under_way = ctx, Sharding.of(strategy), under_way or UnderWay()
        self.units: list[list[Bucket]] = []
        if not self.sharding.gradients:
            units = [[p for unit in units for p in unit]]
        for unit in units:
            self.units.append([])
            self.units[-1] += self._buckets(unit, self.units[-1])
        self._num_microbatches = 0

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets."""
        return [bucket for unit in self.units for bucket in unit]

    def _buckets(self, parameters: Sequence[ShardedParameter], unit: list[Bucket]) -> Iterator[Bucket]:
        # A tied tensor has buckets of its own, so that both stages cut it into the same ranges.
        by_kind: dict[tuple[str, torch.dtype, bool], list[ShardedParameter]] = {}
        for p in parameters:
            by_kind.setdefault((p.spec.sum_axis, p.dtype, p.spec.tied), []).append(p)
        for (axis_name, dtype, _), members in by_kind.items():
            for group in _cut(members, BUCKET_NUMEL):
                main_dtype = torch.promote_types(dtype, torch.float32)
                bucket = Bucket(group, self.ctx.axis(axis_name), self.sharding, main_dtype)
                for p in group:
                    p.accumulate = self._accumulator(p, bucket, unit)
                    p.register_post_accumulate_grad_hook(_collect)  # type: ignore[arg-type]
                yield bucket

    def _accumulator(
        self, parameter: ShardedParameter, bucket: Bucket, unit: list[Bucket]
    ) -> Callable[[GradientWriter, int], None]:
        def accumulate(write: GradientWriter, num_uses: int) -> None:
            if bucket.accumulate(parameter, write, num_uses, self._num_microbatches) and self.sharding.gradients:
                self.under_way.begun(unit)

        return accumulate

    def begin_step(self, num_microbatches: int) -> None:
        """Forget the gradients of the last step; every parameter will get one from each micro-batch."""
        self._num_microbatches = num_microbatches
        for bucket in self.buckets:
            bucket.zero()

    def begin_pass(self) -> None:
        """Before any pass that makes gradients: wait for what the pass before it left under way, of any stage.

        So a pass costs the same whichever came before it, and a plan may put the costs of passes together.
        """
        self.under_way.finish()

    def reduce(self) -> None:
        """After the stage's last micro-batch: begin what has not begun by itself."""
        for bucket in self.buckets:
            bucket.start_reduce()

    def finish(self) -> None:
        """Once all stages are done: wait; tied tensors get the gradients of both stages that hold them."""
        _finish(self.buckets)
        for bucket in self.buckets:
            bucket.sum_copies(self.ctx.ends)

    def gather_weights(self) -> None:
        """After the optimizer's step: whole weights again, or, where parameters are sharded, none until their use."""
        for bucket in self.buckets:
            if self.sharding.parameters:
                bucket.release()
            else:
                bucket.collect_weights()

    def pieces(self) -> list[Piece]:
        """All that this rank's optimizer owns."""
        return [piece for bucket in self.buckets for piece in bucket.pieces(self.ctx)]


def _finish(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        bucket.finish_reduce()


def _collect(parameter: ShardedParameter) -> None:
    """Move what autograd produced into the accumulated gradient, in that one's precision."""
    gradient = parameter.grad
    if gradient is not None:  # None: the operation has accumulated it already, or the queue will
        assert parameter.accumulate is not None
        parameter.accumulate(partial(_write, gradient), parameter.uses_per_pass)
        parameter.grad = None


def _write(gradient: Tensor, out: Tensor, beta: float) -> None:
    if beta == 0:
        out.copy_(gradient)
    else:
        out.add_(gradient)


class ShardedUnit(NamedTuple):
    """Buckets of a part of the model whose weights are gathered around its use, and those of its neighbours."""

    buckets: list[Bucket]
    previous: list[Bucket]
    following: list[Bucket]

    @staticmethod
    def chain(units: Sequence[list[Bucket]]) -> "list[ShardedUnit]":
        """Of parts that run one after the other."""
        ends: list[list[Bucket]] = [[]]
        return [ShardedUnit(*three) for three in zip(units, ends + [*units], [*units[1:]] + ends, strict=False)]


class _ReleaseAfterBackward(torch.autograd.Function):
    """Identity at the entrance of a unit: when the backward pass comes out here, the weights are done with."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, unit: list[Bucket]) -> Tensor:
        ctx.unit = unit  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        for bucket in ctx.unit:  # type: ignore[attr-defined]
            bucket.release()
        return grad, None


class _GatherBeforeBackward(torch.autograd.Function):
    """Identity at the exit of a unit: when the backward pass enters here, the weights are needed again."""

    @staticmethod
    def forward(ctx: FunctionCtx, y: Tensor, unit: ShardedUnit) -> Tensor:
        ctx.unit = unit  # type: ignore[attr-defined]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        _gather(ctx.unit.buckets, ctx.unit.previous)  # type: ignore[attr-defined]
        return grad, None


def with_weights(unit: ShardedUnit | None, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run a part of the model, where its weights are sharded: gather, run, release; and so again in the backward pass.

    The weights of the part that runs next, here or in the backward pass, are gathered meanwhile.
    """
    if unit is None:
        return run(x)
    _gather(unit.buckets, unit.following)
    y = _GatherBeforeBackward.apply(run(_ReleaseAfterBackward.apply(x, unit.buckets)), unit)  # type: ignore[arg-type]
    for bucket in unit.buckets:
        bucket.release()
    return y  # type: ignore[return-value]


def _gather(needed: list[Bucket], soon: list[Bucket]) -> None:
    for bucket in needed:
        bucket.gather()
    for bucket in soon:
        bucket.begin_gather()


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
