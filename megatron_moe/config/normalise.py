"""Values that others imply, filled in by one function and said aloud."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_moe.config.checks.support import dense_ranks, divisors, layer_experts
from megatron_moe.config.flags import as_typed
from megatron_moe.config.schema import Config
from megatron_moe.config.settings import settings, value_of


@dataclass(frozen=True)
class Implication:
    """A setting that gets a value because of others. ``str()`` is the sentence to print."""

    name: str
    value: Any
    cause: str
    why: str

    def __str__(self) -> str:
        return f"{as_typed(settings()[self.name], self.value)} is implied by {self.cause}: {self.why}."


def normalise(config: Config, world_size: int) -> tuple[Config, list[str]]:
    """The configuration with all implied values on so many ranks, and a sentence for each change.

    Idempotent. Sizes that do not fit the world are left alone; the checks report them.
    """
    found = implications(config, world_size)
    return apply(config, found), [str(item) for item in found]


def implications(config: Config, world_size: int) -> list[Implication]:
    """What the configuration implies beyond what it says; nothing for values that are already so."""
    rules = (_experts, _sequence_parallel, _global_batch_size, _elastic)
    found = [item for rule in rules for item in rule(config, world_size)]
    return [item for item in found if value_of(config, item.name) != item.value]


def apply(config: Config, found: Iterable[Implication]) -> Config:
    """The configuration with the implied values in place."""
    for item in found:
        section = settings()[item.name].section
        config = replace(config, **{section: replace(getattr(config, section), **{item.name: item.value})})
    return config


def _experts(config: Config, world_size: int) -> Iterator[Implication]:
    """A pyramid says its largest layer; a segmentation is written out, and then is 1."""
    moe, factor, per_layer = config.moe, config.moe.moe_segmentation_factor, layer_experts(config)
    largest = moe.num_experts or max(per_layer, default=0)
    width = moe.moe_ffn_hidden_size or config.model.dense_ffn_size
    if not largest or not per_layer:
        return
    if factor <= 1 or width % factor:
        cause = f"--moe-num-experts-per-layer {moe.moe_num_experts_per_layer}"
        yield Implication("num_experts", largest, cause, "it is the largest of them")
        return
    cause = f"--moe-segmentation-factor {factor}"
    yield Implication("num_experts", factor * largest, cause, f"each of {largest} experts is cut into {factor}")
    if moe.moe_num_experts_per_layer is not None:
        finer = str([factor * count for count in per_layer if count])
        yield Implication("moe_num_experts_per_layer", finer, cause, f"each expert is cut into {factor}")
    yield Implication("moe_ffn_hidden_size", width // factor, cause, f"a width of {width} is cut into {factor}")
    topk = factor * moe.moe_router_topk
    yield Implication("moe_router_topk", topk, cause, f"{factor} of them are as large as one was")
    yield Implication("moe_segmentation_factor", 1, cause, "the experts are now named as they are")


def _sequence_parallel(config: Config, world_size: int) -> Iterator[Implication]:
    tp = config.parallel.tensor_model_parallel_size
    if tp > 1 and any(layer_experts(config)):
        cause = f"--num-experts with --tensor-model-parallel-size {tp}"
        why = "otherwise tensor-parallel ranks would route the same tokens twice"
        yield Implication("sequence_parallel", True, cause, why)
    if tp == 1:
        cause = "--tensor-model-parallel-size 1"
        yield Implication("sequence_parallel", False, cause, "there is nothing to cut the sequence over")


def _global_batch_size(config: Config, world_size: int) -> Iterator[Implication]:
    ranks = dense_ranks(config)
    if config.training.global_batch_size is None and ranks > 0 and world_size % ranks == 0:
        micro, dp = config.training.micro_batch_size, world_size // ranks
        cause = f"--micro-batch-size {micro} x data-parallel size {dp}"
        yield Implication("global_batch_size", micro * dp, cause, "one micro-batch per rank and step")


def _elastic(config: Config, world_size: int) -> Iterator[Implication]:
    """``--elastic``: what fits so many ranks. Neither the expert layout nor the micro-batch changes the curve."""
    parallel, training, ranks = config.parallel, config.training, dense_ranks(config)
    batch = math.gcd(training.global_batch_size or 0, *training.rampup_batch_size[:2])
    if not parallel.elastic or batch == 0 or ranks < 1 or world_size % ranks:
        return
    cause = f"--elastic on {world_size} ranks"
    dp, per_stage = world_size // ranks, world_size // parallel.pipeline_model_parallel_size
    ep, micro = parallel.expert_model_parallel_size, training.micro_batch_size
    fitting = [n for n in divisors(ep) if per_stage % (n * parallel.expert_tp) == 0] if ep > 0 else []
    if fitting:
        yield Implication("expert_model_parallel_size", fitting[-1], cause, f"the largest divisor of {ep} that fits")
    if batch % dp == 0 and micro > 0:
        largest = max(n for n in divisors(batch // dp) if n <= micro)
        if batch % (dp * micro):
            yield Implication(
                "micro_batch_size", largest, cause, f"the largest that divides {batch} over {dp} data ranks"
            )
