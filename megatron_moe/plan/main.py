"""From a checked configuration to a printed plan, with one clear word for what cannot be planned."""

import os
import sys

from megatron_moe.config.schema import Config
from megatron_moe.data.tokenizer import build_tokenizer
from megatron_moe.plan.cluster import Cluster
from megatron_moe.plan.dry_run import Plan, dry_run
from megatron_moe.plan.estimate import estimate
from megatron_moe.plan.report import as_text
from megatron_moe.training.build import with_vocabulary
from megatron_moe.training.launch import EXIT_USER_ERROR


def show(config: Config, world_size: int) -> int:
    """Print the plan of a layout; returns the exit status."""
    try:
        plan = make_plan(config, world_size)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    print(as_text(plan, None, None), end="")
    return 0


def make_plan(config: Config, world_size: int, skew: float = 1.0) -> Plan:
    """Dry-run a checked configuration, whose vocabulary may still follow from its tokenizer.

    Raises:
        ValueError: what cannot be planned, and why.
    """
    if "WORLD_SIZE" in os.environ:
        raise ValueError("--dry-run is one process by itself: start it without torchrun, and give --world-size.")
    if config.model.vocab_size is None:
        data = config.data
        config = with_vocabulary(config, build_tokenizer(data.tokenizer_type, data.tokenizer_model).vocab_size)
    return dry_run(config, world_size, skew, _progress if sys.stderr.isatty() else None)


def memory_problem(plan: Plan, cluster: Cluster) -> str | None:
    """Why a plan does not fit its devices, and what would cut most; None if it fits."""
    worst = max(range(plan.sizes.pp), key=lambda pp_rank: sum(plan.memory(pp_rank).values()))
    memory = plan.memory(worst)
    total = sum(memory.values()) / 1e9
    if total <= cluster.memory_gb:
        return None
    largest = max(memory, key=lambda name: memory[name])
    advice = {
        "parameters": "more --pipeline-model-parallel-size, --expert-model-parallel-size or "
        "--tensor-model-parallel-size, or --data-parallel-sharding-strategy optim_grads_params",
        "gradients": "--data-parallel-sharding-strategy optim_grads, or more --expert-model-parallel-size",
        "optimizer": "--data-parallel-sharding-strategy optim",
        "activations": "--recompute-granularity full, a smaller --micro-batch-size, or more "
        "--context-parallel-size or --tensor-model-parallel-size",
        "communication": "a smaller --micro-batch-size, or more --context-parallel-size",
    }[largest]
    return (
        f"pipeline rank {worst} needs {total:.1f} GB of the {cluster.memory_gb:g} GB of {cluster.name}; most are "
        f"{largest}, {memory[largest] / 1e9:.1f} GB. What cuts them: {advice}."
    )


def _progress(done: int, of: int) -> None:
    print(f"\rpipeline ranks {done} of {of}", end="\n" if done == of else "", file=sys.stderr, flush=True)


__all__ = ["estimate", "make_plan", "memory_problem", "show"]
