"""The vocabulary of routing: what a router is given, what it decides, and the list that a dispatcher moves.

::

    logits_GTE --router--> Choice [G, T, K] --capacity--> Choice --flatten--> Routing [N] --> dispatcher
                             |
                             +-- scores, chosen ids --> balance losses, bias, statistics

Everything here is a pure function over *logical* groups of tokens (a sequence, or N tokens): the result never
depends on which rank holds which token. A group that spans ranks is gathered before, by the layer. Decisions
never wait for the device, except where a docstring says so.

Letters: G groups, T tokens of a group, E experts, K experts per token, N copies of tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.replay import decided


class RouterInputs(NamedTuple):
    """What a router may look at.

    Attributes:
        logits_GTE: router outputs in the logical order of tokens, float32 or float64. A router whose
            ``RouterSpec.logits_per_expert`` is m gets m E in the last dimension.
        valid_GT: bool; False marks padding: no expert, no capacity, no statistic. None: every token is valid.
        bias_E: selection bias (DeepSeek-V3), a buffer without gradient.
        vocab_ids_GT: token ids, for hash routing.
        uniform: ``uniform(use, n)`` gives [G, T, n] numbers in [0, 1) from a counter-based generator keyed
            by the token and the use, so that they are the same under every layout and in recomputation.
        training: False in evaluation.
        kernels: implementation of scoring, for methods that are score and top-k.
    """

    logits_GTE: Tensor
    valid_GT: Tensor | None
    bias_E: Tensor | None
    vocab_ids_GT: Tensor | None
    uniform: Callable[[str, int], Tensor]
    training: bool
    kernels: str = "torch"


class PlaceTable(NamedTuple):
    """Where each copy stands among those of its expert, in the order of tokens, and how many an expert has.

    Attributes:
        positions_N: int64, of the copies token by token.
        counts_E: int64.
    """

    positions_N: Tensor
    counts_E: Tensor


class Choice(NamedTuple):
    """What a router decides for every token. K may differ from ``moe_router_topk`` (expert choice: K = E).

    Attributes:
        expert_ids_GTK: int64; -1 for an empty slot (dropped, padding, coin lost, hole of expert choice). A
            token never has the same expert twice.
        weights_GTK: differentiable combine weights; 0 where the slot is empty.
        scores_GTE: differentiable probabilities for balance losses (each row sums to 1); 0 for padding.
        chosen_ids_GTK: the decision before any capacity, best first where the router ranks; -1 for none. Load
            statistics, bias and most balance losses count these.
        plain_ids_GTK: top-k without bias and group limit, for DeepSeek-V3's sequence-wise loss as printed.
            None: the same as ``chosen_ids_GTK``.
        table: places of the copies over all groups, where the router's kernel counted them. None: nobody did, or the
            decision has changed since.
    """

    expert_ids_GTK: Tensor
    weights_GTK: Tensor
    scores_GTE: Tensor
    chosen_ids_GTK: Tensor
    plain_ids_GTK: Tensor | None = None
    table: PlaceTable | None = None


class Routing(NamedTuple):
    """A flat list of copies, token-major: copy n takes token ``token_ids_N[n]`` to ``expert_ids_N[n]``.

    Token ids count through the flattened [G T] tokens of the call. ``table`` as in :class:`Choice`, and there only
    where every token has as many copies; ``kernels`` is the implementation of copying rows and adding them up.
    """

    token_ids_N: Tensor
    expert_ids_N: Tensor
    weights_N: Tensor
    table: PlaceTable | None = None
    kernels: str = "torch"


Router = Callable[[RouterInputs, MoEConfig], Choice]


def no_checks(config: MoEConfig) -> Iterable[str]:
    """For a router that accepts every configuration."""
    return ()


@dataclass(frozen=True)
class RouterSpec:
    """A routing method and what the layer must know to run it.

    Attributes:
        route: the pure function.
        scope: "token" if a token's decision needs only its own logits, "group" if it needs the whole group's.
        own_capacity: the method counts slots itself; the layer must not apply a capacity afterwards.
        leaves_holes: slots may be empty although no capacity is set.
        logits_per_expert: the router's projection has so many outputs per expert.
        options: configuration fields that only some methods read, and this one does. To set one that the
            chosen method does not read is an error, not silence.
        checks: sentences about what is wrong with a configuration, for the launcher to show.
    """

    route: Router
    scope: Literal["token", "group"]
    own_capacity: bool = False
    leaves_holes: bool = False
    logits_per_expert: int = 1
    options: tuple[str, ...] = ()
    checks: Callable[[MoEConfig], Iterable[str]] = no_checks


def flatten(choice: Choice, can_drop: bool, kernels: str = "torch") -> Routing:
    """List the copies of all tokens, token-major.

    Args:
        choice: a decision over [G, T, K].
        can_drop: whether slots may be empty. False: a plain reshape, N = G T K, no device synchronisation.
            True: the empty slots are left out, which waits for the device once.
    """
    num_slots = choice.expert_ids_GTK.shape[-1]
    expert_ids_N, weights_N = choice.expert_ids_GTK.reshape(-1), choice.weights_GTK.reshape(-1)
    copies_N = torch.arange(expert_ids_N.numel(), device=expert_ids_N.device)
    if can_drop:
        copies_N = decided(lambda: copies_N[expert_ids_N >= 0])
        expert_ids_N, weights_N = expert_ids_N[copies_N], weights_N[copies_N]
    table = None if can_drop else choice.table
    return Routing(copies_N // max(num_slots, 1), expert_ids_N, weights_N, table, kernels)


def part_edges(num_tokens: int, num_parts: int) -> list[int]:
    """Where parts of consecutive tokens begin, as equal as can be, and where the last ends."""
    return [num_tokens * i // num_parts for i in range(num_parts + 1)]


def split_tokens(routing: Routing, x_TD: Tensor, num_parts: int) -> list[tuple[Tensor, Routing]]:
    """Tokens and their copies in parts of consecutive tokens. Waits for the device once."""
    if num_parts == 1:
        return [(x_TD, routing)]
    edges, token_ids_N = part_edges(x_TD.shape[0], num_parts), routing.token_ids_N
    edges_N = decided(lambda: torch.searchsorted(token_ids_N, torch.tensor(edges, device=token_ids_N.device)).tolist())
    parts = []
    for first, last, start, stop in zip(edges, edges[1:], edges_N, edges_N[1:], strict=False):
        token_ids, expert_ids, weights = (value_N[start:stop] for value_N in routing[:3])
        parts.append((x_TD[first:last], Routing(token_ids - first, expert_ids, weights, kernels=routing.kernels)))
    return parts


def make_choice(
    expert_ids_GTK: Tensor,
    weights_GTK: Tensor,
    scores_GTE: Tensor,
    valid_GT: Tensor | None,
    *,
    chosen_ids_GTK: Tensor | None = None,
    plain_ids_GTK: Tensor | None = None,
) -> Choice:
    """Assemble a ``Choice``, giving padding neither expert nor weight nor score.

    Args:
        chosen_ids_GTK: the decision before capacity. Default: ``expert_ids_GTK``.
    """
    chosen_ids_GTK = expert_ids_GTK if chosen_ids_GTK is None else chosen_ids_GTK
    if valid_GT is None:
        return Choice(expert_ids_GTK, weights_GTK, scores_GTE, chosen_ids_GTK, plain_ids_GTK)
    padding_GT1 = ~valid_GT.unsqueeze(-1)
    if plain_ids_GTK is not None:
        plain_ids_GTK = plain_ids_GTK.masked_fill(padding_GT1, -1)
    return Choice(
        expert_ids_GTK.masked_fill(padding_GT1, -1),
        weights_GTK.masked_fill(padding_GT1, 0),
        scores_GTE.masked_fill(padding_GT1, 0),
        chosen_ids_GTK.masked_fill(padding_GT1, -1),
        plain_ids_GTK,
    )


def keep_only(choice: Choice, keep_GTK: Tensor) -> Choice:
    """Empty the slots where ``keep_GTK`` is False; survivors keep their weight."""
    return choice._replace(
        expert_ids_GTK=choice.expert_ids_GTK.masked_fill(~keep_GTK, -1),
        weights_GTK=choice.weights_GTK.masked_fill(~keep_GTK, 0),
        table=None,
    )


def best_ids(keys_E: Tensor, num: int) -> Tensor:
    """Indices of the ``num`` largest keys of the last dimension, best first; the lower index wins a tie.

    ``torch.topk`` leaves the order of ties open; a stable sort gives the same answer on every device. In a
    recomputed layer the first answer is given again (``moe/replay.py``).
    """

    def best() -> Tensor:
        order_E = keys_E.detach().sort(dim=-1, descending=True, stable=True).indices
        return order_E[..., :num].contiguous()  # lets go of the rest

    return decided(best)


def multi_hot(ids_GTK: Tensor, num_experts: int) -> Tensor:
    """Int64 [G, T, E]: 1 where the token has the expert; ids of -1 count nowhere."""
    map_GTE = ids_GTK.new_zeros(*ids_GTK.shape[:-1], num_experts + 1)
    map_GTE.scatter_(-1, torch.where(ids_GTK < 0, num_experts, ids_GTK), 1)
    return map_GTE[..., :num_experts]


def expert_counts(ids_GTK: Tensor, num_experts: int) -> Tensor:
    """Int64 [G, E]: tokens of each group that have the expert. Exact, so it may be summed over ranks."""
    return multi_hot(ids_GTK, num_experts).sum(dim=1)


def check_finite(logits_GTE: Tensor) -> Tensor:
    """Number of NaN or infinite logits, an int64 scalar on the device, which the layer reports."""
    return (~torch.isfinite(logits_GTE.detach())).sum()


class RoutingSums(NamedTuple):
    """Sums over tokens that describe a decision; they may be added over ranks and micro-batches.

    Attributes:
        chosen_E, kept_E: int64 copies per expert before and after capacity; dropped share = 1 - kept/chosen.
        entropy: sum over tokens of the entropy of the scores, in nats.
        gate: sum of the combine weights of the kept copies; mean gate = gate / kept copies.
        tokens: int64 number of valid tokens.
    """

    chosen_E: Tensor
    kept_E: Tensor
    entropy: Tensor
    gate: Tensor
    tokens: Tensor


def routing_sums(choice: Choice, valid_GT: Tensor | None) -> RoutingSums:
    """Describe a decision, without gradient and without waiting for the device."""
    scores_GTE = choice.scores_GTE.detach()
    num_groups, num_tokens, num_experts = scores_GTE.shape
    if valid_GT is None:
        tokens = torch.full((), num_groups * num_tokens, dtype=torch.int64, device=scores_GTE.device)
    else:
        tokens = valid_GT.sum()
    return RoutingSums(
        expert_counts(choice.chosen_ids_GTK, num_experts).sum(dim=0),
        expert_counts(choice.expert_ids_GTK, num_experts).sum(dim=0),
        torch.special.entr(scores_GTE).sum(),
        choice.weights_GTK.detach().sum(),
        tokens,
    )
