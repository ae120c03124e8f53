"""Saving and resuming a run: what is stored, and what a stored configuration must have in common with this one."""

import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from megatron_moe.checkpoint import (
    BackgroundWriter,
    CheckpointError,
    entries_of,
    find_latest,
    load_checkpoint,
    newest_whole,
    on_first_rank,
    read_config_text,
    save_checkpoint,
    verify_checkpoint,
)
from megatron_moe.checkpoint.entries import Entry
from megatron_moe.config import compare, from_dict
from megatron_moe.config.schema import CheckpointConfig, Config
from megatron_moe.model.decoder import Decoder
from megatron_moe.moe.gate import Gate
from megatron_moe.parallel.buckets import Piece
from megatron_moe.parallel.sharding import sharded_parameters
from megatron_moe.training.build import Machine
from megatron_moe.training.launch import is_main_rank


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """What gates remember from step to step, by logical name: balancing biases, loads of the last global batch."""
    gates = [(name, module) for name, module in model.named_modules() if isinstance(module, Gate)]
    return {f"{name}.{key}": buffer for name, gate in gates for key, buffer in gate.named_buffers()}


def entries_of_machine(machine: Machine) -> list[Entry]:
    """All logical tensors of a run, and what of them is here."""
    tensors = {id(piece): machine.optimizer.tensors(i) for i, piece in enumerate(machine.pieces)}

    def state_of(piece: Piece) -> dict[str, Tensor]:
        return tensors[id(piece)]

    buffers = {name: buffer for stage in machine.stages.values() for name, buffer in _buffers(stage.module).items()}
    return entries_of(machine.pieces, state_of, buffers, machine.ctx)


class Saver:
    """Saves a run to --save, at once or in the background; knows what was saved last and how long training waited.

    Args:
        saved_at: iteration of the checkpoint in --save that the run goes on from, if it does.
    """

    def __init__(self, machine: Machine, saved_at: int | None) -> None:
        self._machine, self._config = machine, machine.config.checkpoint
        self.saved_at = saved_at
        self._stall_seconds: float | None = None
        self._writer: BackgroundWriter | None = None
        if self._config.async_save and self._config.save is not None:
            world = machine.ctx.world
            group = dist.new_group(list(world.ranks), backend="gloo") if world.size > 1 else None
            self._writer = BackgroundWriter(machine.ctx, group)  # type: ignore[arg-type]

    def save(self, iteration: int, scalars: dict[str, Any], config_text: str) -> None:
        """Store weights, optimizer state, biases and the scalars; with --async-save, return once they are copied.

        Raises:
            CheckpointError: on every rank alike; what was saved before is untouched. In the background: the save before
                failed.
        """
        start, folder = time.perf_counter(), self._config.save
        assert folder is not None
        scalars = {**scalars, "optimizer_steps": self._machine.optimizer.num_steps}
        entries, retained = entries_of_machine(self._machine), self._config.save_retain_interval
        keep = (self._config.keep_last or (1 if retained else None), retained)
        if self._writer is None:
            save_checkpoint(folder, iteration, entries, scalars, config_text, self._machine.ctx, *keep)
        else:
            self._writer.save(folder, iteration, entries, scalars, config_text, *keep)
        self.saved_at = iteration
        self._stall_seconds = (self._stall_seconds or 0.0) + time.perf_counter() - start

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed on this rank: :meth:`wait`, on all ranks, says why."""
        return self._writer is not None and self._writer.failed

    def wait(self) -> None:
        """Until what was saved is on disk.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._writer is not None:
            self._writer.wait()

    def take_stall_seconds(self) -> float | None:
        """Seconds that training waited for saves since this was asked last; None without a save."""
        seconds, self._stall_seconds = self._stall_seconds, None
        return seconds


def saved_config(folder: str, iteration: int | None) -> Config:
    """The configuration a checkpoint was saved with.

    Raises:
        ValueError: there is no checkpoint.
    """
    iteration = find_latest(folder) if iteration is None else iteration
    if iteration is None:
        raise ValueError(f"{folder} holds no checkpoint; give the folder of a run, which holds folders iter_NNNNNNN.")
    return from_dict(yaml.safe_load(read_config_text(folder, iteration)))


@dataclass(frozen=True)
class Loaded:
    """What a run goes on from."""

    folder: str
    iteration: int
    scalars: dict[str, Any]


@torch.no_grad()
def load(machine: Machine, *, quiet: bool = False) -> Loaded | None:
    """Resume from --save where that holds a checkpoint, so that the same command goes on; else start from --load.

    Returns:
        None to start at iteration 0: there is nothing to load, or the weights alone were.

    Raises:
        ValueError: --load holds no checkpoint, or one of another model; the checkpoint is damaged.
    """
    config, ctx = machine.config.checkpoint, machine.ctx
    source = on_first_rank(ctx, lambda: _source(config))
    if source is None:
        return None
    folder, iteration, weights_only = source
    iteration = _verified(machine, folder, iteration)
    _check_configuration(machine, folder, iteration, weights_only)
    scalars = restore(machine, folder, iteration, weights_only=weights_only)
    if is_main_rank() and not quiet:
        print(f"loaded {folder}, iteration {iteration}" + (", weights alone" if weights_only else ""), flush=True)
    if weights_only:
        machine.optimizer.masters_from_weights()
        return None
    return Loaded(folder, iteration, scalars)


@torch.no_grad()
def restore(
    machine: Machine, folder: str, iteration: int, *, weights_only: bool = False, verify: bool = False
) -> dict[str, Any]:
    """Weights, optimizer state and biases of a checkpoint into the machine; the scalars it was saved with.

    Raises:
        CheckpointError: on every rank alike.
    """
    entries = entries_of_machine(machine)
    scalars = load_checkpoint(folder, iteration, entries, machine.ctx, weights_only=weights_only, verify=verify)
    for stage in machine.stages.values():
        stage.reducer.gather_weights()
    if not weights_only:
        machine.optimizer.num_steps = int(scalars["optimizer_steps"])
    return scalars


@torch.no_grad()
def load_weights(model: Decoder, folder: str, iteration: int | None) -> None:
    """Weights and biases of a checkpoint into a model that is not trained: without gradients and optimizer.

    Raises:
        CheckpointError: on every rank alike: there is none, it is damaged, or it is of another model.
    """
    ctx, pieces = model.ctx, []
    for parameter in sharded_parameters(model).values():
        weight, nothing = parameter.data.view(-1), parameter.data.new_empty(0)
        replicas = parameter.spec.num_replicas(ctx)
        pieces.append(Piece(parameter, 0, weight.numel(), weight=weight, grad=nothing, replicas=replicas))
    entries = entries_of(pieces, lambda piece: {}, _buffers(model), ctx)
    load_checkpoint(folder, iteration, entries, ctx, weights_only=True)


def _source(config: CheckpointConfig) -> tuple[str, int, bool] | None:
    """(folder, iteration, weights alone) to load; None for a run that begins."""
    newest = None if config.save is None else _latest(config.save, config.auto_recover)
    if config.save is not None and newest is not None and config.ckpt_step is None:
        return config.save, newest, False
    folder = config.load or config.save
    if folder is None:
        return None
    iteration = _latest(folder, config.auto_recover) if config.ckpt_step is None else config.ckpt_step
    if iteration is None and config.load is not None:
        raise CheckpointError(f"--load {config.load} holds no checkpoint; leave --load out to start anew.")
    return None if iteration is None else (folder, iteration, config.finetune)


def _latest(folder: str, auto_recover: bool) -> int | None:
    """The iteration to resume from; where the file that names it is damaged, the newest whole one, if wanted."""
    try:
        return find_latest(folder)
    except CheckpointError as error:
        whole = newest_whole(folder) if auto_recover else None
        if whole is None:
            raise
        print(f"{error}\n--auto-recover: going on from iteration {whole}.", file=sys.stderr, flush=True)
        return whole


def _verified(machine: Machine, folder: str, iteration: int) -> int:
    """The iteration, if its files are whole; else, with --auto-recover, the newest older one whose files are.

    Raises:
        CheckpointError: on every rank alike.
    """
    config, ctx = machine.config.checkpoint, machine.ctx
    try:
        verify_checkpoint(folder, iteration, ctx)
        return iteration
    except CheckpointError as error:
        if not config.auto_recover or config.ckpt_step is not None:
            raise
        whole = on_first_rank(ctx, lambda: newest_whole(folder, iteration))
        if whole is None:
            raise
        if is_main_rank():
            print(f"{error}\n--auto-recover: going on from iteration {whole}.", file=sys.stderr, flush=True)
        return whole


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
