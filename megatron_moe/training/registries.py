"""What the top floor tells configuration: the names of all registries, and the rules of what they hold."""

from collections.abc import Iterator

from megatron_moe.config import Rule
from megatron_moe.config.schema import Config
from megatron_moe.data.tokenizer import TOKENIZERS
from megatron_moe.moe.checks import moe_checks
from megatron_moe.moe.dispatchers import DISPATCHERS
from megatron_moe.moe.losses import BALANCE_LOSSES
from megatron_moe.moe.routers import ROUTERS
from megatron_moe.pipeline import LayoutError, layout_problems, parse_layout, schedule_problems
from megatron_moe.pipeline.schedules import SCHEDULES, chunks_per_rank

CHOICES: dict[str, tuple[str, ...]] = {
    "routers": tuple(ROUTERS),
    "balance_losses": tuple(BALANCE_LOSSES),
    "dispatchers": tuple(DISPATCHERS),
    "schedules": tuple(SCHEDULES),
    "tokenizers": tuple(TOKENIZERS),
}


def routing_rules(config: Config, world_size: int) -> Iterator[str]:
    """What routing methods, capacities and balance losses refuse."""
    try:
        per_layer = config.moe.experts_per_layer(config.model.num_layers)
    except ValueError:
        return  # said elsewhere
    layers = {num_experts: config.moe.for_layer(i, len(per_layer)) for i, num_experts in enumerate(per_layer)}
    kinds = [moe for num_experts, moe in layers.items() if num_experts] or [config.moe]
    yield from dict.fromkeys(problem for moe in kinds for problem in moe_checks(moe))


def pipeline_rules(config: Config, world_size: int) -> Iterator[str]:
    """What the schedule and the layout of stages refuse."""
    parallel, training = config.parallel, config.training
    pp, virtual = parallel.pipeline_model_parallel_size, parallel.num_virtual_stages_per_pipeline_rank
    ranks = pp * parallel.tensor_model_parallel_size * parallel.context_parallel_size
    if world_size % ranks or training.global_batch_size is None:
        return  # said elsewhere
    per_step = training.micro_batch_size * (world_size // ranks)
    num_microbatches = max(training.global_batch_size // per_step, 1)
    problems = schedule_problems(parallel.pipeline_schedule, pp, num_microbatches, virtual)
    yield from problems
    if problems:
        return
    num_stages = pp * chunks_per_rank(parallel.pipeline_schedule, virtual)
    text = parallel.pipeline_model_parallel_layout
    if text is not None:
        yield from _layout_rules(text, config.model.num_layers, config.model.mtp_num_layers or 0, pp, num_stages)
    elif num_stages > config.model.num_layers + 2:
        yield (
            f"--pipeline-model-parallel-size {pp} with --pipeline-schedule {parallel.pipeline_schedule} makes "
            f"{num_stages} stages, more than --num-layers {config.model.num_layers} can fill; use fewer."
        )


def _layout_rules(text: str, num_layers: int, num_mtp: int, pp: int, num_stages: int) -> Iterator[str]:
    try:
        stages = parse_layout(text)
    except LayoutError as error:
        yield str(error)
        return
    problems = layout_problems(stages, num_layers, num_mtp, pp)
    if num_mtp and not problems and len(stages[-1].mtp_ids) != num_mtp:
        problems = [
            f'--pipeline-model-parallel-layout "{text}" has m away from L; prediction blocks use the output layer: '
            "write all m before the L, in the last stage."
        ]
    yield from problems
    if not problems and len(stages) != num_stages:
        yield (
            f'--pipeline-model-parallel-layout "{text}" has {len(stages)} stages, but the schedule runs {num_stages} '
            f"(--pipeline-model-parallel-size {pp} times the stages per rank)."
        )


RULES: tuple[Rule, ...] = (routing_rules, pipeline_rules)
