"""What happened in the MoE layers during a step, for the whole model.

Every gate leaves sums per micro-batch; here they are added over micro-batches and ranks by one reduction of fixed
shape, so that a stage without MoE layers takes part like all others. Layers with fewer experts than others (a pyramid)
leave the last columns empty. Modules of multi-token prediction are further layers, numbered after the model's:

    layer | chosen e0 e1 .. | kept e0 e1 .. | entropy, gates, tokens, bytes | balance losses | bias range
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.moe.gate import Gate
from megatron_moe.parallel import collectives
from megatron_moe.training.build import Machine

_NUM_SCALARS = 4  # entropy, gate, tokens, bytes


@dataclass(frozen=True)
class MoEStatistics:
    """Per MoE layer, of the global batch.

    Attributes:
        num_experts: routed experts of each MoE layer by its number; the E of the tables is the largest.
        chosen_LE: copies per expert before capacity; ``kept_LE`` after it.
        entropy_L: mean entropy of the scores, nats; ``gate_L``: mean combine weight of a kept copy.
        dispatch_bytes_L: bytes that all ranks sent in the forward pass to bring tokens to experts and back; in the
            backward pass the gradients take the same ways.
        losses_L: each balance loss before its coefficient.
        bias_range_L: largest minus smallest selection bias; None without bias.
    """

    num_experts: dict[int, int]
    chosen_LE: Tensor
    kept_LE: Tensor
    entropy_L: Tensor
    gate_L: Tensor
    dispatch_bytes_L: Tensor
    losses_L: dict[str, Tensor]
    bias_range_L: Tensor | None

    def scalars(self) -> dict[str, float]:
        """Numbers for a record: means over layers; of imbalance and bias range the largest.

        All that is here is the same under every layout. Bytes are not, and are in :meth:`by_layer` alone.
        """
        if not self.num_experts:
            return {}
        found = {name: float(loss_L.mean()) for name, loss_L in self.losses_L.items()}
        found["dropped_share"] = 1.0 - float(self.kept_LE.sum()) / max(float(self.chosen_LE.sum()), 1.0)
        found["router_entropy"] = float(self.entropy_L.mean())
        found["mean_gate"] = float(self.gate_L.mean())
        found["load_max_over_mean"] = float(self._max_over_mean_L().max())
        if self.bias_range_L is not None:
            found["bias_range"] = float(self.bias_range_L.max())
        return found

    def by_layer(self) -> dict[str, dict[str, float]]:
        """The same numbers of each layer, and the bytes it sent."""
        if not self.num_experts:
            return {}
        chosen_L, kept_L = self.chosen_LE.sum(1).double(), self.kept_LE.sum(1).double()
        columns = dict(self.losses_L)
        columns["dropped_share"] = 1.0 - kept_L / chosen_L.clamp(min=1)
        columns["router_entropy"] = self.entropy_L
        columns["mean_gate"] = self.gate_L
        columns["load_max_over_mean"] = self._max_over_mean_L()
        if self.bias_range_L is not None:
            columns["bias_range"] = self.bias_range_L
        columns["dispatch_bytes"] = self.dispatch_bytes_L
        lists = {name: values_L.tolist() for name, values_L in columns.items()}
        return {
            f"layer {layer}": {name: values[row] for name, values in lists.items()}
            for row, layer in enumerate(self.num_experts)
        }

    def expert_load(self) -> dict[str, list[float]]:
        """Share of the copies that each expert was chosen for, by layer."""
        shares = self.chosen_LE.double() / self.chosen_LE.sum(1, keepdim=True).clamp(min=1)
        rows = zip(self.num_experts.items(), shares.tolist(), strict=True)
        return {f"layer {layer}": row[:num_experts] for (layer, num_experts), row in rows}

    def _max_over_mean_L(self) -> Tensor:
        chosen_LE, num_experts_L = self.chosen_LE.double(), torch.tensor(list(self.num_experts.values()))
        return chosen_LE.amax(1) * num_experts_L / chosen_LE.sum(1).clamp(min=1)


@torch.no_grad()
def collect(machine: Machine) -> MoEStatistics:
    """Add up the statistics of the last step over micro-batches, ranks and stages; the same on every rank."""
    config, ctx = machine.config, machine.ctx
    per_layer = config.moe.experts_per_layer(config.model.num_layers)
    per_layer += per_layer[-1:] * (config.model.mtp_num_layers or 0)  # as the last layer, MoE or dense
    num_experts = {layer: count for layer, count in enumerate(per_layer) if count}
    most = max(per_layer, default=0)
    loss_names = [n for n in config.moe.moe_router_load_balancing_type if n != "none"]
    if config.moe.moe_z_loss_coeff is not None:
        loss_names.append("z_loss")
    sizes = [most, most, _NUM_SCALARS, len(loss_names), 1]
    table = torch.zeros(len(num_experts), sum(sizes), dtype=torch.float64, device=ctx.device)
    for row, layer in enumerate(num_experts):
        gate = machine.gates.get(layer)
        if gate is not None:
            parts = _row(gate, loss_names, first_of_stage=ctx.stage.rank == 0)
            for columns, part in zip(table[row].split(sizes), parts, strict=True):
                columns[: part.numel()] = part
    table = collectives.sum_(table, ctx.world).cpu()
    chosen, kept, scalars, losses, bias = table.split(sizes, dim=1)
    return MoEStatistics(
        num_experts=num_experts,
        chosen_LE=chosen.long(),
        kept_LE=kept.long(),
        entropy_L=scalars[:, 0] / scalars[:, 2].clamp(min=1),
        gate_L=scalars[:, 1] / kept.sum(1).clamp(min=1),
        dispatch_bytes_L=scalars[:, 3].long(),
        losses_L=dict(zip(loss_names, losses.T, strict=True)),
        bias_range_L=bias[:, 0] if config.moe.moe_router_enable_expert_bias else None,
    )


def _row(gate: Gate, loss_names: list[str], first_of_stage: bool) -> tuple[Tensor, ...]:
    """Sums of one layer on this rank, in the order of the table, float64.

    What all ranks of a stage share is given by the first alone.
    """
    chosen, kept, scalars, losses = [], [], [], []
    for microbatch, statistics in gate.statistics.items():
        sums = statistics.routing
        chosen.append(sums.chosen_E.double())
        kept.append(sums.kept_E.double())
        sent = torch.full_like(sums.tokens, gate.dispatch_bytes[microbatch])
        scalars.append(_stacked([sums.entropy, sums.gate, sums.tokens, sent], like=sums.tokens))
        losses.append(_stacked([statistics.losses[name] for name in loss_names], like=sums.tokens))
    bias = torch.zeros(1, dtype=torch.float64, device=gate.weight.device)
    if gate.bias_E is not None and first_of_stage:
        bias = (gate.bias_E.max() - gate.bias_E.min()).double().reshape(1)
    return *(torch.stack(rows).sum(0) for rows in (chosen, kept, scalars, losses)), bias


def _stacked(scalars: list[Tensor], like: Tensor) -> Tensor:
    """[n] float64 of n scalars, on the device of ``like``; n may be 0."""
    values = [like.new_zeros(0, dtype=torch.float64), *(scalar.double().reshape(1) for scalar in scalars)]
    return torch.cat(values)
