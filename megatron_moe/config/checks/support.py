"""What rules are made of: flags as they would be typed, divisibility, and the choices that would do."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from megatron_moe.config.flags import as_typed
from megatron_moe.config.schema import Config
from megatron_moe.config.settings import flag_of, settings, value_of

Rule = Callable[[Config, int], Iterable[str]]
"""A rule: (configuration, world size) -> a full sentence for each problem."""


def typed(config: Config, name: str) -> str:
    """A setting with its present value as it would be typed: ``--hidden-size 256``."""
    return as_typed(settings()[name], value_of(config, name))


def dense_ranks(config: Config) -> int:
    """tp x cp x pp: ranks that one replica of the dense parts takes."""
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.context_parallel_size * parallel.pipeline_model_parallel_size


def expert_ranks(config: Config) -> int:
    """etp x ep x pp: ranks that one replica of the experts takes."""
    parallel = config.parallel
    return parallel.expert_tp * parallel.expert_model_parallel_size * parallel.pipeline_model_parallel_size


def data_parallel_size(config: Config, world_size: int) -> int | None:
    """Replicas of the dense parts; None where the sizes do not fit the world."""
    ranks = dense_ranks(config)
    return world_size // ranks if world_size % ranks == 0 else None


def moe_layers(config: Config) -> tuple[bool, ...]:
    """For each layer whether it is MoE; all dense where the pattern cannot be read (a rule says so)."""
    try:
        return config.moe.layer_pattern(config.model.num_layers)
    except ValueError:
        return (False,) * config.model.num_layers


def layer_experts(config: Config) -> tuple[int, ...]:
    """Routed experts of each layer, also where --num-experts is still to follow from the list of them.

    Empty where pattern or list cannot be read (a rule says so).
    """
    moe = config.moe
    if moe.num_experts is None and moe.moe_num_experts_per_layer is not None:
        moe = replace(moe, num_experts=1)
    try:
        return moe.experts_per_layer(config.model.num_layers)
    except ValueError:
        return ()


def divisors(number: int) -> list[int]:
    """All divisors in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def multiples_near(value: int, step: int) -> str:
    """The multiples of ``step`` around a value: ``256 or 320``."""
    below = value // step * step
    return one_of([m for m in (below, below + step) if m > 0])


def one_of(values: Sequence[int], most: int = 8) -> str:
    """A choice in words: ``1``, ``1 or 2``, ``1, 2, 4 or 8``; the first few of a long list."""
    words = [str(value) for value in values[:most]]
    if len(values) > most:
        return f"{', '.join(words)} ..."
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def splits_over(config: Config, name: str, value: int, axis: str, parts: int) -> Iterable[str]:
    """A sentence unless ``parts`` ranks can share ``value`` things equally.

    Args:
        config: the configuration.
        name: the setting that counts the things.
        value: how many there are: that of the setting, or what stands in for none.
        axis: the setting that counts the ranks.
        parts: how many there are.
    """
    if value % parts == 0:
        return
    shown = [
        f"{flag_of(setting)} {number}{' (by default)' * (value_of(config, setting) is None)}"
        for setting, number in ((name, value), (axis, parts))
    ]
    yield (
        f"{shown[0]} does not divide over {shown[1]}; "
        f"use {flag_of(name)} {multiples_near(value, parts)}, or {flag_of(axis)} {one_of(divisors(value))}."
    )
