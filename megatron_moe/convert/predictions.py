"""Modules of multi-token prediction for a model that comes without them: they begin as copies of what it has.

    mtp.k.layer.*          the model's last layer
    mtp.k.norm             the norm before the output layer
    mtp.k.hidden_norm, mtp.k.embedding_norm    1 (LayerNorm: biases 0)
    mtp.k.projection       [0 | 1]: the hidden state passes, the embedding's half begins at zero

So module 0 begins as the last layer applied once more, and learns to use the tokens ahead; gradients reach all of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_moe.checkpoint.streaming import Piece
from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.convert.moving import Plan
from megatron_moe.convert.table import Operation, Step

PREFIX = "mtp."


def with_copied_modules(plan: Plan, ours: Mapping[str, Described], num_layers: int) -> Plan:
    """A plan of the model without modules, and the steps that make them.

    Args:
        ours: the tensors of the model with modules.
    """
    steps: dict[str, list[Step]] = {}
    for step in plan.steps:
        steps.setdefault(step.ours.name, []).append(step)
    made: list[Step] = []
    for name, described in ours.items():
        if not name.startswith(PREFIX):
            continue
        part = name.split(".", 2)[2]
        original = f"layers.{num_layers - 1}.{part.removeprefix('layer.')}" if part.startswith("layer.") else None
        if part.startswith("norm."):
            original = f"output.{part}"
        if original is not None:
            made += [replace(step, ours=Piece(name, step.ours.row)) for step in steps[original]]
        else:
            made.append(Step(Piece(name), (), _constant(_initial(part, described))))
    ordered = sorted((*plan.steps, *made), key=lambda step: -ours[step.ours.name].dtype.itemsize)
    return Plan(tuple(ordered), plan.copies)


def _initial(part: str, described: Described) -> Tensor:
    if part == "projection.weight":
        hidden_size = described.shape[0]
        return torch.cat([torch.zeros(hidden_size, hidden_size), torch.eye(hidden_size)], 1)
    return torch.ones(described.shape) if part.endswith("weight") else torch.zeros(described.shape)


def _constant(value: Tensor) -> Operation:
    def nothing_to_take(theirs: Sequence[Tensor]) -> Tensor:
        assert not theirs
        return value

    return Operation(nothing_to_take, lambda ours: [])
