"""The parity harness: a tiny model under any layout against one process (``megatron_moe/training/parity.py``)."""

from typing import Any

from megatron_moe.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    TrainingConfig,
)
from megatron_moe.training.parity import STEPS, TOLERANCE, Trace, _groups, batches, compare, make_groups, trace
from megatron_moe.training.shrink import read_layout, vary

SEQ_LENGTH, VOCAB, GLOBAL_BATCH = 16, 67, 8

BASE = Config(
    model=ModelConfig(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=VOCAB,
        make_vocab_size_divisible_by=4,
        init_method_std=0.1,
    ),
    moe=MoEConfig(num_experts=8, moe_ffn_hidden_size=16),
    data=DataConfig(seq_length=SEQ_LENGTH, mock_data=True),
    optim=OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1, adam_eps=1e-5),
    training=TrainingConfig(
        params_dtype="float64", global_batch_size=GLOBAL_BATCH, micro_batch_size=GLOBAL_BATCH, train_iters=STEPS
    ),
)


def differences(found: Trace, expected: Trace) -> list[str]:
    """Everything that differs by more than the tolerance."""
    return [str(difference) for difference in compare(found, expected).differences]


def layout(text: str) -> tuple[dict[str, Any], int]:
    """``tp=2,pp=2,dp=2`` -> configuration fields and world size; etp and the micro-batch size are 1 unless given."""
    values, sizes = read_layout(text)
    values.setdefault("expert_tensor_parallel_size", 1)
    values.setdefault("micro_batch_size", 1)
    return values, sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes.get("dp", 1)


__all__ = [
    "BASE",
    "GLOBAL_BATCH",
    "TOLERANCE",
    "Trace",
    "_groups",
    "batches",
    "differences",
    "layout",
    "make_groups",
    "trace",
    "vary",
]
