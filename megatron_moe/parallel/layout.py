"""Rank algebra: who sits where on the mesh. Integers only; no torch, no processes.

Two views of the same ranks, fastest axis first (Megatron's order, so that tensor-parallel peers are neighbours):

    dense  view:  tp, cp, dp, pp         attention, dense FFN, shared experts, embeddings
    expert view:  etp, ep, edp, pp       routed experts; etp * ep * edp == tp * cp * dp

The expert view is free of the dense one inside a pipeline stage ("parallel folding", arXiv:2504.14960).
"""

from dataclasses import dataclass
from math import prod

from megatron_moe.config.schema import ParallelConfig

# Every communication group of the project: name -> (view, axes it runs over, fastest first).
GROUP_AXES: dict[str, tuple[str, tuple[str, ...]]] = {
    "tp": ("dense", ("tp",)),
    "cp": ("dense", ("cp",)),
    "dp": ("dense", ("dp",)),
    "pp": ("dense", ("pp",)),
    "seq": ("dense", ("tp", "cp")),  # the ranks that share a sequence
    "dp_cp": ("dense", ("cp", "dp")),  # the replicas of a tensor-parallel shard
    "stage": ("dense", ("tp", "cp", "dp")),  # all ranks of a pipeline stage
    "world": ("dense", ("tp", "cp", "dp", "pp")),
    "etp": ("expert", ("etp",)),
    "ep": ("expert", ("ep",)),
    "edp": ("expert", ("edp",)),
}


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of all axes; ``dp`` and ``edp`` are what the others leave of the world."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    etp: int = 1
    ep: int = 1

    @property
    def edp(self) -> int:
        """Size of the expert data-parallel axis: replicas of an expert shard."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @staticmethod
    def of(config: ParallelConfig, world_size: int) -> "MeshSizes":
        """Sizes for a configuration that has passed its checks.

        Raises:
            ValueError: the sizes do not factor the world.
        """
        tp, cp, pp = (
            config.tensor_model_parallel_size,
            config.context_parallel_size,
            config.pipeline_model_parallel_size,
        )
        etp, ep = config.expert_tp, config.expert_model_parallel_size
        if world_size % (tp * cp * pp):
            raise ValueError(f"world size {world_size} is not a multiple of tp {tp} x cp {cp} x pp {pp}")
        if world_size % (etp * ep * pp):
            raise ValueError(f"world size {world_size} is not a multiple of etp {etp} x ep {ep} x pp {pp}")
        return MeshSizes(tp=tp, cp=cp, dp=world_size // (tp * cp * pp), pp=pp, etp=etp, ep=ep)

    def view(self, name: str) -> tuple[tuple[str, int], ...]:
        """Axes and sizes of the ``dense`` or ``expert`` view, fastest first."""
        axes = ("tp", "cp", "dp", "pp") if name == "dense" else ("etp", "ep", "edp", "pp")
        return tuple((axis, getattr(self, axis)) for axis in axes)


def coordinates(rank: int, view: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Position of a rank on each axis of a view."""
    position = {}
    for axis, size in view:
        rank, position[axis] = divmod(rank, size)
    return position


def rank_at(position: dict[str, int], view: tuple[tuple[str, int], ...]) -> int:
    """Rank at a position: the inverse of :func:`coordinates`."""
    rank, stride = 0, 1
    for axis, size in view:
        rank += position[axis] * stride
        stride *= size
    return rank


def peers(rank: int, group: str, sizes: MeshSizes) -> tuple[int, ...]:
    """The ranks of this rank's group of a kind (a key of ``GROUP_AXES``), in the order of the group's ranks."""
    view_name, axes = GROUP_AXES[group]
    view = sizes.view(view_name)
    position = coordinates(rank, view)
    lengths = [getattr(sizes, axis) for axis in axes]
    members = []
    for index in range(prod(lengths)):
        for axis, length in zip(axes, lengths, strict=True):
            index, position[axis] = divmod(index, length)
        members.append(rank_at(position, view))
    return tuple(members)


def ends(rank: int, sizes: MeshSizes) -> tuple[int, ...]:
    """First and last rank of this rank's pipeline, if it is one of them; else the rank alone."""
    column = peers(rank, "pp", sizes)
    return tuple(dict.fromkeys((column[0], column[-1]))) if rank in (column[0], column[-1]) else (rank,)


def all_groups(sizes: MeshSizes) -> list[tuple[int, ...]]:
    """Every group of more than one rank that a mesh needs, each once, in one order for all ranks."""
    kinds = [[peers(rank, group, sizes) for rank in range(sizes.world)] for group in GROUP_AXES]
    kinds.append([ends(rank, sizes) for rank in range(sizes.world)])
    return [ranks for ranks in dict.fromkeys(ranks for kind in kinds for ranks in kind) if len(ranks) > 1]


def describe(sizes: MeshSizes) -> str:
    """The topology as a table: one line a rank with its coordinates in both views, then each kind of group."""
    indent = " " * len(f"world {sizes.world}")
    lines = [
        f"world {sizes.world} = pp {sizes.pp} x dp {sizes.dp} x cp {sizes.cp} x tp {sizes.tp}   (dense view)",
        f"{indent} = pp {sizes.pp} x edp {sizes.edp} x ep {sizes.ep} x etp {sizes.etp}   (expert view)",
        "",
        "rank    pp   dp   cp   tp  | edp   ep  etp",
    ]
    for rank in range(sizes.world):
        dense, expert = coordinates(rank, sizes.view("dense")), coordinates(rank, sizes.view("expert"))
        left = "".join(f"{dense[axis]:5d}" for axis in ("pp", "dp", "cp", "tp"))
        lines.append(f"{rank:4d} {left}  |" + "".join(f"{expert[axis]:4d} " for axis in ("edp", "ep", "etp")))
    lines.append("")
    for group in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
        groups = dict.fromkeys(peers(rank, group, sizes) for rank in range(sizes.world))
        shown = " ".join(str(list(g)) for g in list(groups)[:8]) + (" ..." if len(groups) > 8 else "")
        lines.append(f"{group:>4} groups: {shown}")
    return "\n".join(lines)
