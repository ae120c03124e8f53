"""From a checked configuration to the end of the run, with one clear word for everything that can go wrong."""

import logging
import os
import platform
import sys
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_moe.checkpoint import CheckpointError
from megatron_moe.config import Resolved, dump
from megatron_moe.data.tokenizer import build_tokenizer
from megatron_moe.kernels.selection import choose, choose_fp8
from megatron_moe.training import launch
from megatron_moe.training.build import with_vocabulary
from megatron_moe.training.faults import SharedError
from megatron_moe.training.heartbeat import Heartbeat
from megatron_moe.training.loop import Run

EXIT_FAILED = 1


def train(resolved: Resolved) -> int:
    """Train; returns the exit status.

    A problem while setting up is gathered and told once. One that strikes while training is told by the rank it struck,
    which then leaves; the launcher ends the others.
    """
    # Warnings, such as of an empty validation split, are the same on every rank.
    logging.basicConfig(format="%(levelname)s: %(message)s", level="WARNING" if launch.is_main_rank() else "ERROR")
    try:
        ctx = launch.join(resolved.config)
    except (ValueError, RuntimeError) as error:
        print(f"error: a rank could not join the others: {error}", file=sys.stderr, flush=True)
        return launch.EXIT_USER_ERROR
    launch.check_same_everywhere(dump(resolved.config))
    data = resolved.config.data
    tokenizer = launch.together(lambda: build_tokenizer(data.tokenizer_type, data.tokenizer_model))
    config = launch.together(lambda: with_vocabulary(resolved.config, tokenizer.vocab_size))
    provenance = dict(resolved.provenance)
    if config.model.vocab_size != resolved.config.model.vocab_size:
        provenance["vocab_size"] = "implied by the tokenizer"
    resolved = replace(resolved, config=config, provenance=provenance)
    run = Run(config, ctx, provenance)
    if launch.is_main_rank():
        dtype = getattr(torch, config.training.params_dtype)
        print(choose(config.model.kernels, ctx.device, dtype).line(), flush=True)
        if config.model.fp8_format is not None:
            fp8 = choose_fp8(config.model.kernels, config.model.fp8_format, ctx.device, dtype)
            print(fp8.line(config.model.fp8_format, config.model.fp8_recipe), flush=True)
    limit = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    heartbeat = Heartbeat(ctx, run.machine.runtime, limit)
    try:
        ending = run.train()
    except (SharedError, CheckpointError) as error:  # on every rank alike
        if launch.is_main_rank():
            print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except (ValueError, OSError, RuntimeError) as error:
        print(_story(error, run, heartbeat), file=sys.stderr, flush=True)
        if dist.is_initialized():
            os._exit(EXIT_FAILED)  # leaving the group in order would wait for ranks that wait for this one
        return EXIT_FAILED
    heartbeat.close()
    if launch.is_main_rank():
        print(ending, flush=True)
    launch.leave()
    return 0


def _story(error: Exception, run: Run, heartbeat: Heartbeat) -> str:
    """What happened, where, and, if it may be another rank's doing, which ranks are silent and where all others are."""
    where = f"{run.ctx.describe()}, host {platform.node()}, last action {run.machine.runtime.current}"
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    others = heartbeat.report() if isinstance(error, RuntimeError) else ""
    return f"error on {where}: {error}{notes}{others}"
