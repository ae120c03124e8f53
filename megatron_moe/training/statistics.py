"""What happened in the MoE layers during a step: loads, drops, entropy, balance losses, for the whole model.

Every gate leaves sums per micro-batch; here they are added over micro-batches and ranks by one reduction of fixed
shape, so that a stage without MoE layers takes part like all others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.moe.gate import Gate
from megatron_moe.parallel import collectives
from megatron_moe.training.build import Machine

_NUM_SCALARS = 3  # entropy, gate, tokens


@dataclass(frozen=True)
class MoEStatistics:
    """Per MoE layer, of the global batch.

    Attributes:
        layers: layer numbers.
        chosen_LE: copies per expert before capacity; ``kept_LE`` after it.
        entropy_L: mean entropy of the scores, nats; ``gate_L``: mean combine weight of a kept copy.
        losses: each balance loss before its coefficient, mean over layers.
        bias_range_L: largest minus smallest selection bias; empty without bias.
    """

    layers: tuple[int, ...]
    chosen_LE: Tensor
    kept_LE: Tensor
    entropy_L: Tensor
    gate_L: Tensor
    losses: dict[str, float]
    bias_range_L: Tensor

    def scalars(self) -> dict[str, float]:
        """Numbers for a record: balance losses, dropped share, mean entropy, mean gate, imbalance, bias range."""
        if not self.layers:
            return {}
        chosen = self.chosen_LE.double()
        imbalance_L = chosen.amax(1) / chosen.mean(1).clamp(min=1e-12)
        found = dict(self.losses)
        found["dropped_share"] = 1.0 - float(self.kept_LE.sum()) / max(float(chosen.sum()), 1.0)
        found["router_entropy"] = float(self.entropy_L.mean())
        found["mean_gate"] = float(self.gate_L.mean())
        found["load_max_over_mean"] = float(imbalance_L.max())
        if self.bias_range_L.numel():
            found["bias_range"] = float(self.bias_range_L.max())
        return found

    def expert_load(self) -> dict[str, list[float]]:
        """Share of the copies that each expert was chosen for, by layer."""
        shares = self.chosen_LE.double() / self.chosen_LE.sum(1, keepdim=True).clamp(min=1)
        return {f"layer {layer}": row for layer, row in zip(self.layers, shares.tolist(), strict=True)}


@torch.no_grad()
def collect(machine: Machine) -> MoEStatistics:
    """Add up the statistics of the last step over micro-batches, ranks and stages; the same on every rank."""
    config, ctx = machine.config, machine.ctx
    layers = tuple(i for i, is_moe in enumerate(config.moe.layer_pattern(config.model.num_layers)) if is_moe)
    num_experts = config.moe.num_experts or 0
    loss_names = [n for n in config.moe.moe_router_load_balancing_type if n != "none"]
    if config.moe.moe_z_loss_coeff is not None:
        loss_names.append("z_loss")
    width = 2 * num_experts + _NUM_SCALARS + len(loss_names) + 1
    table = torch.zeros(len(layers), width, dtype=torch.float64, device=ctx.device)
    for row, layer in enumerate(layers):
        gate = machine.gates.get(layer)
        if gate is not None:
            table[row] = _row(gate, loss_names, first_of_stage=ctx.stage.rank == 0)
    table = collectives.sum_(table, ctx.world).cpu()
    chosen, kept, scalars, losses, bias = table.split(
        [num_experts, num_experts, _NUM_SCALARS, len(loss_names), 1], dim=1
    )
    has_bias = config.moe.moe_router_enable_expert_bias
    return MoEStatistics(
        layers=layers,
        chosen_LE=chosen.long(),
        kept_LE=kept.long(),
        entropy_L=scalars[:, 0] / scalars[:, 2].clamp(min=1),
        gate_L=scalars[:, 1] / kept.sum(1).clamp(min=1),
        losses=dict(zip(loss_names, losses.mean(0).tolist(), strict=True)) if layers else {},
        bias_range_L=bias[:, 0] if has_bias else bias.new_zeros(0),
    )


def _row(gate: Gate, loss_names: list[str], first_of_stage: bool) -> Tensor:
    """[width] float64 sums of one layer on this rank; what all ranks of a stage share is given by the first alone."""
    rows = []
    for statistics in gate.statistics.values():
        sums = statistics.routing
        scalars = torch.stack([sums.entropy.double(), sums.gate.double(), sums.tokens.double()])
        losses = [statistics.losses[name].double().reshape(1) for name in loss_names]
        rows.append(torch.cat([sums.chosen_E.double(), sums.kept_E.double(), scalars, *losses]))
    bias = torch.zeros(1, dtype=torch.float64, device=gate.weight.device)
    if gate.bias_E is not None and first_of_stage:
        bias = (gate.bias_E.max() - gate.bias_E.min()).double().reshape(1)
    return torch.cat([torch.stack(rows).sum(0), bias])
