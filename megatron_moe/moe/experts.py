"""Routed experts: feed-forward networks whose weights are stacked, run as two grouped products.

    rows_RD --fc1_LPFD--> [R, P, F] --activation * gate weight--> [R, F] --fc2_LDF--> rows_RD

The gate weight is applied before the second product: the result is the same, and the [R, D] output need not be kept for
the weight's gradient (formulas 8.3). A bias of the second product is multiplied by it too.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from megatron_moe.config.schema import ModelConfig, MoEConfig
from megatron_moe.kernels import grouped
from megatron_moe.kernels.activation import activate, is_fused
from megatron_moe.kernels.forgetting import without_keeping
from megatron_moe.kernels.scaled import ScaledGroupedProduct, scaled_product
from megatron_moe.kernels.selection import choose
from megatron_moe.moe.permute import Copies, copy_rows
from megatron_moe.moe.replay import decided
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
        groups: grouped.Groups,
        product: grouped.GroupedProduct,
        queue: WeightGradientQueue | None,
    ) -> Tensor:
        y_RO, kept = product.forward(rows_RI, _matrix(weight), groups)
        ctx.save_for_backward(weight, *kept)
        ctx.parameter, ctx.groups, ctx.product, ctx.queue = weight, groups, product, queue  # type: ignore[attr-defined]
        return y_RO

    @staticmethod
    def backward(ctx: FunctionCtx, grad_RO: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        weight, *kept = ctx.saved_tensors  # type: ignore[attr-defined]
        groups: grouped.Groups = ctx.groups  # type: ignore[attr-defined]
        product: grouped.GroupedProduct = ctx.product  # type: ignore[attr-defined]
        grad_RO = grad_RO.contiguous()
        grad_RI = product.input_gradient(grad_RO, _matrix(weight), groups)

        def write(out: Tensor, beta: float) -> None:
            rows_RI = product.rows(tuple(kept), grad_RO.dtype)
            grouped.add_grouped_outer_product(_matrix(out), grad_RO, rows_RI, groups, product.backend, beta)

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
        recompute_activation: bool = False,
    ) -> None:
        super().__init__()
        assert moe.num_experts is not None
        num_experts, width = moe.num_experts, moe.moe_ffn_hidden_size or model.dense_ffn_size
        self.queue, self.etp, self.recompute_activation = queue, ctx.etp.size, recompute_activation
        self.activation, clamp, offset = model.activation, model.activation_func_clamp_value, model.glu_linear_offset
        self.kernels = choose(model.kernels, ctx.device, dtype)
        self.activation_options = {"clamp": clamp, "offset": offset, "kernels": self.kernels["swiglu"]}
        self.has_fused_activation = is_fused(self.activation, clamp, offset)
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
        groups = decided(lambda: grouped.Groups(counts_L, rows_RD.device))
        hidden: Tensor = _GroupedLinear.apply(rows_RD, self.fc1, groups, self.product, self.queue)  # type: ignore[assignment]
        weights_R, copies = weights_R.to(hidden.dtype), None
        if self.fc1_bias is not None:
            copies = _copies_of_experts(counts_L, hidden, self.kernels["permutation"])
            hidden = hidden + copy_rows(self.fc1_bias.flatten(1), copies)
        inputs = hidden.unflatten(1, (self.num_projections, -1)), weights_R.unsqueeze(1)

        def project(hidden_RF: Tensor) -> Tensor:
            return _GroupedLinear.apply(hidden_RF, self.fc2, groups, self.product, self.queue)  # type: ignore[return-value]

        if self.recompute_activation:
            y_RD = without_keeping(self._activate_keeping_inputs, project, *inputs)
        else:
            y_RD = project(self._activate(*inputs))
        if self.fc2_bias is None or copies is None:
            return y_RD
        # Every etp rank adds its share, and every one has the whole gradient of the result, so of the bias too.
        shared_LD = self.fc2_bias.detach() / self.etp + (self.fc2_bias - self.fc2_bias.detach())
        return y_RD + copy_rows(shared_LD, copies, weights_R)

    def _activate(self, hidden_RPF: Tensor, weights_R1: Tensor) -> Tensor:
        return activate(hidden_RPF, self.activation, weights_1=weights_R1, **self.activation_options)

    def _activate_keeping_inputs(self, hidden_RPF: Tensor, weights_R1: Tensor) -> tuple[Tensor]:
        """Nothing else is kept; an activation that is fused sees to it by itself."""
        if self.has_fused_activation:
            return (self._activate(hidden_RPF, weights_R1),)
        return (checkpoint(self._activate, hidden_RPF, weights_R1, use_reentrant=False, preserve_rng_state=False),)  # type: ignore[return-value]


def _copies_of_experts(counts_L: Tensor, rows: Tensor, kernels: str) -> Copies:
    """Rows as copies of their experts' biases: expert-major as they lie, on the rows' device."""
    experts_L = torch.arange(len(counts_L), device=counts_L.device)
    experts_R = experts_L.repeat_interleave(counts_L, output_size=len(rows)).to(rows.device, non_blocking=True)
    starts_L = (counts_L.cumsum(0) - counts_L).to(rows.device, non_blocking=True)
    return Copies(experts_R, torch.arange(len(rows), device=rows.device), starts_L, kernels)
