"""Tokens per second of whole training steps of a small model ("bench-small"), in one process or under a layout.

    python benchmarks/bench_step.py                                                     # 1 process x 2 threads
    torchrun --nproc-per-node 2 benchmarks/bench_step.py --expert-model-parallel-size 2
    torchrun --nproc-per-node 2 benchmarks/bench_step.py --pipeline-model-parallel-size 2 --micro-batches 4

bench-small: 4 layers, hidden 256, 8 heads of 32 in 4 groups, every layer 8 experts top-2 of width 512, SwiGLU,
RMSNorm, vocabulary 8,192 untied, sequence 256, micro-batch 8, float32, AdamW, clip 1.0, dropless, balance loss 0.01,
random tokens: 77.4 GFLOP forward and backward per 2,048 tokens. Prints one line of JSON. Flags that are not the
benchmark's own are the configuration's.
"""

import argparse
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from measure import as_json, machine, measure, product_gflops

from megatron_moe.config.schema import Config
from megatron_moe.data.batch import Batch, CollateOptions, collate
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.plan.configure import configured
from megatron_moe.training.build import Machine, build_machine, with_vocabulary
from megatron_moe.training.memory import keep_freed_memory
from megatron_moe.training.step import train_step

BENCH_SMALL = {
    "num-layers": 4,
    "hidden-size": 256,
    "num-attention-heads": 8,
    "num-query-groups": 4,
    "kv-channels": 32,
    "num-experts": 8,
    "moe-layer-freq": 1,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": 512,
    "moe-aux-loss-coeff": 0.01,
    "vocab-size": 8192,
    "seq-length": 256,
    "micro-batch-size": 8,
    "clip-grad": 1.0,
    "weight-decay": 0.01,
    "lr": 1e-4,
}
FLAGS = ["--untie-embeddings-and-output-weights"]
FLOPS_PER_TOKEN = 77.4e9 / 2048


def build(argv: list[str]) -> tuple[Machine, Config]:
    """The model of this rank under the layout that the flags name."""
    keep_freed_memory()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    flags = [text for name, value in BENCH_SMALL.items() for text in (f"--{name}", str(value))]
    config = with_vocabulary(configured([*flags, *FLAGS, *argv], world), BENCH_SMALL["vocab-size"])
    rank = dist.get_rank() if world > 1 else 0
    ctx = ParallelContext.create(MeshSizes.of(config.parallel, world), rank=rank, device="cpu")
    return build_machine(config, ctx), config


def random_batches(config: Config, dp_rank: int, count: int, step: int) -> list[Batch]:
    """Micro-batches of random tokens."""
    data, vocab_size = config.data, config.model.vocab_size
    assert vocab_size is not None
    generator = np.random.default_rng((step, dp_rank))
    options = CollateOptions(vocab_size, 0, False, False, False)
    shape = (count, config.training.micro_batch_size, data.seq_length + 1)
    return [collate(list(rows), list(range(len(rows))), options) for rows in generator.integers(1, vocab_size, shape)]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="per process; default: 2 over the processes")
    parser.add_argument("--micro-batches", type=int, default=1, help="per step")
    parser.add_argument("--steps", type=int, default=12, help="quiet steps to time")
    parser.add_argument("--most-seconds", type=float, default=60.0)
    parser.add_argument("--profile", action="store_true", help="also print the operators of one step")
    arguments, rest = parser.parse_known_args(argv)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(arguments.threads or max(1, 2 // world))
    total = str(arguments.micro_batches * BENCH_SMALL["micro-batch-size"])
    machine_here, config = build([*rest, "--global-batch-size", total] if world == 1 else rest)
    ctx, count = machine_here.ctx, arguments.micro_batches
    batches, iteration = random_batches(config, ctx.dp.rank, count, 0), 0

    def step() -> None:
        nonlocal iteration
        iteration += 1
        train_step(machine_here, batches, iteration, 1e-4)

    step()
    ctx.traffic.clear()
    step()
    sent = {f"{axis} {kind}": ctx.traffic.sent_bytes[axis, kind] for axis, kind in ctx.traffic.calls}
    timing = measure(step, steps=arguments.steps, most_seconds=arguments.most_seconds)
    tokens = BENCH_SMALL["micro-batch-size"] * BENCH_SMALL["seq-length"] * count * ctx.dp.size
    limit = product_gflops(512, 256, 1024) * (world if world > 1 else 1)
    rate = tokens / timing.seconds
    if arguments.profile:
        with torch.profiler.profile(record_shapes=True) as profiler:
            step()
        if ctx.rank == 0:
            operators = profiler.key_averages(group_by_input_shape=True)
            print(operators.table(sort_by="self_cpu_time_total", row_limit=40), file=sys.stderr)
    if ctx.rank == 0:
        share = rate * FLOPS_PER_TOKEN / 1e9 / limit
        print(
            as_json(
                timing,
                what="bench-small",
                tokens_per_second=round(rate),
                share_of_products=round(share, 3),
                product_gflops=round(limit, 1),
                sent_bytes=sent,
                **machine(),
            )
        )
    if world > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
