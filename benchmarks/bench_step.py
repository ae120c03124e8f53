"""Tokens per second of whole training steps of a small model ("bench-small"), in one process or under a layout.

    python benchmarks/bench_step.py                                                     # 1 process x 2 threads
    torchrun --nproc-per-node 2 benchmarks/bench_step.py --expert-model-parallel-size 2
    torchrun --nproc-per-node 2 benchmarks/bench_step.py --pipeline-model-parallel-size 2 --micro-batches 4

The model is that of ``small.py``. Prints one line of JSON. Flags that are not the benchmark's own are the
configuration's.
"""

import os
import sys

import numpy as np
import small
import torch
import torch.distributed as dist

from megatron_moe.config.schema import Config
from megatron_moe.data.batch import Batch, CollateOptions, collate
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.plan.configure import configured
from megatron_moe.training.build import Machine, build_machine, with_vocabulary
from megatron_moe.training.memory import keep_freed_memory, restart_for_cpu
from megatron_moe.training.step import train_step

BENCH_SMALL = {
    "num-layers": small.LAYERS,
    "hidden-size": small.HIDDEN,
    "num-attention-heads": small.HEADS,
    "num-query-groups": small.GROUPS,
    "kv-channels": small.CHANNELS,
    "num-experts": small.EXPERTS,
    "moe-layer-freq": 1,
    "moe-router-topk": small.TOPK,
    "moe-ffn-hidden-size": small.WIDTH,
    "moe-aux-loss-coeff": small.BALANCE,
    "vocab-size": small.VOCABULARY,
    "seq-length": small.SEQUENCE,
    "micro-batch-size": small.MICRO_BATCH,
    "clip-grad": small.CLIP,
    "weight-decay": small.WEIGHT_DECAY,
    "lr": small.LEARNING_RATE,
}
FLAGS = ["--untie-embeddings-and-output-weights"]


def build(argv: list[str]) -> tuple[Machine, Config]:
    """The model of this rank under the layout that the flags name."""
    keep_freed_memory()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    flags = [text for name, value in BENCH_SMALL.items() for text in (f"--{name}", str(value))]
    config = with_vocabulary(configured([*flags, *FLAGS, *argv], world), small.VOCABULARY)
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
    parser = small.parser(__doc__)
    parser.add_argument("--profile", action="store_true", help="also print the operators of one step")
    arguments, rest = parser.parse_known_args(argv)
    _, world = small.start(arguments)
    total = str(arguments.micro_batches * small.MICRO_BATCH)
    machine_here, config = build([*rest, "--global-batch-size", total] if world == 1 else rest)
    ctx, count = machine_here.ctx, arguments.micro_batches
    batches, iteration = random_batches(config, ctx.dp.rank, count, 0), 0

    def step() -> None:
        nonlocal iteration
        iteration += 1
        train_step(machine_here, batches, iteration, small.LEARNING_RATE)

    step()
    ctx.traffic.clear()
    step()
    sent = {f"{axis} {kind}": ctx.traffic.sent_bytes[axis, kind] for axis, kind in ctx.traffic.calls}
    small.report(step, small.TOKENS * count * ctx.dp.size, arguments, framework="megatron_moe", sent_bytes=sent)
    if arguments.profile:
        with torch.profiler.profile(record_shapes=True) as profiler:
            step()
        if ctx.rank == 0:
            operators = profiler.key_averages(group_by_input_shape=True)
            print(operators.table(sort_by="self_cpu_time_total", row_limit=40), file=sys.stderr)
    if world > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    restart_for_cpu()
    sys.exit(main())
