"""Saving and resuming a run: what is stored, and what a stored configuration must have in common with this one."""

import sys

import torch
import yaml
from torch import Tensor

from megatron_moe.checkpoint import entries_of, find_latest, load_checkpoint, read_config_text, save_checkpoint
from megatron_moe.config import compare, from_dict
from megatron_moe.config.schema import Config
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
    iteration = iteration or find_latest(folder)
    if iteration is None:
        raise ValueError(f"{folder} holds no checkpoint.")
    return from_dict(yaml.safe_load(read_config_text(folder, iteration)))


@torch.no_grad()
def load(machine: Machine, *, quiet: bool = False) -> tuple[int, int] | None:
    """Resume from --load, or from --save where that holds a checkpoint.

    Returns:
        (iteration, consumed samples) to go on from; None to start anew.

    Raises:
        ValueError: --load holds no checkpoint, or one of another model.
    """
    config = machine.config.checkpoint
    folder = config.load or config.save
    iteration = None if folder is None else config.ckpt_step or find_latest(folder)
    if folder is None or iteration is None:
        if config.load is not None:
            raise ValueError(f"--load {config.load} holds no checkpoint; leave --load out to start anew.")
        return None
    _check_configuration(machine, folder, iteration)
    tensors = _tensors(machine)
    entries = entries_of(machine.pieces, lambda piece: tensors[id(piece)], _buffers(machine), machine.ctx)
    scalars = load_checkpoint(folder, iteration, entries, machine.ctx, weights_only=config.finetune)
    for stage in machine.stages.values():
        stage.reducer.gather_weights()
    if is_main_rank() and not quiet:
        print(f"loaded {folder}, iteration {iteration}" + (", weights alone" if config.finetune else ""), flush=True)
    if config.finetune:
        machine.optimizer.masters_from_weights()
        return None
    machine.optimizer.num_steps = int(scalars["optimizer_steps"])
    return iteration, int(scalars["consumed_samples"])


def _check_configuration(machine: Machine, folder: str, iteration: int) -> None:
    """Compare the stored configuration with this one: what must agree, and what is only worth saying."""
    saved = yaml.safe_load(read_config_text(folder, iteration))
    found = compare(saved, machine.config)
    if found.must:
        raise ValueError(f"{folder}, iteration {iteration}, was saved with another configuration.\n{found.must_text()}")
    if found.warn and is_main_rank():
        print(f"{folder}: the configuration has changed since.\n{found.warn_text()}", file=sys.stderr, flush=True)
