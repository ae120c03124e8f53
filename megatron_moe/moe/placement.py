"""Where experts live: DeepSeek's EPLB, a pure function from loads to a table of replicas.

::

    loads of E experts --1. groups to nodes--> --2. replicate the busiest--> --3. replicas to devices--> table

    packing: heaviest item first, into the lightest pack that still has room; every pack gets as many items
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Placement(NamedTuple):
    """Physical experts, numbered device by device. P physical experts, E logical ones, L layers.

    Attributes:
        logical_ids_LP: int64, the logical expert that each physical expert is a copy of.
        physical_ids_LEX: int64, the physical experts of each logical one, padded with -1.
        copies_LE: int64, number of copies.
    """

    logical_ids_LP: Tensor
    physical_ids_LEX: Tensor
    copies_LE: Tensor


def place_experts(loads_LE: Tensor, num_physical: int, num_groups: int, num_nodes: int, num_devices: int) -> Placement:
    """Replicate and place experts so that devices are loaded evenly (github.com/deepseek-ai/EPLB).

    If nodes divide groups, the experts of a group stay on one node (for group-limited routing); otherwise
    placement is global, which is the same with one group and one node.

    Args:
        loads_LE: load of each logical expert, any non-negative number.
        num_physical: experts including copies, a multiple of ``num_devices``.
        num_groups: groups of experts, contiguous blocks.

    Raises:
        ValueError: if a number does not divide another or there are too few physical experts.
    """
    num_experts = loads_LE.shape[1]
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    for what, whole, part in (
        ("logical experts into groups", num_experts, num_groups),
        ("devices into nodes", num_devices, num_nodes),
        ("physical experts into devices", num_physical, num_devices),
    ):
        if whole % part:
            raise ValueError(f"Expert placement cannot divide {whole} {what}: {part} does not divide {whole}.")
    if num_physical < num_experts:
        raise ValueError(f"Expert placement needs a place for each of {num_experts} experts, has {num_physical}.")
    rows = [
        _place_layer([float(load) for load in loads_E], num_physical, num_groups, num_nodes, num_devices)
        for loads_E in loads_LE
    ]
    copies = [[row.count(e) for e in range(num_experts)] for row in rows]
    most = max(max(c) for c in copies)
    physical = [
        [([p for p, e in enumerate(row) if e == logical] + [-1] * most)[:most] for logical in range(num_experts)]
        for row in rows
    ]
    return Placement(torch.tensor(rows), torch.tensor(physical), torch.tensor(copies))


def device_loads(loads_LE: Tensor, placement: Placement, num_devices: int) -> Tensor:
    """[L, devices]: load of each device when the copies of an expert share its load equally."""
    shares_LE = loads_LE / placement.copies_LE
    return shares_LE.gather(1, placement.logical_ids_LP).unflatten(1, (num_devices, -1)).sum(dim=-1)


def _place_layer(loads: list[float], num_physical: int, num_groups: int, num_nodes: int, num_devices: int) -> list[int]:
    """Logical expert of each physical expert of one layer, device by device."""
    group_size = len(loads) // num_groups
    group_loads = [sum(loads[g * group_size : (g + 1) * group_size]) for g in range(num_groups)]
    placed: list[int] = []
    for groups in pack_equally(group_loads, num_nodes):
        experts = [g * group_size + i for g in groups for i in range(group_size)]
        copies = _replicate([loads[e] for e in experts], num_physical // num_nodes)
        share = [loads[e] / copies.count(i) for i, e in enumerate(experts)]
        for device in pack_equally([share[i] for i in copies], num_devices // num_nodes):
            placed += [experts[copies[c]] for c in device]
    return placed


def _replicate(loads: list[float], num_physical: int) -> list[int]:
    """Expert behind each copy: first one each, then, again and again, the one whose copies are busiest."""
    copies, counts = list(range(len(loads))), [1] * len(loads)
    while len(copies) < num_physical:
        busiest = max(range(len(loads)), key=lambda e: loads[e] / counts[e])
        copies.append(busiest)
        counts[busiest] += 1
    return copies


def pack_equally(weights: list[float], num_packs: int) -> list[list[int]]:
    """Pack items, as many into each pack: heaviest first, into the lightest pack with room.

    The lower index wins ties. With one item per pack there is nothing to decide, and item i goes to pack i.
    """
    room = len(weights) // num_packs
    if room == 1:
        return [[i] for i in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    totals = [0.0] * num_packs
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = min((p for p in range(num_packs) if len(packs[p]) < room), key=totals.__getitem__)
        packs[lightest].append(item)
        totals[lightest] += weights[item]
    return packs
