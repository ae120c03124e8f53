"""The gate of an MoE layer: logits, decision, balance losses, statistics. Everything that looks at scores is here.

    x_SBD --router weight, float32--> logits_SBE --ROUTERS[...]--> Choice of this rank's tokens

A decision that needs a whole logical group (expert choice, Sinkhorn, GShard, any capacity) is made on the gathered
logits, the same on every rank of the group, and each rank keeps its own tokens. All other decisions are made where the
token is. Balance losses need only sums: counts are added over the ranks that share a sequence. Those of the global
batch are known when the step is over; a loss that asks for them gets the last step's.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_moe.config.schema import ModelConfig, MoEConfig
from megatron_moe.kernels.selection import choose
from megatron_moe.moe.capacity import decide, needs_whole_groups
from megatron_moe.moe.losses import (
    BALANCE_LOSSES,
    BalanceLoss,
    BalanceStats,
    balance_loss,
    by_device,
    counted_ids,
    z_loss_sum,
)
from megatron_moe.moe.replay import decided
from megatron_moe.moe.routers import ROUTERS
from megatron_moe.moe.routing import Choice, RouterInputs, RoutingSums, check_finite, multi_hot, routing_sums
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sharding import Initial, ShardSpec, empty_parameter
from megatron_moe.parallel.tokens import TokenBatch


class Statistics(NamedTuple):
    """What happened in one micro-batch on this rank: sums, to be added over ranks and micro-batches."""

    routing: RoutingSums
    losses: dict[str, Tensor]  # each balance loss before its coefficient, this rank's part
    num_nonfinite: Tensor


class Gate(nn.Module):
    """Router weight [E, D] in float32 (float64), bias of the loss-free balancing, and the decision."""

    bias_E: Tensor | None
    batch_load_E: Tensor | None  # copies of each expert per token of the last step's global batch

    def __init__(
        self, model: ModelConfig, moe: MoEConfig, layer_id: int, ctx: ParallelContext, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert moe.num_experts is not None
        self.config, self.layer_id, self.num_experts = moe, layer_id, moe.num_experts
        self.router = ROUTERS[moe.moe_router]
        self.kernels = choose(model.kernels, ctx.device, dtype)["scoring"]
        self.dtype = torch.promote_types(dtype, torch.float32)
        std = model.init_method_std if moe.moe_router_init_std is None else moe.moe_router_init_std
        rows = moe.num_experts * self.router.logits_per_expert
        spec = ShardSpec((rows, model.hidden_size), partial_tp=True, initial=Initial("normal", std))
        self.weight = empty_parameter(spec, ctx, self.dtype)
        zero = ShardSpec((rows,), partial_tp=True, initial=Initial("constant", 0.0), decay=False)
        self.logit_bias = empty_parameter(zero, ctx, self.dtype) if model.add_bias_linear else None
        bias = torch.zeros(moe.num_experts, dtype=self.dtype, device=ctx.device)
        self.register_buffer("bias_E", bias if moe.moe_router_enable_expert_bias else None)
        named = (BALANCE_LOSSES[name] for name in moe.moe_router_load_balancing_type)
        uses_batch = any(loss is not None and loss.unit == "batch" for loss in named)
        uniform = torch.full_like(bias, moe.moe_router_topk / moe.num_experts)
        self.register_buffer("batch_load_E", uniform if uses_batch else None)
        # By micro-batch and overwritten: a recomputed forward cannot count twice.
        self.statistics: dict[int, Statistics] = {}
        # Bytes sent to bring a micro-batch to its experts and back. Apart: a recomputation stops before it knows them.
        self.dispatch_bytes: dict[int, int] = {}

    def forward(self, x_SBD: Tensor, tokens: TokenBatch) -> tuple[Choice, Tensor | None]:
        """Decide for this rank's tokens.

        Args:
            x_SBD: [S', B, D] residual-stream rows, normalised.

        Returns:
            choice: over [1, T, K] with T = S' B, in the order of the flattened rows.
            loss: this rank's part of all balance losses, ready to be added to the training loss; None in evaluation.
        """
        logits_SBE = F.linear(self._input(x_SBD, tokens), self.weight, self.logit_bias)
        training = tokens.step.training
        if needs_whole_groups(self.router, self.config, training):
            choice = self._decide_in_groups(logits_SBE, tokens)
        else:
            logits_1TE = logits_SBE.flatten(0, 1).unsqueeze(0)
            choice = self._decide(logits_1TE, tokens, lambda whole_SB: tokens.local(whole_SB).view(1, -1))
        losses = self._losses(choice, logits_SBE.flatten(0, 1), tokens)
        valid_GT = None if tokens.padding_SB is None else ~tokens.local(tokens.padding_SB).view(1, -1)
        self.statistics[tokens.microbatch] = Statistics(
            routing_sums(choice, valid_GT), {k: v.detach() for k, v in losses.items()}, check_finite(logits_SBE)
        )
        return choice, self._total(losses) if training else None

    @property
    def coefficients(self) -> dict[str, float]:
        """Coefficient of each balance loss by name."""
        named = zip(self.config.moe_router_load_balancing_type, self.config.moe_aux_loss_coeff, strict=False)
        coefficients = {name: value for name, value in named if BALANCE_LOSSES[name] is not None}
        if self.config.moe_z_loss_coeff is not None:
            coefficients["z_loss"] = self.config.moe_z_loss_coeff
        return coefficients

    def _input(self, x_SBD: Tensor, tokens: TokenBatch) -> Tensor:
        """The router's input in its own precision (Switch's selective precision), jittered in training."""
        x_SBD = x_SBD.to(self.dtype)
        eps = self.config.moe_input_jitter_eps
        if eps is None or not tokens.step.training:
            return x_SBD
        index_SB = tokens.local(tokens.index_SB)
        uniform_SBD = tokens.uniform(index_SB, self.layer_id, "jitter", x_SBD.shape[-1], self.dtype)
        return x_SBD * (1 - eps + 2 * eps * uniform_SBD)

    def _decide(self, logits_GTE: Tensor, tokens: TokenBatch, arrange: Callable[[Tensor], Tensor]) -> Choice:
        """The pure decision, then the capacity. ``arrange`` brings a whole-sequence tensor [S, B] to [G, T]."""
        training = tokens.step.training
        index_GT = arrange(tokens.index_SB)

        def uniform(use: str, num_columns: int) -> Tensor:
            return tokens.uniform(index_GT, self.layer_id, use, num_columns, self.dtype)

        inputs = RouterInputs(
            logits_GTE=logits_GTE,
            valid_GT=None if tokens.padding_SB is None else ~arrange(tokens.padding_SB),
            bias_E=self.bias_E,
            vocab_ids_GT=arrange(tokens.ids_SB),
            uniform=uniform,
            training=training,
            kernels=self.kernels,
        )
        return decide(self.router, inputs, self.config)

    def _decide_in_groups(self, logits_SBE: Tensor, tokens: TokenBatch) -> Choice:
        """Gather the logits of whole groups in logical order, decide, and keep this rank's tokens."""
        layout = tokens.layout
        whole_BSE = layout.gather(logits_SBE).transpose(0, 1)
        batch, seq_length = whole_BSE.shape[:2]
        group = group_tokens(self.config.moe_group_size, seq_length, batch)
        logits_GTE = whole_BSE.reshape(-1, group, whole_BSE.shape[-1])
        choice = self._decide(logits_GTE, tokens, lambda whole_SB: whole_SB.T.reshape(-1, group))

        def mine(value_GTX: Tensor) -> Tensor:
            value_SBX = value_GTX.reshape(batch, seq_length, -1).transpose(0, 1)
            if not layout.whole:
                value_SBX = value_SBX.index_select(0, layout.local_S)
            return value_SBX.flatten(0, 1).unsqueeze(0)

        return Choice(
            expert_ids_GTK=mine(choice.expert_ids_GTK),
            weights_GTK=mine(choice.weights_GTK),
            scores_GTE=mine(choice.scores_GTE),
            chosen_ids_GTK=mine(choice.chosen_ids_GTK),
            plain_ids_GTK=None if choice.plain_ids_GTK is None else mine(choice.plain_ids_GTK),
        )

    def _losses(self, choice: Choice, logits_TE: Tensor, tokens: TokenBatch) -> dict[str, Tensor]:
        """This rank's part of each balance loss, over the routed tokens of the global batch, before coefficients."""
        losses: dict[str, Tensor] = {}
        for name in self.coefficients:
            if name == "z_loss":
                valid_T = None if tokens.padding_SB is None else ~tokens.local(tokens.padding_SB).flatten()
                losses[name] = z_loss_sum(logits_TE[:, : self.num_experts], valid_T) / tokens.step.num_routed_tokens
            else:
                loss = BALANCE_LOSSES[name]
                assert loss is not None
                losses[name] = self._balance_loss(loss, choice, tokens)
        return losses

    def _balance_loss(self, loss: BalanceLoss, choice: Choice, tokens: TokenBatch) -> Tensor:
        """Token-weighted mean over the logical groups: sum over g of tokens_g * loss_g / tokens of the global batch."""
        if loss.unit == "batch":
            return self._batch_loss(loss, choice, tokens)
        size = "sequence" if loss.unit == "sequence" else self.config.moe_group_size
        group_ids_T, num_groups = _group_ids(tokens, size)
        chosen_TE = multi_hot(counted_ids(choice, loss), self.num_experts).squeeze(0)
        valid_T1 = torch.ones_like(chosen_TE[:, :1])
        if tokens.padding_SB is not None:
            valid_T1 = (~tokens.local(tokens.padding_SB)).view(-1, 1).to(chosen_TE.dtype)
        columns = [chosen_TE, valid_T1]
        if loss.devices:
            columns.append(by_device(chosen_TE, self.config).amax(-1))
        per_token = torch.cat(columns, 1)
        sums = per_token.new_zeros(num_groups, per_token.shape[1]).index_add_(0, group_ids_T, per_token)
        sums = decided(lambda: collectives.sum_(sums, tokens.layout.axis))
        stats = BalanceStats(
            counts_GE=sums[:, : self.num_experts],
            device_tokens_GD=sums[:, self.num_experts + 1 :] if loss.devices else None,
            tokens_G=sums[:, self.num_experts],
        )
        scores_TE = choice.scores_GTE.squeeze(0)
        score_sum_GE = scores_TE.new_zeros(num_groups, self.num_experts).index_add(0, group_ids_T, scores_TE)
        loss_G = balance_loss(loss.coefficients(stats, self.config), score_sum_GE)
        return (loss_G * stats.tokens_G).sum() / tokens.step.num_routed_tokens

    def _batch_loss(self, loss: BalanceLoss, choice: Choice, tokens: TokenBatch) -> Tensor:
        """The global batch as one group. Its counts are the last step's load, so that micro-batches cannot matter."""
        assert self.batch_load_E is not None
        tokens_1 = self.batch_load_E.new_full((1,), tokens.step.num_routed_tokens)
        stats = BalanceStats(self.batch_load_E.unsqueeze(0) * tokens_1, None, tokens_1)
        score_sum_1E = choice.scores_GTE.sum((0, 1)).unsqueeze(0)
        return balance_loss(loss.coefficients(stats, self.config), score_sum_1E).squeeze(0)

    def _total(self, losses: dict[str, Tensor]) -> Tensor | None:
        coefficients = self.coefficients
        if not losses:
            return None
        return torch.stack([coefficients[name] * value for name, value in losses.items()]).sum()


def group_tokens(group_size: str, seq_length: int, batch: int) -> int:
    """Tokens of a logical group: ``--moe-group-size`` read.

    A sequence that the size does not fit, as the growing one of generation, is a group by itself; training checks it.
    """
    group = seq_length if group_size == "sequence" else int(group_size)
    fits = seq_length % group == 0 or (group % seq_length == 0 and seq_length * batch % group == 0)
    return group if fits else seq_length


def _group_ids(tokens: TokenBatch, group_size: str) -> tuple[Tensor, int]:
    """Group of each of this rank's tokens, and the number of groups in the micro-batch."""
    seq_length, batch = tokens.ids_SB.shape
    group = group_tokens(group_size, seq_length, batch)
    position_BS = torch.arange(seq_length * batch, device=tokens.ids_SB.device).view(batch, seq_length)
    return tokens.local(position_BS.T // group).flatten(), seq_length * batch // group
