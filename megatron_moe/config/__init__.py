"""Configuration: plain values, no torch. Flags, YAML keys, checks and docs follow from dataclasses."""

from megatron_moe.config.checks import Rule, check
from megatron_moe.config.compare import Difference, Differences, compare
from megatron_moe.config.dump import dump
from megatron_moe.config.errors import ConfigError
from megatron_moe.config.flags import Actions, build_parser
from megatron_moe.config.normalise import normalise
from megatron_moe.config.resolve import Resolved, from_dict, load_config, resolve, to_dict
from megatron_moe.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_moe.config.settings import Registries

__all__ = [
    "Actions",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "Difference",
    "Differences",
    "LoggingConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Registries",
    "Resolved",
    "Rule",
    "TrainingConfig",
    "build_parser",
    "check",
    "compare",
    "dump",
    "from_dict",
    "load_config",
    "normalise",
    "resolve",
    "to_dict",
]
