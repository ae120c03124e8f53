"""Checkpoints: one format of logical tensors, from any layout to any layout; atomic, verified, strict."""

from megatron_moe.checkpoint.agreement import on_first_rank
from megatron_moe.checkpoint.background import BackgroundWriter
from megatron_moe.checkpoint.entries import Box, Entry, entries_of
from megatron_moe.checkpoint.errors import CheckpointError
from megatron_moe.checkpoint.folder import checkpoint_path, find_latest, saved_iterations
from megatron_moe.checkpoint.load import load_checkpoint, newest_whole, verify_checkpoint
from megatron_moe.checkpoint.offline import Checkpoint, read_config_text
from megatron_moe.checkpoint.save import save_checkpoint

__all__ = [
    "BackgroundWriter",
    "Box",
    "Checkpoint",
    "CheckpointError",
    "Entry",
    "checkpoint_path",
    "entries_of",
    "find_latest",
    "load_checkpoint",
    "newest_whole",
    "on_first_rank",
    "read_config_text",
    "save_checkpoint",
    "saved_iterations",
    "verify_checkpoint",
]
