"""A small state without a model, for tests of the checkpoint alone."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint import Box, Entry, load_checkpoint, save_checkpoint
from megatron_moe.parallel.context import ParallelContext

ALONE = ParallelContext.single()


def entry(name: str, tensor: Tensor) -> Entry:
    """A tensor that this process has whole."""
    box = Box((0,) * tensor.dim(), tuple(tensor.shape), tensor)
    return Entry(name, tuple(tensor.shape), tensor.dtype, (box,), (box,))


def state(value: float) -> dict[str, Tensor]:
    """Weights and a moment, of several types, filled with a value."""
    return {
        "model.a": torch.full((4, 6), value, dtype=torch.float64),
        "model.b": torch.full((3,), value, dtype=torch.bfloat16),
        "model.scalar": torch.full((), value, dtype=torch.float32),
        "optimizer.exp_avg.a": torch.full((4, 6), value, dtype=torch.float32),
    }


def save(folder: Path, iteration: int, tensors: dict[str, Tensor], keep_last: int | None = None) -> Path:
    """Save from one process."""
    entries = [entry(name, tensor) for name, tensor in tensors.items()]
    return save_checkpoint(folder, iteration, entries, {"seen": iteration}, "seed: 1\n", ALONE, keep_last)


def load(folder: Path, iteration: int | None = None, tensors: dict[str, Tensor] | None = None, **how: Any) -> float:
    """Load into fresh tensors and return the value that all of them have."""
    tensors = state(float("nan")) if tensors is None else tensors
    entries = [entry(name, tensor) for name, tensor in tensors.items()]
    scalars = load_checkpoint(folder, iteration, entries, ALONE, **how)
    values = {float(value) for tensor in tensors.values() for value in tensor.reshape(-1)}
    assert len(values) == 1, values
    assert iteration is None or scalars == {"seen": iteration}
    return values.pop()
