"""The configuration to plan: flags and files, checked for a world, without what only a real run needs."""

from collections.abc import Sequence

from megatron_moe.config import ConfigError, check, resolve
from megatron_moe.config.schema import Config
from megatron_moe.training import registries


def configured(argv: Sequence[str], world_size: int) -> Config:
    """Read and check.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    resolved, _ = resolve(argv, registries.CHOICES).normalised(world_size)
    problems = check(resolved.config, world_size, registries.CHOICES, registries.RULES, to_train=False)
    if problems:
        raise ConfigError(problems)
    return resolved.config
