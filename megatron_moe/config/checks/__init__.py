"""Rules over the whole configuration, by subject."""

from megatron_moe.config.checks.run import check
from megatron_moe.config.checks.support import Rule

__all__ = ["Rule", "check"]
