"""bench-small: the model that this project and its peers train, and the line of JSON that each run of it prints.

4 layers, hidden 256, 8 heads of 32 in 4 groups, every layer 8 experts top-2 of width 512, SwiGLU, RMSNorm, rotary
positions, vocabulary 8,192 untied, sequence 256, micro-batch 8, float32, AdamW, clip 1.0, dropless, balance loss 0.01,
random tokens. Needs PyTorch alone, so that it runs in every peer's environment.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import as_json, machine, measure, product_gflops

LAYERS, HIDDEN, HEADS, GROUPS, CHANNELS = 4, 256, 8, 4, 32
EXPERTS, TOPK, WIDTH = 8, 2, 512
VOCABULARY, SEQUENCE, MICRO_BATCH = 8192, 256, 8
LEARNING_RATE, WEIGHT_DECAY, CLIP, BALANCE = 1e-4, 0.01, 1.0, 0.01
TOKENS = SEQUENCE * MICRO_BATCH

# Multiply-adds of one token in the forward pass; attention is causal, so a query meets half of the keys.
_ATTENTION = HIDDEN * CHANNELS * (HEADS + 2 * GROUPS) + HEADS * CHANNELS * HIDDEN + HEADS * CHANNELS * SEQUENCE
_EXPERTS = HIDDEN * EXPERTS + TOPK * 3 * HIDDEN * WIDTH
FLOPS_PER_TOKEN = (
    3 * 2 * (LAYERS * (_ATTENTION + _EXPERTS) + HIDDEN * VOCABULARY)
)  # the backward pass costs two forwards


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every run of bench-small."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--threads", type=int, help="per process; default: 2 over the processes")
    made.add_argument("--micro-batches", type=int, default=1, help="per step")
    made.add_argument("--steps", type=int, default=12, help="quiet steps to time")
    made.add_argument("--most-seconds", type=float, default=60.0)
    return made


def start(arguments: argparse.Namespace) -> tuple[int, int]:
    """Take the threads that this process may have; returns its rank and the number of processes."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(arguments.threads or max(1, 2 // world))
    return int(os.environ.get("RANK", "0")), world


def join(arguments: argparse.Namespace) -> tuple[int, int]:
    """``start`` for frameworks that want a process group even around a single process."""
    rank, world = start(arguments)
    if world > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return rank, world


def random_ids(length: int, generator: torch.Generator) -> torch.Tensor:
    """Token ids [micro-batch, length]."""
    return torch.randint(0, VOCABULARY, (MICRO_BATCH, length), generator=generator)


def report(step: Callable[[], Any], tokens: int, arguments: argparse.Namespace, **more: Any) -> None:
    """Time ``step``, which handles ``tokens`` over all ranks, and print the line on rank 0."""
    timing = measure(step, steps=arguments.steps, most_seconds=arguments.most_seconds)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if rank == 0:
        limit, rate = machine_gflops(world), tokens / timing.seconds
        figures = {
            "tokens_per_second": round(rate),
            "share_of_products": round(rate * FLOPS_PER_TOKEN / 1e9 / limit, 3),
            "product_gflops": round(limit, 1),
        }
        print(as_json(timing, what="bench-small", **figures, **more, **machine()), flush=True)
    if world > 1:
        dist.barrier()


def machine_gflops(processes: int) -> float:
    """Rate of the largest expert product with the threads of all processes, while the others wait.

    One process measures, so that the limit is the same under every layout: processes that measure for themselves do
    not do so at the same time, and where cores share arithmetic units their rates do not add up.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(threads * processes)
    found = product_gflops(TOKENS * TOPK // EXPERTS, HIDDEN, 2 * WIDTH)
    torch.set_num_threads(threads)
    return found
