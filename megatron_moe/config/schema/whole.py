"""All sections together."""

from dataclasses import dataclass, field, replace

from megatron_moe.config.schema.data import DataConfig
from megatron_moe.config.schema.model import ModelConfig
from megatron_moe.config.schema.moe import MoEConfig
from megatron_moe.config.schema.parallel import ParallelConfig
from megatron_moe.config.schema.run import CheckpointConfig, LoggingConfig
from megatron_moe.config.schema.training import OptimizerConfig, TrainingConfig


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def as_stored(self) -> "Config":
        """The model that a checkpoint's weights are: no product rounds them to FP8, and tokens come in one part."""
        return replace(
            self,
            model=replace(self.model, fp8_format=None, fp8_recipe=ModelConfig.fp8_recipe),
            moe=replace(self.moe, moe_overlap_degree=1, moe_overlap_attention=False),
        )
