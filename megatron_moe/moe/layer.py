"""The MoE layer: route, dispatch, experts, combine. The only place where the four meet.

    x_SBD -> gate -> Choice -> Routing -> dispatch (all-to-all over ep) -> rows_RD -> experts -> combine -> y_SBD
        \\--> shared expert (every token) ------------------------------------------- + or learned weights -> +

With a learned coefficient the two outputs are weighed instead of added (``moe/residual.py``). Transfers are under way
while something else is computed: the shared expert, or, with the tokens in parts, the experts of another part.

    part 1   dispatch | experts  | combine
    part 2              dispatch | experts | combine

Where whole samples take turns (``parallel/turns.py``), a layer has one part, and the other samples have the next turn
while its tokens travel.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from megatron_moe.config.schema import ModelConfig, MoEConfig
from megatron_moe.kernels.selection import choose
from megatron_moe.moe.capacity import slots_may_be_empty
from megatron_moe.moe.dispatchers import Dispatched, build_dispatcher
from megatron_moe.moe.experts import Experts
from megatron_moe.moe.gate import Gate
from megatron_moe.moe.losses import attach_loss
from megatron_moe.moe.replay import decided, replaying
from megatron_moe.moe.residual import ResidualCoefficient
from megatron_moe.moe.routing import flatten, split_tokens
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.tokens import TokenBatch
from megatron_moe.parallel.turns import Steps, finished
from megatron_moe.parallel.weight_gradients import WeightGradientQueue

P = ParamSpec("P")
T = TypeVar("T")


class MoELayer(nn.Module):
    """Routed experts in place of a feed-forward layer. Tokens without an expert get zero: the residual carries them.

    Args:
        shared_expert: module for the experts that see every token, or None; built by the model, which owns dense
            feed-forward layers.
    """

    def __init__(
        self,
        model: ModelConfig,
        moe: MoEConfig,
        layer_id: int,
        ctx: ParallelContext,
        dtype: torch.dtype,
        *,
        output_std: float,
        shared_expert: nn.Module | None = None,
        queue: WeightGradientQueue | None = None,
        recompute_activation: bool = False,
    ) -> None:
        super().__init__()
        assert moe.num_experts is not None
        self.config, self.ctx = moe, ctx
        self.kernels = choose(model.kernels, ctx.device, dtype)["permutation"]
        self.list_copies = flatten  # a dry run, which has no numbers, lists others
        self.gate = Gate(model, moe, layer_id, ctx, dtype)
        self.experts = Experts(model, moe, ctx, dtype, output_std, queue, recompute_activation)
        self.num_parts = 1 if moe.moe_overlap_attention else moe.moe_overlap_degree
        for weight in (self.experts.fc1, self.experts.fc2):
            weight.uses_per_pass = self.num_parts
        self.shared_expert = shared_expert
        self.coefficient = ResidualCoefficient(model, ctx, dtype) if moe.moe_residual_coefficient else None
        self.dispatcher = build_dispatcher(
            moe.moe_token_dispatcher_type, moe.num_experts, ctx, deduplicate=moe.moe_dispatch_deduplicate
        )

    def forward(self, x_SBD: Tensor, tokens: TokenBatch) -> Tensor:
        """x [S', B, D], the normalised rows of the residual stream -> y [S', B, D], without the residual."""
        return finished(self.steps(x_SBD, tokens))

    def steps(self, x_SBD: Tensor, tokens: TokenBatch) -> Steps:
        """The same as a computation that can take turns with others: while its tokens travel, out and back."""
        choice, loss = self.gate(x_SBD, tokens)
        has_padding, training = tokens.padding_SB is not None, tokens.step.training
        has_holes = slots_may_be_empty(self.gate.router, self.config, has_padding, training)
        routing = self.list_copies(choice, has_holes, self.kernels)
        chunks = split_tokens(routing, x_SBD.flatten(0, 1), self.num_parts)
        sent_bytes, arriving = self._counted(self.dispatcher.dispatch, *chunks[0])
        # While the tokens travel; all that reads x does so before the first turn ends, and with it the region in which
        # --recompute-modules layernorm forgets x.
        shared_SBD = None if self.shared_expert is None else self.shared_expert(x_SBD)
        shares = None if self.coefficient is None else self.coefficient(x_SBD)
        yield
        returning = []
        for following in [*chunks[1:], None]:
            dispatched = arriving()
            if following is not None:  # travels while this part's experts compute
                num_bytes, arriving = self._counted(self.dispatcher.dispatch, *following)
                sent_bytes += num_bytes
            rows_RD = self.experts(dispatched.rows_RD, dispatched.weights_R, dispatched.counts_L)
            num_bytes, arrived = self._counted(self._send_back, rows_RD, dispatched)
            sent_bytes += num_bytes
            returning.append(arrived)
        yield
        parts = [arrived() for arrived in returning]
        y_SBD = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(x_SBD.shape)
        self.gate.dispatch_bytes[tokens.microbatch] = decided(lambda: sent_bytes)
        if shared_SBD is not None:
            y_SBD = y_SBD + shared_SBD if shares is None else shares[0] * y_SBD + shares[1] * shared_SBD
        return y_SBD if loss is None else attach_loss(y_SBD, loss)

    def _send_back(self, rows_RD: Tensor, dispatched: Dispatched) -> Callable[[], Tensor]:
        """Begins at once. In a recomputation it begins when asked for, and nobody asks but for a learned coefficient:
        else nothing is kept for the backward pass behind the last part's experts, and there a recomputation ends."""
        if replaying():
            return lambda: self.dispatcher.combine(rows_RD, dispatched)()
        return self.dispatcher.combine(rows_RD, dispatched)

    def _counted(self, begin: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[int, T]:
        """Begin a transfer; also the bytes that this sends over the axes of the expert mesh on which tokens travel."""
        before = self.ctx.traffic.bytes_on(("ep", "etp"))
        begun = begin(*args, **kwargs)
        return self.ctx.traffic.bytes_on(("ep", "etp")) - before, begun
