"""The one thing a dry run must be told: which experts tokens go to. Dispatchers run as they are, on given choices.

    skew 1    copies are dealt to experts in turn                    skew s    expert 0 gets s times the mean
    (--moe-router force_balanced and force_skewed choose the same: a real run with them sends the same bytes)
    a capacity drops what exceeds it, the later tokens of a group first
    expert_choice    every expert takes its slots of the group's tokens in turn: nothing can be skewed

The router runs too, for its operations and collectives; its decision is on the device, where no numbers are.
"""

from collections.abc import Callable, Iterable
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.schema import Config, MoEConfig
from megatron_moe.moe.capacity import capacity_slots, group_slots
from megatron_moe.moe.dispatchers import Dispatched, Dispatcher, LocalDispatcher
from megatron_moe.moe.dispatchers.allgather import AllGatherDispatcher, _Counts
from megatron_moe.moe.dispatchers.alltoall import AllToAllDispatcher
from megatron_moe.moe.gate import group_tokens
from megatron_moe.moe.layer import MoELayer
from megatron_moe.moe.routers.forced import dealt_ids
from megatron_moe.moe.routing import Routing
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import coordinates
from megatron_moe.parallel.tokens import context_positions

IdsOfRank = Callable[[int], Tensor]
"""Rank of the world -> [T, K] int64, the experts of its tokens; -1 where there is none."""


def given_ids(config: Config, moe: MoEConfig, ctx: ParallelContext, skew: float) -> IdsOfRank:
    """The choices of every rank for one micro-batch of one layer."""
    seq_length, batch = config.data.seq_length, config.training.micro_batch_size
    group = group_tokens(moe.moe_group_size, seq_length, batch)
    assert moe.num_experts is not None
    slots = group_slots(group, moe, training=True)
    if moe.moe_router == "expert_choice":
        ids_TK = _taken_ids(
            group, moe.num_experts, slots or capacity_slots(group, moe.num_experts, moe.moe_router_topk, 1.0)
        )
    else:
        ids_TK = dealt_ids(group, moe.num_experts, moe.moe_router_topk, skew)
        ids_TK = ids_TK if slots is None else _without_excess(ids_TK, moe.num_experts, slots)
    first_B = torch.arange(batch) * seq_length

    @cache
    def of_rank(rank: int) -> Tensor:
        position = coordinates(rank, ctx.sizes.view("dense"))
        positions_S = context_positions(seq_length, ctx.sizes.cp, position["cp"])
        if config.parallel.sequence_parallel:
            positions_S = positions_S.chunk(ctx.sizes.tp)[position["tp"]]
        return ids_TK[(positions_S.unsqueeze(1) + first_B).flatten() % group]

    return of_rank


def _taken_ids(num_tokens: int, num_experts: int, slots: int) -> Tensor:
    """[T, K] where each expert takes the next ``slots`` tokens, round the group; K as many as a token may get."""
    slots = min(slots, num_tokens)
    taken_N = torch.arange(num_experts * slots)
    ids_TK = torch.full((num_tokens, -(-len(taken_N) // num_tokens)), -1)
    ids_TK[taken_N % num_tokens, taken_N // num_tokens] = taken_N // slots
    return ids_TK


def _without_excess(ids_TK: Tensor, num_experts: int, slots: int) -> Tensor:
    """-1 for all but the first ``slots`` copies of each expert."""
    wanted_NE = torch.nn.functional.one_hot(ids_TK.flatten(), num_experts)
    place_N = (wanted_NE.cumsum(0) * wanted_NE).sum(1)
    return ids_TK.masked_fill(place_N.view_as(ids_TK) > slots, -1)


def _copies(ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """[N] token and expert of each copy."""
    kept_N = (ids_TK >= 0).flatten().nonzero().squeeze(1)
    return kept_N // ids_TK.shape[1], ids_TK.flatten()[kept_N]


class _Given:
    """What the planned dispatchers share: choices in place of the router's."""

    def __init__(self, ids: IdsOfRank, num_experts: int, ctx: ParallelContext) -> None:
        self.ids, self.rank = ids, ctx.rank
        self.ctx, self.num_experts = ctx, num_experts

    def routing(self, routing: Routing) -> Routing:
        token_ids_N, expert_ids_N = self.copies
        return Routing(token_ids_N, expert_ids_N, routing.weights_N[: len(expert_ids_N)])

    @cached_property
    def copies(self) -> tuple[Tensor, Tensor]:
        """[N] token and expert of each copy that this rank sends."""
        return _copies(self.ids(self.rank))

    @cached_property
    def counts_XPL(self) -> Tensor:
        """[etp, ep, L] copies for this rank's experts, by sender."""
        num_local = self.num_experts // self.ctx.ep.size
        mine = slice(self.ctx.ep.rank * num_local, (self.ctx.ep.rank + 1) * num_local)
        counts = [
            [torch.bincount(_copies(ids_TK)[1], minlength=self.num_experts)[mine] for ids_TK in row]
            for row in self.peers()
        ]
        return torch.stack([torch.stack(row) for row in counts])

    def peers(self) -> list[list[Tensor]]:
        """[etp][ep] choices of the ranks that share these experts."""
        ep, etp = self.ctx.ep, self.ctx.etp
        offset = [rank - self.rank for rank in etp.ranks]
        return [[self.ids(rank + shift) for rank in ep.ranks] for shift in offset]


class PlannedLocal(LocalDispatcher):
    """No communication; choices are given."""

    def __init__(self, given: _Given) -> None:
        super().__init__(given.num_experts)
        self.given = given

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        return super().dispatch(x_TD, self.given.routing(routing))


class PlannedAllToAll(AllToAllDispatcher):
    """Choices are given, and so are the counts that peers send."""

    def __init__(self, given: _Given) -> None:
        super().__init__(given.num_experts, given.ctx)
        self.given = given

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        return super().dispatch(x_TD, self.given.routing(routing))

    def _exchange_counts(self, counts_E: Tensor) -> Tensor:
        super()._exchange_counts(counts_E)
        return self.given.counts_XPL


class PlannedAllGather(AllGatherDispatcher):
    """Choices are given, and so is what is gathered of the peers' choices."""

    def __init__(self, given: _Given) -> None:
        super().__init__(given.num_experts, given.ctx)
        self.given = given

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Callable[[], Dispatched]:
        return super().dispatch(x_TD, self.given.routing(routing))

    def _exchange_counts(self, x_TD: Tensor, routing: Routing) -> tuple[_Counts, _Counts]:
        super()._exchange_counts(x_TD, routing)
        peers = self.given.peers()
        tokens = [[ids_TK.shape[0] for ids_TK in row] for row in peers]
        return _Counts(tokens), _Counts([[len(_copies(ids_TK)[0]) for ids_TK in row] for row in peers])

    def _gather(self, rows: Tensor, counts: _Counts) -> Tensor:
        gathered = super()._gather(rows, counts)
        if rows.is_meta:
            return gathered
        flat = [ids_TK for row in self.given.peers() for ids_TK in row]
        pairs = [torch.stack(_copies(ids_TK), 1) for ids_TK in flat]
        return torch.cat(pairs).to(rows.dtype)


_PLANNED: dict[type[Any], Callable[[_Given], Dispatcher]] = {
    LocalDispatcher: PlannedLocal,
    AllToAllDispatcher: PlannedAllToAll,
    AllGatherDispatcher: PlannedAllGather,
}


def give_choices(layers: Iterable[MoELayer], config: Config, skew: float) -> None:
    """Replace the dispatchers of a rank's layers by planned ones; layers with equal experts have equal choices."""
    given: dict[MoEConfig, _Given] = {}
    for layer in layers:
        moe, ctx = layer.config, layer.ctx
        assert moe.num_experts is not None
        if moe not in given:
            given[moe] = _Given(given_ids(config, moe, ctx, skew), moe.num_experts, ctx)
        layer.dispatcher = _PLANNED[type(layer.dispatcher)](given[moe])


def load_problems(config: Config, skew: float) -> list[str]:
    """What cannot be a load of a configuration, in full sentences."""
    moe, problems = config.moe, []
    if moe.num_experts is None:
        return problems if skew == 1.0 else ["A skewed load needs experts: the model has none (--num-experts)."]
    most = moe.num_experts / moe.moe_router_topk
    if not 1.0 <= skew <= most:
        problems.append(f"A skew of {skew:g} cannot be: expert 0 gets from 1 to E/K = {most:g} times the mean load.")
    if skew != 1.0 and moe.moe_router == "expert_choice":
        problems.append("A skew cannot be planned with --moe-router expert_choice: its experts have equal loads.")
    for flag, given in (
        ("--moe-dispatch-deduplicate", moe.moe_dispatch_deduplicate),
        (f"--moe-overlap-degree {moe.moe_overlap_degree}", moe.moe_overlap_degree > 1),
    ):
        if given:
            problems.append(
                f"{flag} cannot be planned yet: choices are given for a whole rank and by copies. Leave it out."
            )
    return problems
