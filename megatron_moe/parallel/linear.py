"""Linear layers cut over the tensor-parallel axis. A linear's name says how it is cut.

                       weight       input                    output
    ColumnParallel     rows / tp    replicated | S / tp      columns / tp
    RowParallel        cols / tp    columns / tp             replicated | S / tp

With sequence parallelism the activations outside are cut along the sequence (dim 0), and the pair of collectives is
all-gather at the column layer, reduce-scatter at the row layer (Korthikanti et al., arXiv:2205.05198, section 4.2.2).
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.products import PLAIN, Product
from megatron_moe.parallel.sharding import Initial, ShardSpec, empty_parameter
from megatron_moe.parallel.weight_gradients import WeightGradientQueue, leave_gradient, write_product

_DEFAULT = Initial()


class _DeferrableLinear(torch.autograd.Function):
    """A linear whose backward computes the input's gradient and accumulates the weight's, or leaves it in the queue."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, queue: WeightGradientQueue | None, product: Product
    ) -> Tensor:
        y, kept = product.forward(x, weight.flatten(0, -2))
        ctx.save_for_backward(weight, *kept)
        ctx.parameter, ctx.queue, ctx.product = weight, queue, product  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        weight, *kept = ctx.saved_tensors  # type: ignore[attr-defined]
        product: Product = ctx.product  # type: ignore[attr-defined]
        grad_x = product.input_gradient(grad, weight.flatten(0, -2)) if ctx.needs_input_grad[0] else None  # type: ignore[attr-defined]

        def write(out: Tensor, beta: float) -> None:
            rows = product.rows(tuple(kept), grad.dtype)
            write_product(out.flatten(0, -2), grad.flatten(0, -2).T, rows.flatten(0, -2), beta)

        return grad_x, leave_gradient(ctx.parameter, write, ctx.queue), None, None  # type: ignore[attr-defined]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradientQueue | None, product: Product = PLAIN
) -> Tensor:
    """``x @ W.T + bias`` with all dims of the weight but the last flattened into rows.

    With a queue, the schedule may defer the weight's gradient. A part of a parameter, which is no leaf, has no queue.
    """
    y: Tensor = _DeferrableLinear.apply(x, weight, queue, product)  # type: ignore[assignment]
    return y if bias is None else y + bias.flatten()


class ColumnParallelLinear(nn.Module):
    """[S', B, D] -> [S, B, out / tp]: gathers the sequence if it is cut, multiplies by this rank's rows of the weight.

    Args:
        shape: logical shape of the weight; the last dim is the input's, the others are flattened into the output's.
        cut: dim of ``shape`` that tp cuts; None keeps the weight whole on every rank, where each uses some of its rows
            (key-value heads fewer than tp), so that its gradient is partial over tp.
        bias: add a bias, cut like the rows.
        product: how it multiplies.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        ctx: ParallelContext,
        dtype: torch.dtype,
        *,
        cut: int | None = 0,
        bias: bool = False,
        initial: Initial = _DEFAULT,
        queue: WeightGradientQueue | None = None,
        product: Product = PLAIN,
    ) -> None:
        super().__init__()
        self.queue, self.product = queue, product
        spec = ShardSpec(shape, shards=() if cut is None else (("tp", cut),), partial_tp=cut is None, initial=initial)
        self.weight = empty_parameter(spec, ctx, dtype)
        bias_spec = ShardSpec(
            shape[:-1], shards=spec.shards, partial_tp=spec.partial_tp, initial=Initial("constant", 0.0), decay=False
        )
        self.bias = empty_parameter(bias_spec, ctx, dtype) if bias else None

    def forward(self, x: Tensor, rows: slice | None = None) -> Tensor:
        """x [S, B, D], gathered already (several column layers share one gather) -> [S, B, rows of this rank]."""
        if rows is None:
            return linear(x, self.weight, self.bias, self.queue, self.product)
        return linear(x, self.weight[rows], None if self.bias is None else self.bias[rows], None, self.product)


class ReplicatedLinear(nn.Module):
    """[..., in] -> [..., out], whole on every tp rank.

    Args:
        partial_tp: each tp rank multiplies other tokens (sequence parallel), so that gradients are partial over tp;
            else all multiply the same.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        ctx: ParallelContext,
        dtype: torch.dtype,
        *,
        partial_tp: bool,
        bias: bool = False,
        initial: Initial = _DEFAULT,
        queue: WeightGradientQueue | None = None,
        product: Product = PLAIN,
    ) -> None:
        super().__init__()
        self.queue, self.product = queue, product
        self.weight = empty_parameter(ShardSpec(shape, partial_tp=partial_tp, initial=initial), ctx, dtype)
        bias_spec = ShardSpec(shape[:1], partial_tp=partial_tp, initial=Initial("constant", 0.0), decay=False)
        self.bias = empty_parameter(bias_spec, ctx, dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return linear(x, self.weight, self.bias, self.queue, self.product)


class RowParallelLinear(nn.Module):
    """[S, B, in / tp] -> [S', B, D]: multiplies by this rank's columns and sums over tp (scattering the sequence)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ctx: ParallelContext,
        dtype: torch.dtype,
        *,
        sequence_parallel: bool,
        bias: bool = False,
        initial: Initial = _DEFAULT,
        queue: WeightGradientQueue | None = None,
        product: Product = PLAIN,
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = ctx.tp, sequence_parallel
        self.queue, self.product = queue, product
        spec = ShardSpec((out_features, in_features), shards=(("tp", 1),), initial=initial)
        self.weight = empty_parameter(spec, ctx, dtype)
        # The bias is added after the sum: once per token. Its gradient covers the tokens of this rank.
        bias_spec = ShardSpec(
            (out_features,), partial_tp=sequence_parallel, initial=Initial("constant", 0.0), decay=False
        )
        self.bias = empty_parameter(bias_spec, ctx, dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [S, B, in / tp] -> [S', B, out]."""
        y = leave_tp(linear(x, self.weight, None, self.queue, self.product), self.axis, self.sequence_parallel)
        return y if self.bias is None else y + self.bias


def enter_tp(x: Tensor, ctx: ParallelContext, sequence_parallel: bool) -> Tensor:
    """At the door of tensor-parallel computation: S / tp -> S (sequence parallel), or replicated -> replicated."""
    return collectives.all_gather(x, ctx.tp) if sequence_parallel else collectives.replicate(x, ctx.tp)


def leave_tp(y: Tensor, axis: collectives.Axis, sequence_parallel: bool) -> Tensor:
    """Behind tensor-parallel computation: partial sums -> S / tp (sequence parallel), or -> replicated."""
    return collectives.reduce_scatter(y, axis) if sequence_parallel else collectives.all_reduce(y, axis)
