"""A layout of any world size, dry-run on one process: one rank of each kind is traced, all others are like one of them.

    pipeline ranks   0      1    2    3   ...   14    15
    traced           0      1                         15        a kind: the same parts of the model at the same place
    the rest                     1    1    1    1

Inside a pipeline rank all ranks hold and send the same, but for the load of experts: the traced one holds expert 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from megatron_moe.config.schema import Config
from megatron_moe.model.flops import training_flops_per_token
from megatron_moe.parallel.layout import MeshSizes, peers, rank_at
from megatron_moe.pipeline.actions import Schedule
from megatron_moe.pipeline.partition import StageLayout
from megatron_moe.plan.loads import load_problems
from megatron_moe.plan.rank import RankTrace, phase, steps_of, trace_rank
from megatron_moe.training.build import schedule_of, stage_layouts


@dataclass(frozen=True)
class Plan:
    """What a layout costs.

    Attributes:
        skew: load of expert 0 over the mean.
        ranks: one trace per pipeline rank.
    """

    config: Config
    sizes: MeshSizes
    skew: float
    ranks: tuple[RankTrace, ...]

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(rank.num_parameters for rank in self.ranks)

    @property
    def tokens(self) -> int:
        """Of a step, over all ranks."""
        training = self.config.training
        num = steps_of(self.config, self.sizes) * self.sizes.dp * training.micro_batch_size
        return num * self.config.data.seq_length

    @property
    def model_flops(self) -> float:
        """Of a step over all ranks: no recomputation, nothing computed twice."""
        return training_flops_per_token(self.config) * self.tokens

    @property
    def hardware_flops(self) -> float:
        """Of a step over all ranks, as the operations that run count them."""
        per_stage = self.sizes.world // self.sizes.pp
        return per_stage * sum(rank.work["matmul"] + rank.work["attention"] for rank in self.ranks)

    @property
    def flops(self) -> dict[str, float]:
        """Of a step over all ranks, by part of the model, with what is computed again."""
        per_stage, ranks = self.sizes.world // self.sizes.pp, [rank.flops for rank in self.ranks]
        return {part: per_stage * sum(flops[part] for flops in ranks) for part in ranks[0]}

    def memory(self, pp_rank: int) -> dict[str, int]:
        """Bytes of a rank by what they are for, at its peak."""
        rank = self.ranks[pp_rank]
        state, (peak, buffers) = rank.state, rank.peak
        return {
            "parameters": state.parameters,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "activations": peak - buffers,
            "communication": buffers,
        }

    def members(self, pp_rank: int, axis: str) -> tuple[int, ...]:
        """Ranks of the traced rank's group of an axis."""
        if axis == "ends":
            column = self.members(pp_rank, "pp")
            return (column[0], column[-1])
        return peers(self.rank_of(pp_rank), axis, self.sizes)

    def rank_of(self, pp_rank: int) -> int:
        """The rank of the world that was traced for a pipeline rank."""
        return rank_at({"tp": 0, "cp": 0, "dp": 0, "pp": pp_rank}, self.sizes.view("dense"))


def dry_run(
    config: Config, world_size: int, skew: float = 1.0, progress: Callable[[int, int], None] | None = None
) -> Plan:
    """Trace a layout.

    Args:
        config: checked and normalised for the world; with a vocabulary size.
        skew: load of expert 0 over the mean.
        progress: told how many pipeline ranks are done, and of how many.

    Raises:
        ValueError: what a dry run cannot honour, in full sentences.
    """
    problems = load_problems(config, skew)
    if problems:
        raise ValueError("\n".join(problems))
    sizes = MeshSizes.of(config.parallel, world_size)
    schedule, layouts = schedule_of(config, sizes.pp, steps_of(config, sizes)), stage_layouts(config)
    traced: dict[Any, RankTrace] = {}
    ranks = []
    for pp_rank in range(sizes.pp):
        kind = _kind(config, schedule, layouts, pp_rank)
        if kind not in traced:
            rank = rank_at({"tp": 0, "cp": 0, "dp": 0, "pp": pp_rank}, sizes.view("dense"))
            traced[kind] = trace_rank(config, world_size, rank, skew)
        ranks.append(replace(traced[kind], pp_rank=pp_rank))
        if progress is not None:
            progress(pp_rank + 1, sizes.pp)
    return Plan(config, sizes, skew, tuple(ranks))


def _kind(config: Config, schedule: Schedule, layouts: tuple[StageLayout, ...], pp_rank: int) -> Any:
    """Equal for pipeline ranks that cost the same per action."""
    model, last = config.model, schedule.num_stages - 1
    layer_kinds = list(zip(config.moe.experts_per_layer(model.num_layers), model.windows, strict=True))
    stages = schedule.stages_of(pp_rank)
    parts = tuple(
        (
            replace(layouts[s], layer_ids=()),
            tuple(layer_kinds[i] for i in layouts[s].layer_ids),
            s in (0, last),
            s > 0 and schedule.rank_of(s - 1) == pp_rank,
            s < last and schedule.rank_of(s + 1) == pp_rank,
        )
        for s in stages
    )
    num = schedule.num_microbatches
    actions = frozenset((a.kind, stages.index(a.stage), phase(a.microbatch, num)) for a in schedule.actions(pp_rank))
    return parts, actions, pp_rank in (0, schedule.num_ranks - 1)
