"""Saving and resuming a run: what is stored, and what a stored configuration must have in common with this one."""

import sys
from dataclasses import replace

import torch
import yaml
from torch import Tensor

from megatron_moe.checkpoint import (
    CheckpointError,
    entries_of,
    find_latest,
    load_checkpoint,
    on_first_rank,
    read_config_text,
    save_checkpoint,
    verify_checkpoint,
)
from megatron_moe.config import compare, from_dict
from megatron_moe.config.schema import CheckpointConfig, Config
from megatron_moe.parallel.buckets import Piece
from megatron_moe.training.build import Machine
from megatron_moe.training.launch import is_main_rank


def _buffers(machine: Machine) -> dict[str, Tensor]:
    """What gates remember from step to step, by logical name: balancing biases, loads of the last global batch."""
    named = ((f"layers.{i}.moe.gate.{k}", b) for i, gate in machine.gates.items() for k, b in gate.named_buffers())
    return {name: buffer for name, buffer in named if buffer is not None}


def _tensors(machine: Machine) -> dict[int, dict[str, Tensor]]:
    return {id(piece): machine.optimizer.tensors(i) for i, piece in enumerate(machine.pieces)}


def save(machine: Machine, iteration: int, consumed_samples: int, config_text: str) -> None:
    """Store weights, optimizer state, biases and how far the run is.

    Raises:
        CheckpointError: on every rank alike; what was saved before is untouched.
    """
    config = machine.config.checkpoint
    assert config.save is not None
    tensors = _tensors(machine)

    def state_of(piece: Piece) -> dict[str, Tensor]:
        return tensors[id(piece)]

    scalars = {"consumed_samples": consumed_samples, "optimizer_steps": machine.optimizer.num_steps}
    entries = entries_of(machine.pieces, state_of, _buffers(machine), machine.ctx)
    save_checkpoint(config.save, iteration, entries, scalars, config_text, machine.ctx, config.keep_last)


def saved_config(folder: str, iteration: int | None) -> Config:
    """The configuration a checkpoint was saved with.

    Raises:
        ValueError: there is no checkpoint.
    """
    iteration = find_latest(folder) if iteration is None else iteration
    if iteration is None:
        raise ValueError(f"{folder} holds no checkpoint.")
    return from_dict(yaml.safe_load(read_config_text(folder, iteration)))


@torch.no_grad()
def load(machine: Machine, *, quiet: bool = False) -> tuple[int, int] | None:
    """Resume from --save where that holds a checkpoint, so that the same command goes on; else start from --load.

    Returns:
        (iteration, consumed samples) to go on from; None to start anew.

    Raises:
        ValueError: --load holds no checkpoint, or one of another model.
    """
    config, ctx = machine.config.checkpoint, machine.ctx
    source = on_first_rank(ctx, lambda: _source(config))
    if source is None:
        return None
    folder, iteration, weights_only = source
    verify_checkpoint(folder, iteration, ctx)
    _check_configuration(machine, folder, iteration, weights_only)
    tensors = _tensors(machine)
    entries = entries_of(machine.pieces, lambda piece: tensors[id(piece)], _buffers(machine), ctx)
    scalars = load_checkpoint(folder, iteration, entries, ctx, weights_only=weights_only, verify=False)
    for stage in machine.stages.values():
        stage.reducer.gather_weights()
    if is_main_rank() and not quiet:
        print(f"loaded {folder}, iteration {iteration}" + (", weights alone" if weights_only else ""), flush=True)
    if weights_only:
        machine.optimizer.masters_from_weights()
        return None
    machine.optimizer.num_steps = int(scalars["optimizer_steps"])
    return iteration, int(scalars["consumed_samples"])


def _source(config: CheckpointConfig) -> tuple[str, int, bool] | None:
    """(folder, iteration, weights alone) to load; None for a run that begins."""
    newest = None if config.save is None else find_latest(config.save)
    if config.save is not None and newest is not None and config.ckpt_step is None:
        return config.save, newest, False
    folder = config.load or config.save
    if folder is None:
        return None
    iteration = find_latest(folder) if config.ckpt_step is None else config.ckpt_step
    if iteration is None and config.load is not None:
        raise CheckpointError(f"--load {config.load} holds no checkpoint; leave --load out to start anew.")
    return None if iteration is None else (folder, iteration, config.finetune)


def _check_configuration(machine: Machine, folder: str, iteration: int, weights_only: bool) -> None:
    """Compare the stored configuration with this one: what must agree, and what is only worth saying."""
    saved = yaml.safe_load(read_config_text(folder, iteration))
    if not weights_only:  # a run that began with --finetune goes on as any other
        current = replace(machine.config, checkpoint=replace(machine.config.checkpoint, finetune=False))
    else:
        current = machine.config
    found = compare(saved, current)
    if found.must:
        raise ValueError(f"{folder}, iteration {iteration}, was saved with another configuration.\n{found.must_text()}")
    if found.warn and is_main_rank():
        print(f"{folder}: the configuration has changed since.\n{found.warn_text()}", file=sys.stderr, flush=True)
