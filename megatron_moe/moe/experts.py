"""Routed experts: feed-forward networks whose weights are stacked, run as two grouped products.

    rows_RD --fc1_LPFD--> [R, P, F] --activation * gate weight--> [R, F] --fc2_LDF--> rows_RD

The gate weight is applied before the second product: the result is the same, and the [R, D] output need not be kept for
the weight's gradient (formulas 8.3). A bias of the second product is multiplied by it too.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from megatron_moe.config.schema import ModelConfig, MoEConfig
from megatron_moe.kernels import grouped
from megatron_moe.kernels.activation import activate
from megatron_moe.kernels.scaled import ScaledGroupedProduct, scaled_product
from megatron_moe.kernels.selection import choose
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sharding import Initial, ShardedParameter, ShardSpec, empty_parameter
from megatron_moe.parallel.weight_gradients import WeightGradientQueue, leave_gradient


class _GroupedLinear(torch.autograd.Function):
    """Grouped product whose backward accumulates the weights' gradient, or leaves it in the stage's queue."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rows_RI: Tensor,
        weight: ShardedParameter,
        counts_L: Tensor,
        product: grouped.GroupedProduct,
        queue: WeightGradientQueue | None,
    ) -> Tensor:
        y_RO, kept = product.forward(rows_RI, _matrix(weight), counts_L)
        ctx.save_for_backward(weight, counts_L, *kept)
        ctx.parameter, ctx.product, ctx.queue = weight, product, queue  # type: ignore[attr-defined]
        return y_RO

    @staticmethod
    def backward(ctx: FunctionCtx, grad_RO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, counts_L, *kept = ctx.saved_tensors  # type: ignore[attr-defined]
        product: grouped.GroupedProduct = ctx.product  # type: ignore[attr-defined]
        grad_RO = grad_RO.contiguous()
        grad_RI = product.input_gradient(grad_RO, _matrix(weight), counts_L)

        def write(out: Tensor, beta: float) -> None:
            rows_RI = product.rows(tuple(kept), grad_RO.dtype)
            grouped.add_grouped_outer_product(_matrix(out), grad_RO, rows_RI, counts_L, product.backend, beta)

        gradient = leave_gradient(ctx.parameter, write, ctx.queue)  # type: ignore[attr-defined]
        return grad_RI, gradient, None, None, None


def _matrix(weight: Tensor) -> Tensor:
    """[L, ..., I] -> [L, O, I]."""
    return weight.flatten(1, -2)


class Experts(nn.Module):
    """This rank's experts: L = E / ep of them, each with F / etp of its width."""

    def __init__(
        self,
        model: ModelConfig,
        moe: MoEConfig,
        ctx: ParallelContext,
        dtype: torch.dtype,
        output_std: float,
        queue: WeightGradientQueue | None = None,
    ) -> None:
        super().__init__()
        assert moe.num_experts is not None
        num_experts, width = moe.num_experts, moe.moe_ffn_hidden_size or model.dense_ffn_size
        self.activation, self.queue, self.etp = model.activation, queue, ctx.etp.size
        self.activation_options = {"clamp": model.activation_func_clamp_value, "offset": model.glu_linear_offset}
        self.activation_options["kernels"] = choose(model.kernels, ctx.device, dtype)["swiglu"]
        self.num_projections = 2 if model.gated else 1
        sizes = (model.hidden_size, width // ctx.etp.size)
        backend = grouped.choose_backend(moe.moe_expert_backend, dtype, ctx.device, sizes)
        scaled = scaled_product(model, ctx.device, dtype)
        self.product: grouped.GroupedProduct = grouped.PlainGroupedProduct(backend)
        if scaled is not None:
            self.product = ScaledGroupedProduct(scaled, backend)
        fc1 = ShardSpec(
            (num_experts, self.num_projections, width, model.hidden_size),
            shards=(("ep", 0), ("etp", 2)),
            expert=True,
            stacked=True,
            initial=Initial("normal", model.init_method_std),
        )
        fc2 = ShardSpec(
            (num_experts, model.hidden_size, width),
            shards=(("ep", 0), ("etp", 2)),
            expert=True,
            stacked=True,
            initial=Initial("normal", output_std),
        )
        self.fc1 = empty_parameter(fc1, ctx, dtype)
        self.fc2 = empty_parameter(fc2, ctx, dtype)
        zero = {"expert": True, "stacked": True, "initial": Initial("constant", 0.0), "decay": False}
        fc1_bias = ShardSpec(fc1.shape[:3], shards=fc1.shards, **zero)
        fc2_bias = ShardSpec(fc2.shape[:2], shards=(("ep", 0),), **zero)
        self.fc1_bias = empty_parameter(fc1_bias, ctx, dtype) if model.add_bias_linear else None
        self.fc2_bias = empty_parameter(fc2_bias, ctx, dtype) if model.add_bias_linear else None

    def forward(self, rows_RD: Tensor, weights_R: Tensor, counts_L: Tensor) -> Tensor:
        """rows [R, D] expert-major, weights [R], counts [L] -> [R, D], partial over etp."""
        hidden: Tensor = _GroupedLinear.apply(rows_RD, self.fc1, counts_L, self.product, self.queue)  # type: ignore[assignment]
        weights_R1, experts_R = weights_R.unsqueeze(1).to(hidden.dtype), None
        if self.fc1_bias is not None:
            experts_R = _experts_of_rows(counts_L, hidden)
            hidden = hidden + self.fc1_bias.flatten(1).index_select(0, experts_R)
        hidden_RPF = hidden.unflatten(1, (self.num_projections, -1))
        hidden_RF = activate(hidden_RPF, self.activation, weights_1=weights_R1, **self.activation_options)
        y_RD: Tensor = _GroupedLinear.apply(hidden_RF, self.fc2, counts_L, self.product, self.queue)  # type: ignore[assignment]
        if self.fc2_bias is None or experts_R is None:
            return y_RD
        # Every etp rank adds its share, and every one has the whole gradient of the result, so of the bias too.
        shared_LD = self.fc2_bias.detach() / self.etp + (self.fc2_bias - self.fc2_bias.detach())
        return y_RD + shared_LD.index_select(0, experts_R) * weights_R1


def _experts_of_rows(counts_L: Tensor, rows: Tensor) -> Tensor:
    """[R] int64: the expert of each row, on the rows' device."""
    experts_L = torch.arange(len(counts_L), device=counts_L.device)
    return experts_L.repeat_interleave(counts_L, output_size=len(rows)).to(rows.device, non_blocking=True)
