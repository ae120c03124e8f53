"""One optimizer step: count tokens, run the schedule, sum gradients, clip, update, balance.

The loss is a sum over tokens divided once by the number of valid tokens of the global batch, so no layout and no number
of micro-batches can weigh a token differently. There is no other factor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.data.batch import Batch
from megatron_moe.model.decoder import Decoder
from megatron_moe.moe.bias import update_bias
from megatron_moe.moe.gate import Gate
from megatron_moe.optim.grad_norm import clip, gradient_norm
from megatron_moe.parallel import collectives
from megatron_moe.parallel.tokens import SequenceLayout, StepInfo, TokenBatch
from megatron_moe.training.agreement import summed
from megatron_moe.training.build import Machine


@dataclass(frozen=True)
class StepResult:
    """What a step reports, the same on every rank; ``applied`` unless it was refused before the weights changed.

    ``mtp_losses`` are those of the modules of multi-token prediction, before their weight.
    """

    loss: float
    grad_norm: float
    applied: bool = True
    mtp_losses: tuple[float, ...] = ()


def token_batches(batches: Sequence[Batch], machine: Machine, iteration: int, *, training: bool) -> list[TokenBatch]:
    """Micro-batches for the model, with the token counts of the global batch."""
    loss_tokens = sum(float(batch.loss_mask.sum()) for batch in batches)
    routed_tokens = sum(float((~batch.padding_mask).sum()) for batch in batches)
    num_loss, num_routed = summed([loss_tokens, routed_tokens], machine.ctx.dp, machine.ctx.device)
    step = StepInfo(machine.config.training.seed, iteration, training, max(num_loss, 1.0), max(num_routed, 1.0))
    attend_within = machine.config.data.reset_attention_mask
    return [_token_batch(b, i, machine.layout, step, attend_within) for i, b in enumerate(batches)]


def _token_batch(
    batch: Batch, microbatch: int, layout: SequenceLayout, step: StepInfo, attend_within: bool
) -> TokenBatch:
    has_padding = bool(batch.padding_mask.any())  # still on the host: no wait for the device
    batch = batch.to(layout.ctx.device)
    return TokenBatch(
        ids_SB=batch.tokens.T,
        labels_SB=batch.labels.T,
        loss_mask_SB=batch.loss_mask.T,
        positions_SB=batch.position_ids.T,
        documents_SB=batch.document_ids.T if attend_within else None,
        padding_SB=batch.padding_mask.T if has_padding else None,
        sample_ids_B=batch.sample_ids,
        microbatch=microbatch,
        layout=layout,
        step=step,
    )


def total_loss(loss: Tensor, machine: Machine) -> float:
    """This rank's part of the loss (zero away from the last stage) -> the loss of the global batch, on every rank."""
    ctx = machine.ctx
    return float(collectives.sum_(collectives.sum_(loss, ctx.dp_cp), ctx.pp))


def prediction_losses(machine: Machine) -> tuple[float, ...]:
    """Losses of the modules of multi-token prediction in the last step, of the global batch, on every rank."""
    depth, ctx = machine.config.model.mtp_num_layers or 0, machine.ctx
    losses_D = torch.zeros(depth, dtype=torch.float64, device=ctx.device)
    for stage in machine.stages.values():
        assert isinstance(stage.module, Decoder)
        for part_D in stage.module.mtp_losses.values():
            losses_D += part_D
        stage.module.mtp_losses.clear()
    return tuple(collectives.sum_(collectives.sum_(losses_D, ctx.dp_cp), ctx.pp).tolist()) if depth else ()


def train_step(
    machine: Machine,
    batches: Sequence[Batch],
    iteration: int,
    learning_rate: float,
    accept: Callable[[float, float], bool] | None = None,
) -> StepResult:
    """Forward, backward and update for one global batch.

    Args:
        batches: this data rank's micro-batches, the same on all ranks that share it.
        iteration: number of the step, from 1; keys the random numbers.
        learning_rate: of this step.
        accept: told loss and gradient norm, says whether the step counts, the same on every rank. If not, weights,
            optimizer state and biases stay as they are.
    """
    tokens = token_batches(batches, machine, iteration, training=True)
    for stage in machine.stages.values():
        stage.module.train()
        stage.reducer.begin_step(len(tokens))
    for gate in machine.gates.values():
        gate.statistics.clear()
    loss_part = machine.runtime.run(machine.schedule(len(tokens), training=True), tokens)
    for stage in machine.stages.values():
        stage.reducer.finish()
    loss, norm = total_loss(loss_part, machine), gradient_norm(machine.pieces, machine.ctx)
    if accept is not None and not accept(loss, norm):
        for stage in machine.stages.values():
            stage.reducer.gather_weights()  # where each use gathers them, let go of what the last one left
        return StepResult(loss, norm, applied=False)
    if machine.config.optim.clip_grad > 0:
        clip(machine.pieces, norm, machine.config.optim.clip_grad)
    machine.optimizer.step(learning_rate)
    for stage in machine.stages.values():
        stage.reducer.gather_weights()
    update_loads(machine)
    return StepResult(loss, norm, mtp_losses=prediction_losses(machine))


@torch.no_grad()
def update_loads(machine: Machine) -> None:
    """What gates remember of a step: the selection bias and the load of the global batch.

    Once per step, from integer counts over the global batch, the same on every rank.
    """
    gates = [gate for gate in machine.gates.values() if gate.bias_E is not None or gate.batch_load_E is not None]
    if not gates:
        return
    mine = [_chosen(gate) for gate in gates]  # of different length where layers differ in experts
    summed = collectives.sum_(torch.cat(mine), machine.ctx.stage).split([counts_X.numel() for counts_X in mine])
    rate = machine.config.moe.moe_router_bias_update_rate
    for gate, counts_X in zip(gates, summed, strict=True):
        counts_E, num_tokens = counts_X[:-1], counts_X[-1]
        if gate.bias_E is not None:
            gate.bias_E.copy_(update_bias(gate.bias_E, counts_E, rate))
        if gate.batch_load_E is not None:
            gate.batch_load_E.copy_(counts_E.double() / num_tokens.clamp(min=1))


def _chosen(gate: Gate) -> Tensor:
    """[E + 1] int64: this rank's copies per expert before capacity, and its tokens, over all micro-batches."""
    sums = [statistics.routing for statistics in gate.statistics.values()]
    return torch.stack([torch.cat([s.chosen_E, s.tokens.reshape(1)]) for s in sums]).sum(0)


@torch.no_grad()
def evaluate_batch(machine: Machine, batches: Sequence[Batch], iteration: int) -> tuple[float, float]:
    """Loss of one global batch without training: (sum over tokens of the loss, number of tokens)."""
    tokens = token_batches(batches, machine, iteration, training=False)
    for stage in machine.stages.values():
        stage.module.eval()
    loss_part = machine.runtime.run(machine.schedule(len(tokens), training=False), tokens)
    num_tokens = tokens[0].step.num_loss_tokens
    return total_loss(loss_part, machine) * num_tokens, num_tokens
