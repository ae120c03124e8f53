"""Joining and leaving: process groups, and errors that every rank hears of.

An error while setting up is gathered from all ranks and shown once, by rank 0, with the ranks it happened on; every
rank then exits with the same status. A rank that never comes is waited for no longer than
``--distributed-timeout-minutes``.
"""

import hashlib
import math
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

import megatron_moe
from megatron_moe.config.schema import Config, ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.training.meeting import fresh_store, keeps_its_store
from megatron_moe.training.memory import keep_freed_memory

T = TypeVar("T")

EXIT_USER_ERROR = 2


def world_size(smallest_for: ParallelConfig | None = None) -> int:
    """Number of ranks as torchrun says it; without torchrun 1, or the smallest world that a layout fits into."""
    if "WORLD_SIZE" in os.environ or smallest_for is None:
        return int(os.environ.get("WORLD_SIZE", "1"))
    stages = smallest_for.pipeline_model_parallel_size
    dense = smallest_for.tensor_model_parallel_size * smallest_for.context_parallel_size
    return max(1, stages * math.lcm(dense, smallest_for.expert_tp * smallest_for.expert_model_parallel_size))


def is_main_rank() -> bool:
    """Whether this is rank 0, which speaks for all."""
    return int(os.environ.get("RANK", "0")) == 0


def join(config: Config) -> ParallelContext:
    """Join the process group and make this rank's axes.

    Raises:
        RuntimeError: other ranks did not come in time.
    """
    num_ranks = world_size()
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    device = torch.device("cpu")
    if torch.cuda.is_available() and config.parallel.distributed_backend != "gloo":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if num_ranks > 1:
        backend = config.parallel.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
        if backend == "nccl" and device.type != "cuda":
            raise ValueError("--distributed-backend nccl needs CUDA devices, and there are none; use gloo.")
        where = {}
        if keeps_its_store():
            rank = int(os.environ["RANK"])
            where = {"store": fresh_store(rank, num_ranks, timeout), "rank": rank, "world_size": num_ranks}
        dist.init_process_group(backend, timeout=timeout, device_id=device if device.type == "cuda" else None, **where)
    return ParallelContext.create(MeshSizes.of(config.parallel, num_ranks), device=device, timeout=timeout)


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def together(action: Callable[[], T]) -> T:
    """Do something on every rank; an error on any of them is an error on all, told once.

    Raises:
        SystemExit: somewhere the action raised ValueError, OSError or RuntimeError.
    """
    result, problem = None, None
    try:
        result = action()
    except (ValueError, OSError, RuntimeError) as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        problem = f"{error}{notes}" or type(error).__name__
    problems: list[str | None] = [problem]
    if dist.is_initialized():
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    if any(problems):
        fail(problems)
    return result  # type: ignore[return-value]


def fail(problems: list[str | None]) -> NoReturn:
    """End every rank with the problems by rank, equal ones told once."""
    by_text: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem is not None:
            by_text.setdefault(problem, []).append(rank)
    if is_main_rank():
        for text, ranks in by_text.items():
            where = "" if len(ranks) == len(problems) else f" (on rank {', '.join(map(str, ranks))})"
            print(f"error{where}: {text}", file=sys.stderr, flush=True)
    leave()
    raise SystemExit(EXIT_USER_ERROR)


def check_same_everywhere(config_text: str) -> None:
    """Refuse to start when ranks differ in configuration or in the project's code.

    Raises:
        SystemExit: naming the ranks that differ from rank 0.
    """
    if not dist.is_initialized():
        return
    facts = {"configuration": _digest(config_text.encode()), "code": _code_digest(), "torch": torch.__version__}
    gathered: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, facts)
    problems: list[str | None] = [None] * len(gathered)
    for rank, other in enumerate(gathered):
        expected = gathered[0]
        differing = [f"{n} {other[n]} instead of {expected[n]}" for n in facts if other[n] != expected[n]]
        if differing:
            problems[rank] = "differs from rank 0 in " + "; ".join(differing) + ". Start all ranks alike."
    if any(problems):
        fail(problems)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _code_digest() -> str:
    """Digest of the package's sources."""
    root = Path(megatron_moe.__file__).parent
    return _digest(b"".join(path.read_bytes() for path in sorted(root.rglob("*.py"))))
