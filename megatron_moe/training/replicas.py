"""Whether ranks that hold the same weights hold the same bits: a digest of each, compared across ranks.

    rank 0   layers.0.attention.qkv  9f31..     layers.0.moe.experts.fc1 [experts 0-3]  77ab..
    rank 1   layers.0.attention.qkv  9f31..     layers.0.moe.experts.fc1 [experts 4-7]  02d4..
    rank 2   layers.0.attention.qkv  1c80.. <-  layers.0.moe.experts.fc1 [experts 0-3]  77ab..

A replica that has drifted (a faulty device, a missing reduction) trains on silently otherwise, since all ranks get the
same gradients. Digests are made where the weights are and see any single change of a bit.
"""

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_moe.training.build import Machine
from megatron_moe.training.faults import SharedError

_BLOCK = 1 << 24
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[str, tuple[tuple[int, int], ...], int]
"""Logical name, slices of the logical tensor, first element: what a digest is of."""


@torch.no_grad()
def digest(tensor: Tensor) -> int:
    """64 bits that change with any one element: the sum over elements of bits times an odd number of the place."""
    bits = tensor.reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _BLOCK):
        block = bits[start : start + _BLOCK].to(torch.int64)
        places = torch.arange(start, start + block.numel(), device=tensor.device)
        total += (block * (places * 0x9E3779B97F4A7C1 * 2 + 1)).sum()
    return int(total)


def digests(machine: Machine) -> dict[Key, int]:
    """Of all weights on this rank, in the model's order: whole, or, where they are sharded, the range that is kept."""
    found: dict[Key, int] = {}
    for stage in machine.stages.values():
        sharded = stage.reducer.sharding.parameters
        for bucket in stage.reducer.buckets:
            ranges = bucket.pieces(machine.ctx) if sharded and bucket.num_shards > 1 else ()
            weights = [(piece.parameter, piece.start, piece.weight) for piece in ranges] or [
                (parameter, 0, parameter.data) for parameter in bucket.parameters if not ranges
            ]
            for parameter, start, weight in weights:
                place = tuple((s.start, s.stop) for s in parameter.spec.storage_slices(machine.ctx))
                found[parameter.spec.name, place, start] = digest(weight)
    for layer, gate in machine.gates.items():
        if gate.bias_E is not None:
            found[f"layers.{layer}.moe.gate.bias_E", (), 0] = digest(gate.bias_E)
    return found


def check_replicas(machine: Machine, iteration: int) -> None:
    """Compare all replicas of all weights; call it on all ranks.

    Raises:
        SharedError: naming the first parameter, in the model's order, and the ranks whose bits differ.
    """
    world = machine.ctx.world
    mine = digests(machine)
    everyone = [mine]
    if world.size > 1:
        everyone = [{} for _ in world.ranks]
        dist.all_gather_object(everyone, mine, group=world.group)
    problem = first_difference(everyone)
    if problem is not None:
        raise SharedError(
            f"iteration {iteration}: {problem}. A device or its memory is at fault, or a reduction is missing; "
            "checkpoints after the last check that passed are not to be trusted."
        )


def first_difference(everyone: list[dict[Key, int]]) -> str | None:
    """The first weight that two ranks hold with different bits, in words; None if there is none."""
    for key in dict.fromkeys(key for found in everyone for key in found):
        holders = {rank: found[key] for rank, found in enumerate(everyone) if key in found}
        (usual, votes), *others = Counter(holders.values()).most_common()
        if not others:
            continue
        odd = ", ".join(str(rank) for rank, value in holders.items() if value != usual)
        same = ", ".join([str(rank) for rank, value in holders.items() if value == usual][:4])
        unsure = " (which of them is right cannot be told)" if votes == len(holders) - votes else ""
        same += ", ..." * (votes > 4)
        return f"the replicas of {key[0]} differ: rank {odd} has other bits than rank {same}{unsure}"
    return None
