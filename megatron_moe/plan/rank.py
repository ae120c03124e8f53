"""One rank of a layout, dry: its real machine on a device without data, its real step over a few micro-batches.

    build_machine --> train_step of a few micro-batches: the first, the last, one of each kind between
                          each action: bytes it keeps, bytes it needs meanwhile, FLOPs, what it sends
                      the rank's list of all micro-batches, replayed over these --> peak, FLOPs and traffic of the step

A micro-batch costs what every other of its kind does, but for the first, which may find buffers empty, and the last,
which may begin the reduction of gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_moe.config.schema import Config
from megatron_moe.data.batch import Batch
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.pipeline.actions import Action, Kind, Schedule
from megatron_moe.plan.flops import PARTS, ForwardParts, training_flops
from megatron_moe.plan.loads import give_choices
from megatron_moe.plan.operations import WORK, Counted
from megatron_moe.plan.tensors import dry_device
from megatron_moe.training.build import Machine, build_machine
from megatron_moe.training.step import train_step

Traffic = dict[tuple[str, str], tuple[int, int]]
"""(axis, collective) -> calls and bytes sent."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes of what lives from step to step on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(machine: Machine) -> StateBytes:
    """Counted on a machine between two steps, real or dry."""
    buckets = [bucket for stage in machine.stages.values() for bucket in stage.reducer.buckets]
    masters = [m for m, p in zip(machine.optimizer.masters, machine.pieces, strict=True) if m is not p.weight]
    moments = [t for i in range(len(machine.pieces)) for n, t in machine.optimizer.tensors(i).items() if n != "master"]
    return StateBytes(
        parameters=_bytes(t for bucket in buckets for t in (bucket.weights, bucket.shard_weights)),
        gradients=_bytes(t for bucket in buckets for t in (bucket.grads, bucket.shard_grads)),
        optimizer=_bytes(masters) + _bytes(moments),
    )


def _bytes(tensors: Any) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class ActionCost(NamedTuple):
    """What one action does to this rank.

    Attributes:
        kept: bytes alive after it over before, without those under way.
        most: the same at most meanwhile, with them.
        under_way: bytes that it leaves to be reduced until the next pass that makes gradients.
        buffers: what of ``most`` collectives send from or fill; what outlives the action is an activation.
        work: FLOPs and bytes by kind of operation (``operations.WORK``).
        parts: FLOPs by part of the model (``flops.PARTS``), those of recomputations among them.
        sent: its traffic.
    """

    kept: int
    most: int
    under_way: int
    buffers: int
    work: dict[str, float]
    parts: dict[str, float]
    sent: Traffic


MAKE_GRADIENTS = (Kind.B, Kind.I, Kind.W)
Costs = dict[tuple[Kind, int, str], ActionCost]


def phase(microbatch: int, num_microbatches: int) -> str:
    """The first micro-batch may find buffers empty, the last may begin to reduce; those between are all alike."""
    return {num_microbatches - 1: "last", -1: "last", 0: "first"}.get(microbatch, "middle")


@dataclass(frozen=True)
class RankTrace:
    """What a rank holds, sends and computes.

    Attributes:
        pp_rank: its place in the pipeline.
        schedule: of the whole step, with all its micro-batches.
        num_parameters: logical elements of this pipeline rank's stages over all its ranks, selection biases too.
        costs: by kind, number of the stage among those of the rank, and phase (:func:`phase`).
        traffic: calls and bytes of the whole step.
    """

    pp_rank: int
    schedule: Schedule
    state: StateBytes
    num_parameters: int
    costs: Costs
    traffic: Traffic

    @cached_property
    def actions(self) -> list[tuple[Action, ActionCost]]:
        """The rank's list, each action with its cost."""
        stages, num = self.schedule.stages_of(self.pp_rank), self.schedule.num_microbatches
        return [
            (a, self.costs[a.kind, stages.index(a.stage), phase(a.microbatch, num)])
            for a in self.schedule.actions(self.pp_rank)
        ]

    @cached_property
    def peak(self) -> tuple[int, int]:
        """The most bytes alive, over what lives from step to step, while the rank does its list; the buffers in it."""
        live = under_way = peak = buffers = 0
        for action, cost in self.actions:
            if action.kind in MAKE_GRADIENTS:
                under_way = 0
            if live + under_way + cost.most > peak:
                peak, buffers = live + under_way + cost.most, under_way + cost.buffers
            live += cost.kept
            under_way += cost.under_way
        return peak, buffers

    @property
    def flops(self) -> dict[str, float]:
        """What this rank computes in the step by part of the model, and in recomputation."""
        forward = [cost.parts for action, cost in self.actions if action.kind is Kind.F]
        hardware = self.work["matmul"] + self.work["attention"]
        return training_flops({part: sum(parts[part] for parts in forward) for part in PARTS}, hardware)

    @cached_property
    def sent_in_actions(self) -> Traffic:
        """What its actions send; the rest of the step's traffic comes before and after them."""
        total: Traffic = {}
        for _, cost in self.actions:
            total = _added(total, cost.sent)
        return total

    @property
    def work(self) -> dict[str, float]:
        """What this rank computes in the step, recomputation included, by kind of operation."""
        return {name: sum(cost.work[name] for _, cost in self.actions) for name in WORK}


class _Probe(Machine):
    """The machine, whose schedules are those of the whole step with some micro-batches alone."""

    chosen: tuple[int, ...] = ()

    def schedule(self, num_microbatches: int, *, training: bool) -> Schedule:
        whole = super().schedule(steps_of(self.config, self.ctx.sizes), training=training)
        return with_microbatches(whole, self.chosen)


def steps_of(config: Config, sizes: MeshSizes) -> int:
    """Micro-batches of a step."""
    per_microbatch = config.training.micro_batch_size * sizes.dp
    return (config.training.global_batch_size or per_microbatch) // per_microbatch


def kinds_of_microbatches(schedule: Schedule, pp_rank: int) -> tuple[int, ...]:
    """The first micro-batch, the last, and one of each kind between (a schedule may split some backward passes)."""
    kinds: dict[int, set[tuple[Kind, int]]] = {}
    for action in schedule.actions(pp_rank):
        if action.microbatch >= 0:
            kinds.setdefault(action.microbatch, set()).add((action.kind, action.stage))
    last = schedule.num_microbatches - 1
    between = {frozenset(kinds[i]): i for i in reversed(range(1, last))}
    return tuple(sorted({0, *between.values(), last}))


def with_microbatches(schedule: Schedule, chosen: tuple[int, ...]) -> Schedule:
    """The part of a schedule that concerns some micro-batches, renumbered."""
    numbers = {-1: -1, **{microbatch: i for i, microbatch in enumerate(chosen)}}

    def part(rank: int) -> tuple[Action, ...]:
        return tuple(
            replace(a, microbatch=numbers[a.microbatch]) for a in schedule.actions(rank) if a.microbatch in numbers
        )

    ranks = tuple(part(rank) for rank in range(schedule.num_ranks))
    return replace(schedule, num_microbatches=len(chosen), ranks=ranks)


def trace_rank(config: Config, world_size: int, rank: int, skew: float = 1.0) -> RankTrace:
    """Build and run one rank of a layout, dry.

    Args:
        config: checked and normalised for the world; with a vocabulary size.
        skew: load of expert 0 over the mean.
    """
    sizes = MeshSizes.of(config.parallel, world_size)
    gpu = config.parallel.distributed_backend != "gloo"
    with _fake_world(world_size, rank), dry_device(gpu) as counted:
        ctx = ParallelContext.create(sizes, rank=rank, device="meta")
        built = build_machine(config, ctx)
        machine = _Probe(**vars(built))
        machine.optimizer.step = lambda learning_rate: None  # in place and without communication: nothing to count
        modules = (module for stage in machine.stages.values() for module in stage.module.modules())
        give_choices((module for module in modules if isinstance(module, MoELayer)), config, skew)
        state = state_bytes(machine)
        num_parameters = sum(prod(parameter.spec.shape) for parameter in machine.parameters.values())
        num_parameters += sum(gate.bias_E.numel() for gate in machine.gates.values() if gate.bias_E is not None)
        schedule = built.schedule(steps_of(config, sizes), training=True)
        machine.chosen = kinds_of_microbatches(schedule, ctx.pp.rank)
        counted.live.settle()
        sent, costs = _step(machine, counted)
    few = RankTrace(ctx.pp.rank, with_microbatches(schedule, machine.chosen), state, num_parameters, costs, sent)
    outside = _added(sent, few.sent_in_actions, -1)
    trace = replace(few, schedule=schedule)
    return replace(trace, traffic=_added(outside, trace.sent_in_actions))


def _added(first: Traffic, second: Traffic, sign: int = 1) -> Traffic:
    sums = {
        k: (c + sign * second.get(k, (0, 0))[0], b + sign * second.get(k, (0, 0))[1]) for k, (c, b) in first.items()
    }
    return {key: value for key, value in (second | sums).items() if value[0]}


def _step(machine: _Probe, counted: Counted) -> tuple[Traffic, Costs]:
    """One step of the chosen micro-batches: its traffic, and the costs of its actions."""
    num = len(machine.chosen)
    costs: Costs = {}
    runtime, plain, stages = machine.runtime, dict(machine.runtime._do), list(machine.stages)
    parts = ForwardParts((m for stage in machine.stages.values() for m in stage.module.modules()), counted)

    def measured(do: Callable[..., None]) -> Callable[..., None]:
        def run(action: Action, *others: Any) -> None:
            under_way = machine.stages[action.stage].reducer.under_way
            if action.kind in MAKE_GRADIENTS:
                under_way.finish()  # as the action would; now, so that it is not measured
            left = under_way.num_bytes
            before, work, sent = counted.live.begin(), dict(counted.work), _sent(machine)
            parts.begin()
            do(action, *others)
            left = under_way.num_bytes - left
            kept, most = counted.live.now - before - left, counted.live.peak - before
            spent = {name: counted.work[name] - work[name] for name in WORK}
            now = _sent(machine)
            delta = {k: (now[k][0] - c, now[k][1] - b) for k in now for c, b in [sent.get(k, (0, 0))] if now[k][0] > c}
            key = (action.kind, stages.index(action.stage), phase(action.microbatch, num))
            costs[key] = ActionCost(kept, most, left, counted.live.sent_at_peak, spent, parts.since(), delta)

        return run

    machine.ctx.traffic.clear()
    runtime._do = {kind: measured(do) for kind, do in plain.items()}
    try:
        train_step(machine, [_batch(machine, i) for i in range(num)], 1, 0.0)
    finally:
        runtime._do = plain
    return _sent(machine), costs


def _sent(machine: Machine) -> Traffic:
    traffic = machine.ctx.traffic
    return {key: (calls, traffic.sent_bytes[key]) for key, calls in traffic.calls.items()}


def _batch(machine: Machine, microbatch: int) -> Batch:
    """A micro-batch of one document without padding; on the host, so real."""
    batch, length = machine.config.training.micro_batch_size, machine.config.data.seq_length
    zeros = torch.zeros(batch, length, dtype=torch.int64)
    return Batch(
        tokens=zeros,
        labels=zeros,
        loss_mask=torch.ones(batch, length, dtype=torch.bool),
        position_ids=torch.arange(length).expand(batch, -1),
        document_ids=zeros,
        padding_mask=torch.zeros(batch, length, dtype=torch.bool),
        sample_ids=torch.arange(batch) + microbatch * batch,
    )


@contextmanager
def _fake_world(world_size: int, rank: int) -> Iterator[None]:
    """A process group whose collectives do nothing, of any size, in this process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a dry run is a process by itself"
    if "meta" not in dist.Backend.backend_capability["fake"]:
        dist.Backend.backend_capability["fake"].append("meta")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
