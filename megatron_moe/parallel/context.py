"""The place of one process on the mesh: ``ctx.tp.size``, ``ctx.ep.rank``, ``ctx.dp_cp.group``.

The context is passed, never global. An axis of size 1 has no process group and every collective on it is the
identity, so the same model runs in one process with no process group at all (:meth:`ParallelContext.single`).
"""

from collections import defaultdict
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_moe.parallel.layout import GROUP_AXES, MeshSizes, coordinates, ends, peers
from megatron_moe.parallel.waiting import WaitClock


@dataclass
class Traffic:
    """Calls and bytes this rank sent, by (axis, collective). Bytes follow the ring formulas (docs/communication.md)."""

    calls: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    sent_bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    clock: WaitClock | None = None

    def waiting(self) -> AbstractContextManager[None]:
        """Around a call that waits for other ranks: its time counts, where somebody wants to know."""
        return nullcontext() if self.clock is None else self.clock.measure()

    def add(self, axis: str, collective: str, num_bytes: int) -> None:
        """Note one call."""
        self.calls[axis, collective] += 1
        self.sent_bytes[axis, collective] += num_bytes

    def bytes_on(self, axes: Collection[str]) -> int:
        """Bytes sent so far over some axes."""
        return sum(num for (axis, _), num in self.sent_bytes.items() if axis in axes)

    def clear(self) -> None:
        """Forget all counts."""
        self.calls.clear()
        self.sent_bytes.clear()


class Axis(NamedTuple):
    """One axis (or product of axes) of the mesh, as this rank sees it."""

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    traffic: Traffic


@dataclass(frozen=True)
class ParallelContext:
    """All axes of this rank.

    Composite axes: ``seq`` = tp x cp, ``dp_cp`` = dp x cp, ``stage`` = tp x cp x dp. ``ends`` joins the first and the
    last pipeline rank, which both hold a tied embedding; between them its size is 1.
    """

    sizes: MeshSizes
    rank: int
    device: torch.device
    traffic: Traffic
    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    seq: Axis
    dp_cp: Axis
    stage: Axis
    world: Axis
    etp: Axis
    ep: Axis
    edp: Axis
    ends: Axis

    @staticmethod
    def create(
        sizes: MeshSizes,
        *,
        rank: int | None = None,
        device: torch.device | str = "cpu",
        timeout: timedelta = timedelta(minutes=10),
        groups: dict[tuple[int, ...], dist.ProcessGroup] | None = None,
    ) -> "ParallelContext":
        """Make the groups of this rank; the default process group must exist unless the world is one rank.

        Args:
            sizes: the mesh; its world size must be that of the default group.
            rank: this rank; default: that of the default group.
            device: where tensors live.
            timeout: longest wait of any collective.
            groups: groups that exist already, by their ranks; new ones are added.
        """
        rank = rank if rank is not None else (dist.get_rank() if sizes.world > 1 else 0)
        groups = {} if groups is None else groups
        traffic = Traffic()
        axes = {}
        members = {name: peers(rank, name, sizes) for name in GROUP_AXES} | {"ends": ends(rank, sizes)}
        for name, ranks in members.items():
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = _new_group(ranks, timeout)
            axes[name] = Axis(name, len(ranks), ranks.index(rank), ranks, groups.get(ranks), traffic)
        return ParallelContext(sizes=sizes, rank=rank, device=torch.device(device), traffic=traffic, **axes)

    @staticmethod
    def single(device: torch.device | str = "cpu") -> "ParallelContext":
        """The context of a process alone: every axis has size 1."""
        return ParallelContext.create(MeshSizes(), rank=0, device=device)

    def axis(self, name: str) -> Axis:
        """The axis of a name."""
        return getattr(self, name)

    def describe(self) -> str:
        """Where this rank is, for messages: ``rank 5 (pp 1, dp 0, cp 0, tp 1)``."""
        position = coordinates(self.rank, self.sizes.view("dense"))
        return f"rank {self.rank} (" + ", ".join(f"{a} {position[a]}" for a in ("pp", "dp", "cp", "tp")) + ")"


def _new_group(ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    """A group made by its members alone, so that thousands of ranks need not walk through each other's groups.

    torch names such a group by its ranks and the number of groups made before: the members must have made as many. They
    have: every rank walks through the same kinds of groups, and ``ends``, which some ranks lack, comes last.
    """
    group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group
