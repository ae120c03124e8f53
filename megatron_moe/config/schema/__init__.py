"""The configuration: frozen dataclasses, the single source of flags, YAML keys, defaults and help.

A field that Megatron-LM users know has its Megatron name and meaning. Modules take the section they need,
never the whole. Values that follow from others are properties, not fields.
"""

from megatron_moe.config.schema.data import DataConfig
from megatron_moe.config.schema.model import ModelConfig
from megatron_moe.config.schema.moe import MoEConfig
from megatron_moe.config.schema.parallel import ParallelConfig
from megatron_moe.config.schema.run import CheckpointConfig, LoggingConfig
from megatron_moe.config.schema.training import OptimizerConfig, TrainingConfig
from megatron_moe.config.schema.whole import Config

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoggingConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainingConfig",
]
