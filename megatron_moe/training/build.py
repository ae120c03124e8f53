"""Builds what a run computes with: this rank's stages of the model, their gradients, the schedule, the optimizer.

configuration + context -> layout of stages -> Decoder per stage -> GradientReducer -> AdamW
                                   \\-> schedule (data) -> Runtime
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from megatron_moe.config.schema import Config
from megatron_moe.kernels.selection import choose
from megatron_moe.model.compiled import compile_parts
from megatron_moe.model.decoder import Decoder
from megatron_moe.model.flops import ForwardFlops
from megatron_moe.moe.gate import Gate
from megatron_moe.optim.adamw import AdamW
from megatron_moe.parallel.buckets import Piece
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.gradients import GradientReducer, UnderWay
from megatron_moe.parallel.sharding import ShardedParameter, sharded_parameters
from megatron_moe.parallel.tokens import SequenceLayout
from megatron_moe.parallel.weight_gradients import WeightGradientQueue
from megatron_moe.pipeline import (
    StageLayout,
    add_communication,
    add_grad_reduction,
    balance,
    make_schedule,
    parse_layout,
)
from megatron_moe.pipeline.actions import Schedule, stage_to_rank
from megatron_moe.pipeline.runtime import Runtime, Stage, forward_only
from megatron_moe.pipeline.schedules import SCHEDULES, chunks_per_rank


@dataclass
class Machine:
    """What runs a configuration on this rank."""

    config: Config
    ctx: ParallelContext
    stages: dict[int, Stage]
    runtime: Runtime
    optimizer: AdamW
    layout: SequenceLayout

    def schedule(self, num_microbatches: int, *, training: bool) -> Schedule:
        """The schedule of a step with its communication; made once per number of micro-batches."""
        schedule = schedule_of(self.config, self.ctx.pp.size, num_microbatches)
        return schedule if training else forward_only(schedule)

    @property
    def parameters(self) -> dict[str, ShardedParameter]:
        """All parameters of this rank by logical name; a second copy of a tied tensor is left out."""
        found = {}
        for stage in self.stages.values():
            for parameter in sharded_parameters(stage.module).values():
                if not parameter.spec.copy:
                    found[parameter.spec.name] = parameter
        return found

    @property
    def gates(self) -> dict[int, Gate]:
        """The gates of this rank's MoE layers by layer number."""
        modules = (module for stage in self.stages.values() for module in stage.module.modules())
        return {module.layer_id: module for module in modules if isinstance(module, Gate)}

    @property
    def pieces(self) -> list[Piece]:
        """All that this rank's optimizer owns."""
        return self.optimizer.pieces


def schedule_of(config: Config, pp: int, num_microbatches: int) -> Schedule:
    """The schedule of a training step with its communication; made once per number of micro-batches."""
    parallel = config.parallel
    return _schedule(parallel.pipeline_schedule, pp, num_microbatches, parallel.num_virtual_stages_per_pipeline_rank)


@cache
def _schedule(name: str, pp: int, num_microbatches: int, num_virtual: int | None) -> Schedule:
    return add_grad_reduction(add_communication(make_schedule(name, pp, num_microbatches, num_virtual)))


def stage_layouts(config: Config) -> tuple[StageLayout, ...]:
    """What each stage holds: as written in --pipeline-model-parallel-layout, or balanced by the FLOPs of its parts."""
    parallel = config.parallel
    if parallel.pipeline_model_parallel_layout is not None:
        return parse_layout(parallel.pipeline_model_parallel_layout)
    pp = parallel.pipeline_model_parallel_size
    num_stages = pp * chunks_per_rank(parallel.pipeline_schedule, parallel.num_virtual_stages_per_pipeline_rank)
    flops = ForwardFlops.of(config)
    *before, last = balance(flops.layers, 0.0, flops.head + flops.mtp, num_stages)
    return *before, replace(last, mtp_ids=tuple(range(config.model.mtp_num_layers or 0)))


def build_machine(config: Config, ctx: ParallelContext) -> Machine:
    """Build this rank's part of the run; weights have their initial values."""
    parallel, training = config.parallel, config.training
    layouts = stage_layouts(config)
    placement = SCHEDULES[parallel.pipeline_schedule].placement
    mine = [s for s in range(len(layouts)) if stage_to_rank(placement, s, ctx.pp.size) == ctx.pp.rank]
    last = len(layouts) - 1
    ends_apart = stage_to_rank(placement, 0, ctx.pp.size) != stage_to_rank(placement, last, ctx.pp.size)
    stages: dict[int, Stage] = {}
    under_way = UnderWay()
    for number in mine:
        queue = WeightGradientQueue()
        first = stages.get(0)
        module = Decoder(
            config,
            ctx,
            layer_ids=layouts[number].layer_ids,
            has_embedding=layouts[number].embedding,
            has_output=layouts[number].head,
            embedding_is_copied=ends_apart,
            embedding=first.module.embedding if first is not None else None,  # type: ignore[arg-type]
            queue=queue,
        )
        if training.torch_compile != "none" and ctx.device.type != "meta":  # a dry run has nothing to compile
            compile_parts(module, training.torch_compile)
        reducer = GradientReducer(module.units(), ctx, parallel.data_parallel_sharding_strategy, under_way)
        if reducer.sharding.parameters:
            module.use_sharded_weights(reducer.units)
        stages[number] = Stage(module, reducer, queue)
    layout = SequenceLayout(config.data.seq_length, ctx, parallel.sequence_parallel)
    shape = (len(layout.local_S), training.micro_batch_size, config.model.hidden_size)
    runtime = Runtime(stages, ctx, shape, getattr(torch, training.params_dtype))
    pieces = [piece for stage in stages.values() for piece in stage.reducer.pieces()]
    kernels = choose(config.model.kernels, ctx.device, getattr(torch, training.params_dtype))
    return Machine(config, ctx, stages, runtime, AdamW(pieces, config.optim, kernels["adam"]), layout)


def with_vocabulary(config: Config, vocab_size: int) -> Config:
    """The configuration with the vocabulary size of its tokenizer, unless it has one of its own.

    Raises:
        ValueError: the model's vocabulary is smaller than the tokenizer's.
    """
    if config.model.vocab_size is None:
        return replace(config, model=replace(config.model, vocab_size=vocab_size))
    if config.model.vocab_size < vocab_size:
        raise ValueError(
            f"--vocab-size {config.model.vocab_size} is smaller than the tokenizer's {vocab_size}: ids would fall "
            f"outside the model. Leave --vocab-size out, or give at least {vocab_size}."
        )
    return config
