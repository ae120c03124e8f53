"""The one thing a dry run must be told: which experts tokens go to. Dispatchers run as they are, on given choices.

    skew 1    copies are dealt to experts in turn                    skew s    expert 0 gets s times the mean
    (--moe-router force_balanced and force_skewed choose the same: a real run with them sends the same bytes)
    a capacity drops what exceeds it, the later tokens of a group first
    expert_choice    every expert takes its slots of the group's tokens in turn: nothing can be skewed

The router runs too, for its operations and collectives; its decision is on the device, where no numbers are.
"""

from collections.abc import Callable, Iterable
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.schema import Config, MoEConfig
from megatron_moe.moe.capacity import capacity_slots, group_slots
from megatron_moe.moe.dispatchers import Dispatcher, LocalDispatcher
from megatron_moe.moe.dispatchers.allgather import AllGatherDispatcher, _Counts
from megatron_moe.moe.dispatchers.alltoall import AllToAllDispatcher
from megatron_moe.moe.dispatchers.deduplicated import DeduplicatingDispatcher
from megatron_moe.moe.gate import group_tokens
from megatron_moe.moe.layer import MoELayer
from megatron_moe.moe.routers.forced import dealt_ids
from megatron_moe.moe.routing import Choice, Routing, flatten, part_edges
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import coordinates
from megatron_moe.parallel.tokens import context_positions

IdsOfRank = Callable[[int], Tensor]
"""Rank of the world -> [T, K] int64, the experts of its tokens; -1 where there is none."""


def given_ids(config: Config, moe: MoEConfig, batch: int, ctx: ParallelContext, skew: float) -> IdsOfRank:
    """The choices of every rank for one call of one layer, for ``batch`` samples."""
    seq_length = config.data.seq_length
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
    """Choices in place of the router's, for a call of any layer with the same experts.

    Args:
        ids: the choices.
        num_parts: parts in which tokens are dispatched, one after the other.
    """

    def __init__(self, ids: IdsOfRank, num_experts: int, num_parts: int, ctx: ParallelContext) -> None:
        self.ids, self.num_experts, self.num_parts, self.ctx = ids, num_experts, num_parts, ctx
        self._parts = iter(range(0))

    def list_copies(self, choice: Choice, can_drop: bool, kernels: str = "torch") -> Routing:
        """In place of ``flatten``; the layer's dispatcher begins with the first part again."""
        self._parts = iter(range(self.num_parts))
        token_ids_N, expert_ids_N = self._copies
        weights_N = flatten(choice, can_drop, kernels).weights_N
        return Routing(token_ids_N, expert_ids_N, weights_N[: len(expert_ids_N)])

    def next_part(self) -> int:
        """The part that is being dispatched."""
        return next(self._parts)

    @cached_property
    def _copies(self) -> tuple[Tensor, Tensor]:
        """[N] token and expert of each copy that this rank sends."""
        return _copies(self.ids(self.ctx.rank))

    @cached_property
    def peers(self) -> list[list[list[Tensor]]]:
        """[parts][etp][ep] choices of the ranks that share these experts."""
        shifts = [rank - self.ctx.rank for rank in self.ctx.etp.ranks]
        whole = [[self.ids(rank + shift) for rank in self.ctx.ep.ranks] for shift in shifts]
        edges = part_edges(len(whole[0][0]), self.num_parts)
        return [[[ids[start:stop] for ids in row] for row in whole] for start, stop in pairwise(edges)]

    @cached_property
    def counts_ZXPL(self) -> Tensor:
        """[parts, etp, ep, L] copies for this rank's experts, by sender."""
        return self._of_peers(lambda ids_TK: torch.bincount(_copies(ids_TK)[1], minlength=self.num_experts)[self._mine])

    @cached_property
    def tokens_ZXP(self) -> Tensor:
        """[parts, etp, ep] tokens with an expert on this rank, by sender."""
        first, last = self._mine.start, self._mine.stop
        return self._of_peers(lambda ids_TK: ((ids_TK >= first) & (ids_TK < last)).any(1).sum())

    @property
    def _mine(self) -> slice:
        num_local = self.num_experts // self.ctx.ep.size
        return slice(self.ctx.ep.rank * num_local, (self.ctx.ep.rank + 1) * num_local)

    def _of_peers(self, count: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.stack(
            [torch.stack([torch.stack([count(ids) for ids in row]) for row in part]) for part in self.peers]
        )


class PlannedAllToAll(AllToAllDispatcher):
    """The counts that peers send are given."""

    def __init__(self, given: _Given) -> None:
        super().__init__(given.num_experts, given.ctx)
        self.given = given

    def _exchange_counts(self, counts_PN: Tensor) -> tuple[Tensor, Tensor]:
        mine_PL, _ = super()._exchange_counts(counts_PN)
        return mine_PL, self.given.counts_ZXPL[self.given.next_part()]


class PlannedDeduplicating(DeduplicatingDispatcher):
    """The counts that peers send are given, of rows and of copies."""

    def __init__(self, given: _Given) -> None:
        super().__init__(given.num_experts, given.ctx)
        self.given = given

    def _exchange_counts(self, counts_PN: Tensor) -> tuple[Tensor, Tensor]:
        mine_PC, _ = super()._exchange_counts(counts_PN)
        part = self.given.next_part()
        return mine_PC, torch.cat([self.given.tokens_ZXP[part].unsqueeze(-1), self.given.counts_ZXPL[part]], -1)

    def _send_places(self, *sizes: Any) -> Tensor:
        return torch.zeros_like(super()._send_places(*sizes))  # places that exist: no shape depends on which


class PlannedAllGather(AllGatherDispatcher):
    """What is gathered of the peers' choices is given."""

    def __init__(self, given: _Given) -> None:
        super().__init__(given.num_experts, given.ctx)
        self.given = given
        self._peers: list[list[Tensor]] = []

    def _exchange_counts(self, x_TD: Tensor, routing: Routing) -> tuple[_Counts, _Counts]:
        super()._exchange_counts(x_TD, routing)
        self._peers = self.given.peers[self.given.next_part()]
        tokens = [[ids_TK.shape[0] for ids_TK in row] for row in self._peers]
        return _Counts(tokens), _Counts([[len(_copies(ids_TK)[0]) for ids_TK in row] for row in self._peers])

    def _gather(self, rows: Tensor, counts: _Counts) -> Tensor:
        gathered = super()._gather(rows, counts)
        if rows.is_meta:
            return gathered
        pairs = [torch.stack(_copies(ids_TK), 1) for row in self._peers for ids_TK in row]
        return torch.cat(pairs).to(rows.dtype)


_PLANNED: dict[type[Any], Callable[[_Given], Dispatcher]] = {
    AllToAllDispatcher: PlannedAllToAll,
    DeduplicatingDispatcher: PlannedDeduplicating,
    AllGatherDispatcher: PlannedAllGather,
}


def give_choices(layers: Iterable[MoELayer], config: Config, skew: float) -> None:
    """Give a rank's layers their choices; layers with equal experts have equal choices for as many samples."""
    given: dict[tuple[MoEConfig, int], _Given] = {}
    for layer in layers:
        moe, ctx, batch = layer.config, layer.ctx, config.training.micro_batch_size
        assert moe.num_experts is not None
        if moe.moe_overlap_attention and layer.gate.layer_id < config.model.num_layers:
            batch //= moe.moe_overlap_degree  # samples take turns through the layers, not in multi-token prediction
        if (moe, batch) not in given:
            ids = given_ids(config, moe, batch, ctx, skew)
            given[moe, batch] = _Given(ids, moe.num_experts, layer.num_parts, ctx)
        layer.list_copies = given[moe, batch].list_copies
        if not isinstance(layer.dispatcher, LocalDispatcher):
            layer.dispatcher = _PLANNED[type(layer.dispatcher)](given[moe, batch])


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
    return problems
