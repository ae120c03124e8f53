"""Values that others imply, filled in by one function and said aloud."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_moe.config.checks.support import dense_ranks
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
    rules = (_sequence_parallel, _global_batch_size)
    found = [item for rule in rules for item in rule(config, world_size)]
    return [item for item in found if value_of(config, item.name) != item.value]


def apply(config: Config, found: Iterable[Implication]) -> Config:
    """The configuration with the implied values in place."""
    for item in found:
        section = settings()[item.name].section
        config = replace(config, **{section: replace(getattr(config, section), **{item.name: item.value})})
    return config


def _sequence_parallel(config: Config, world_size: int) -> Iterator[Implication]:
    tp = config.parallel.tensor_model_parallel_size
    if tp > 1 and config.moe.num_experts is not None:
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
