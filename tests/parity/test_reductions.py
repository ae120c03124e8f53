"""Sharded gradients travel behind the rest of the backward pass: by the order of events in a real step."""

from typing import Any

import pytest
from torch import Tensor

from megatron_moe.config import normalise
from megatron_moe.config.schema import Config
from megatron_moe.model.decoder import Decoder
from megatron_moe.parallel.buckets import Bucket
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.plan.live import replaced
from megatron_moe.training.build import build_machine
from megatron_moe.training.step import train_step
from tests.helpers.ranks import RankPool
from tests.parity.harness import BASE, _groups, batches, layout, make_groups, vary

Event = tuple[str, int]
OUTSIDE, LAYERS = 0, range(1, 5)  # units of the model as the reducer numbers them


def events_of_a_step(rank: int, config: Config, sizes: MeshSizes) -> list[Event]:
    """What happened to the whole gradients of each unit: written, begun and ended to be reduced; forward passes."""
    ctx = ParallelContext.create(sizes, rank=rank, groups=_groups)
    machine = build_machine(config, ctx)
    unit_of = {id(b): i for i, unit in enumerate(machine.stages[0].reducer.units) for b in unit}
    forward, accumulate, begin, end = Decoder.forward, Bucket.accumulate, Bucket.start_reduce, Bucket.finish_reduce
    events: list[Event] = []

    def noted_forward(self: Decoder, *arguments: Any) -> Tensor:
        events.append(("forward", OUTSIDE))
        return forward(self, *arguments)

    def noted_accumulate(self: Bucket, *arguments: Any) -> bool:
        events.append(("written", unit_of[id(self)]))
        return accumulate(self, *arguments)

    def noted_begin(self: Bucket) -> None:
        begin(self)
        events.append(("begun", unit_of[id(self)]))

    def noted_end(self: Bucket) -> None:
        if self.reducing:
            events.append(("ended", unit_of[id(self)]))
        end(self)

    with (
        replaced(Decoder, "forward", noted_forward),
        replaced(Bucket, "accumulate", noted_accumulate),
        replaced(Bucket, "start_reduce", noted_begin),
        replaced(Bucket, "finish_reduce", noted_end),
    ):
        train_step(machine, batches(config, 0, ctx.dp.rank, ctx.dp.size, padded=False), 1, 1e-2)
    return events


@pytest.mark.parametrize("text", ["zero=2", "zero=3", "zero=2,overlap=2", "zero=2,overlap=2,overlap_attention=1"])
def test_a_layer_is_reduced_while_the_next_one_is_computed(text: str, ranks: RankPool) -> None:
    values, world_size = layout(f"dp=2,mbs=2,{text}")
    config, _ = normalise(vary(BASE, **values), world_size)
    sizes = MeshSizes.of(config.parallel, world_size)
    ranks.run(ranks.size, make_groups, sizes)
    events, other = ranks.run(world_size, events_of_a_step, config, sizes)
    assert events == other
    second = events.index(("forward", OUTSIDE), 1)
    first_pass, later = events[:second], events[second:]
    for above, below in zip(reversed(LAYERS), [*reversed(LAYERS)][1:], strict=False):
        begun, ended = first_pass.index(("begun", above)), first_pass.index(("ended", above))
        written = [i for i, event in enumerate(first_pass) if event == ("written", below)]
        assert begun < written[0] < ended, f"layer {above - 1} travels while layer {below - 1} is computed"
        assert ended < first_pass.index(("begun", below)) + 2, "and no longer than until that one has its gradients"
    # What is left at the end travels behind the next forward pass, and is there before the backward pass behind it.
    assert ("ended", OUTSIDE) not in first_pass
    assert later.index(("ended", OUTSIDE)) < [kind for kind, _ in later].index("written")
