"""Rules about the mesh: how the ranks and the sequence divide over its axes."""

import math
from collections.abc import Iterator

from megatron_moe.config.checks.support import (
    Rule,
    dense_ranks,
    divisors,
    expert_ranks,
    moe_layers,
    multiples_near,
    one_of,
    typed,
)
from megatron_moe.config.schema import Config


def dense_sizes_divide_world(config: Config, world_size: int) -> Iterator[str]:
    """tp x cp x pp ranks hold one replica of the dense parts; data parallelism takes whole replicas."""
    names = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size")
    yield from _product_divides_world(config, world_size, names, dense_ranks(config))


def expert_sizes_divide_world(config: Config, world_size: int) -> Iterator[str]:
    """etp x ep x pp ranks hold one replica of the experts."""
    names = ("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")
    if config.moe.num_experts is not None:
        yield from _product_divides_world(config, world_size, names, expert_ranks(config))


def sequence_divides_over_ranks(config: Config, world_size: int) -> Iterator[str]:
    """Context parallelism gives a rank an early and a late piece, sequence parallelism a slice of them."""
    parallel = config.parallel
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    cut_by_tp = tp > 1 and (parallel.sequence_parallel or any(moe_layers(config)))
    step, reasons = 1, []
    if cp > 1:
        step = 2 * cp
        reasons.append(f"{typed(config, 'context_parallel_size')} cuts it into {2 * cp} pieces, two for each rank")
    if cut_by_tp:
        step = math.lcm(step, cp * tp)
        pieces = f"it into {tp}" if cp == 1 else f"what each rank has into {tp}"
        reasons.append(f"sequence parallelism over {typed(config, 'tensor_model_parallel_size')} cuts {pieces}")
    length = config.data.seq_length
    if length % step:
        yield (
            f"{typed(config, 'seq_length')} does not divide: {' and '.join(reasons)}; "
            f"use {multiples_near(length, step)}."
        )


def _product_divides_world(config: Config, world_size: int, names: tuple[str, ...], ranks: int) -> Iterator[str]:
    if world_size % ranks == 0:
        return
    etp = f"--expert-tensor-parallel-size {config.parallel.expert_tp}"
    flags = [etp if name == "expert_tensor_parallel_size" else typed(config, name) for name in names]
    yield (
        f"{' x '.join(flags)} = {ranks} does not divide the {world_size} ranks; "
        f"start {multiples_near(world_size, ranks)} ranks, or choose sizes with a product of "
        f"{one_of(divisors(world_size), most=12)}."
    )


RULES: tuple[Rule, ...] = (dense_sizes_divide_world, expert_sizes_divide_world, sequence_divides_over_ranks)
