"""--moe-overlap-attention: what is computed while tokens travel, forward and backward."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_moe.config import normalise
from megatron_moe.config.schema import Config
from megatron_moe.model.core_attention import CoreAttention
from megatron_moe.moe.experts import Experts
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.training.build import build_machine
from megatron_moe.training.step import train_step
from tests.helpers.ranks import RankPool
from tests.parity.harness import BASE, _groups, batches, layout, make_groups, vary

Event = tuple[str, int]  # what happened, and to which transfer


class _Marked(torch.autograd.Function):
    """Identity that notes when the backward pass comes here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[Event], name: str) -> Tensor:
        ctx.events, ctx.name = events, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.events.append((ctx.name, 0))
        return grad, None, None


def _noted(kind: type, method: str, name: str, events: list[Event]) -> Any:
    original = getattr(kind, method)

    def noting(self: Any, *arguments: Any) -> Tensor:
        events.append((name, 0))
        return _Marked.apply(original(self, *arguments), events, name)  # type: ignore[return-value]

    return mock.patch.object(kind, method, noting)


def events_of_a_step(rank: int, config: Config, sizes: MeshSizes) -> list[Event]:
    config, _ = normalise(config, sizes.world)
    machine = build_machine(config, ParallelContext.create(sizes, rank=rank, groups=_groups))
    events: list[Event] = []
    start, wait, numbers = collectives._Exchange.start, collectives._Exchange.wait, {}

    def started(self: Any, rows: Tensor, *, back: bool = False) -> Tensor:
        numbers[self] = len(events)
        events.append(("start", numbers[self]))
        return start(self, rows, back=back)

    def waited(self: Any) -> Tensor:
        events.append(("wait", numbers[self]))
        return wait(self)

    attention = _noted(CoreAttention, "core", "attention", events)
    experts = _noted(Experts, "forward", "experts", events)
    transfers = mock.patch.multiple(collectives._Exchange, start=started, wait=waited)
    with attention, experts, transfers:
        train_step(machine, batches(config, 0, rank, sizes.world, padded=False), 1, 1e-2)
    return events


def hidden_behind(events: list[Event]) -> list[set[str]]:
    """What was computed while each transfer was under way."""
    ends = {number: i for i, (name, number) in enumerate(events) if name == "wait"}
    return [
        {name for name, _ in events[i : ends[number]]} - {"start", "wait"}
        for i, (name, number) in enumerate(events)
        if name == "start"
    ]


def test_attention_and_experts_of_other_samples_hide_every_transfer_but_the_last(ranks: RankPool) -> None:
    values, world_size = layout("dp=2,ep=2,mbs=4,overlap=2,overlap_attention=1")
    config = vary(BASE, num_layers=3, moe_layer_freq="1", global_batch_size=8, **values)
    sizes = MeshSizes.of(config.parallel, world_size)
    ranks.run(ranks.size, make_groups, sizes)
    for events in ranks.run(world_size, events_of_a_step, config, sizes):
        behind = hidden_behind(events)
        assert len(behind) == 3 * 2 * 3 * 2, "layers, parts, transfers, forward and backward"
        forward, backward = behind[: len(behind) // 2], behind[len(behind) // 2 :]
        # Of a layer: rows and weights of part 1, of part 2; results of part 1, of part 2.
        expected = [*[{"attention"}] * 2, *[{"experts"}] * 2, {"experts"}, {"attention"}] * 3
        assert forward == [*expected[:-1], set()], "nothing is left behind the last"
        assert backward == [set(), *expected[:-1][::-1]]
