"""Dry runs against real ones on the quickstart's model: what one process plans is what every rank of a run counts.

python -m tests.parity dry_run [layout ...]      at the quickstart's own sizes; layouts as below
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_moe.config import normalise
from megatron_moe.config.schema import Config
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.plan.configure import configured
from megatron_moe.plan.live import LiveBytes, replaced
from megatron_moe.plan.rank import StateBytes, Traffic, state_bytes, trace_rank
from megatron_moe.training.build import build_machine
from megatron_moe.training.step import train_step
from tests.helpers.ranks import RankPool
from tests.parity.harness import _groups, batches, layout, make_groups, vary

QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
LAYOUTS = (
    "dp=1",
    "dp=4,ep=4,zero=1",
    "dp=2,ep=2,etp=1,zero=2",
    "dp=4,ep=2,zero=3",
    "tp=2,dp=2,etp=2",
    "tp=2,dp=2,ep=4,zero=1",
    "cp=2,dp=2,ep=4",
    "cp=2,dp=1,ep=2,cp_comm=p2p",
    "pp=2,dp=2,ep=2",
    "pp=4,dp=1,schedule=1f1b",
    "pp=2,dp=2,schedule=1f1b,zero=2",
    "pp=2,dp=2,ep=2,schedule=zb-h1,zero=2",
    "pp=2,tp=2,ep=2,schedule=dualpipe-v",
    "tp=2,cp=2,dp=2,ep=4,etp=2,dispatcher=allgather",
    "dp=8,ep=4,dispatcher=allgather",
    "dp=4,ep=4,deduplicate=1",
    "tp=2,dp=4,ep=4,etp=2,overlap=2,deduplicate=1",
    "dp=4,ep=2,overlap=3",
    "tp=2,dp=2,ep=2,etp=2,overlap=2,dispatcher=allgather",
    "dp=4,ep=4,mbs=4,overlap=2,overlap_attention=1",
)
# Where the peak is a skewed rank's: few tokens round differently from micro-batch to micro-batch, a plan has one kind.
PEAK_TOLERANCE, SKEWED_TOLERANCE = 0.05, 0.08


def quickstart(text: str, **others: object) -> tuple[Config, int]:
    """The quickstart's model in a layout, with forced choices; and the ranks of it."""
    values, world_size = layout(text)
    fixed = {"distributed_backend": "gloo", "moe_router": "force_balanced", "mock_data": True, "data_path": None}
    base = configured(["--config", str(QUICKSTART), "--expert-model-parallel-size", "1"], 1)
    config, _ = normalise(vary(base, **{**fixed, **values, **others}), world_size)
    return config, world_size


class Watch(TorchDispatchMode):
    """Notes what operations make."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.live.note(tensor)
        return made


def unwatched(start: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction in place that begins during the backward pass: what gloo holds meanwhile is not the step's."""

    def begin(*arguments: Any) -> Any:
        with _disable_current_modes():
            return start(*arguments)

    return begin


def real(rank: int, config: Config, world_size: int) -> tuple[Traffic, StateBytes, int | None]:
    """Traffic of a real step, state between steps, and the most that lived while the pipeline ran, over the state."""
    ctx = ParallelContext.create(MeshSizes.of(config.parallel, world_size), rank=rank, groups=_groups)
    machine = build_machine(config, ctx)
    state = state_bytes(machine)
    ctx.traffic.waiting = _disable_current_modes  # type: ignore[method-assign]  # gloo scatters by way of whole tensors
    data = batches(config, 0, ctx.dp.rank, ctx.dp.size, padded=False)
    live, run = LiveBytes(), machine.runtime.run

    def measured(*arguments: Any) -> torch.Tensor:
        with Watch(live):
            return run(*arguments)

    for stage in machine.stages.values():
        for bucket in stage.reducer.buckets:
            for tensor in (bucket.weights, bucket.grads, bucket.shard_grads, bucket.shard_weights):
                live.note(tensor)
    before = live.begin()
    watched = ctx.cp.size == 1 or config.parallel.cp_comm_type == "p2p"  # torch makes no mask while it is watched
    if watched:
        machine.runtime.run = measured  # type: ignore[method-assign]
    peaks = []
    # gloo's threads let go of tensors when they come to it: the smallest peak is the step's own
    for iteration in range(1, 4):
        live.begin()
        ctx.traffic.clear()
        # What the pipeline leaves under way is freed after it.
        with live.watching(), replaced(collectives, "start_sum", unwatched(collectives.start_sum)):
            train_step(machine, data, iteration, 1e-3)
        peaks.append(live.peak - before)
    sent = {key: (calls, ctx.traffic.sent_bytes[key]) for key, calls in ctx.traffic.calls.items()}
    return sent, state, min(peaks[1:]) if watched else None


def differences(config: Config, world_size: int, ranks: RankPool, compared: Iterable[int] | None = None) -> list[str]:
    """What a plan and a real run of a layout do not agree on, rank by rank; of some ranks or of all."""
    ranks.run(ranks.size, make_groups, MeshSizes.of(config.parallel, world_size))
    counted = ranks.run(world_size, real, config, world_size)
    tolerance = SKEWED_TOLERANCE if config.moe.moe_router == "force_skewed" else PEAK_TOLERANCE
    found = []
    for rank in range(world_size) if compared is None else compared:
        (traffic, state, peak), dry = counted[rank], trace_rank(config, world_size, rank)
        for key in sorted(traffic | dry.traffic):
            if traffic.get(key) != dry.traffic.get(key):
                found.append(f"rank {rank}, {key}: {traffic.get(key)} calls and bytes, planned {dry.traffic.get(key)}")
        if state != dry.state:
            found.append(f"rank {rank}: {state}, planned {dry.state}")
        if peak is not None and abs(dry.peak[0] - peak) > tolerance * peak:
            found.append(f"rank {rank}: peak of activations {peak:,} bytes, planned {dry.peak[0]:,}")
    return found
