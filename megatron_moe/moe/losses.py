"""Balance losses, the router z-loss, and the way a loss rides on an activation.

Every published balance loss is linear in the router's probabilities; its coefficients depend on counts
alone::

    loss_G = sum over e of  coefficients_GE * score_sum_GE

    coefficients   from integer counts, summed over the ranks that share the group     no gradient
    score_sum      sum over the tokens held here of their probabilities                 gradient

so that the partial losses of the ranks add up to the loss, and a group may be cut anywhere. What training
adds is ``sum over g of (tokens_g / tokens of the global batch) * loss_g``: the mean over groups, each
weighted by its tokens. Coefficients (alpha) are applied by the layer. docs/routing.md compares the papers'
normalisations.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.routing import Choice, expert_counts, multi_hot


class BalanceStats(NamedTuple):
    """Integer statistics of groups of tokens; sums over ranks and micro-batches are exact.

    Attributes:
        counts_GE: int64, copies that go to each expert.
        device_tokens_GD: int64, tokens with at least one expert on each device (group of experts); None if no
            loss asks.
        tokens_G: int64, valid tokens.
    """

    counts_GE: Tensor
    device_tokens_GD: Tensor | None
    tokens_G: Tensor


@dataclass(frozen=True)
class BalanceLoss:
    """A balance loss and what its counts are.

    Attributes:
        coefficients: pure function to [G, E] in float64; ``balance_loss`` casts to the type of the scores.
        counted: which ids of a ``Choice`` are counted: "chosen" (before capacity), "first" (first choices
            alone), or "plain" (top-k without bias and limits).
        unit: the tokens over which it is defined: the logical "group", the "sequence", or the global "batch".
        devices: whether it needs ``device_tokens_GD``.
    """

    coefficients: Callable[[BalanceStats, MoEConfig], Tensor]
    counted: Literal["chosen", "first", "plain"] = "chosen"
    unit: Literal["group", "sequence", "batch"] = "group"
    devices: bool = False


def aux_loss(stats: BalanceStats, config: MoEConfig) -> Tensor:
    """Switch's loss, E sum f_e P_e (arXiv 2101.03961, eq. 4-6), for any K: f_e = counts_e / (K T).

    Unit: the group (``--moe-group-size``). Equal to DeepSeekMoE's expert-level loss (arXiv 2401.06066, eq.
    12-14), whose f carries the factor E, and to GShard's times E squared. 1 at uniform load, up to E/K at
    collapse. With the counts and tokens of the global batch it is the global-batch loss (arXiv 2501.11873).
    """
    counts_GE, tokens_G1 = _floats(stats)
    return counts_GE * (counts_GE.shape[-1] / (config.moe_router_topk * tokens_G1**2))


def gshard_loss(stats: BalanceStats, config: MoEConfig) -> Tensor:
    """GShard's loss as printed, (1/E) sum (c_e / S) m_e (arXiv 2006.16668, Algorithm 1, line 13).

    Unit: the group. c_e counts first choices, overflowed ones included. 1/E^2 at uniform load, where
    ``aux_loss`` is 1; the published code multiplies by E^2.
    """
    counts_GE, tokens_G1 = _floats(stats)
    return counts_GE / (counts_GE.shape[-1] * tokens_G1**2)


def deepseek_device_loss(stats: BalanceStats, config: MoEConfig) -> Tensor:
    """DeepSeekMoE's device-level loss, sum over d of f'_d P'_d (arXiv 2401.06066, eq. 15-17).

    Unit: the group (DeepSeek-V2: the sequence). f'_d is the mean of E/(K T) counts over the device's
    experts and P'_d the sum of their probabilities. A device is one of ``moe_router_num_groups`` blocks of
    experts.
    """
    load_GDM = by_device(aux_loss(stats, config), config)
    return load_GDM.mean(dim=-1, keepdim=True).expand_as(load_GDM).flatten(1)


def deepseek_comm_loss(stats: BalanceStats, config: MoEConfig) -> Tensor:
    """DeepSeek-V2's communication loss, sum over d of f''_d P''_d (arXiv 2405.04434, eq. 29-31).

    Unit: the group (the paper: the sequence). f''_d = D/(M T) tokens sent to device d, of D =
    ``moe_router_num_groups`` devices of which a token uses at most M = ``moe_router_group_topk``.
    """
    assert stats.device_tokens_GD is not None and config.moe_router_group_topk is not None
    counts_GE, tokens_G1 = _floats(stats)
    num_devices = stats.device_tokens_GD.shape[-1]
    load_GD = stats.device_tokens_GD.double() * (num_devices / (config.moe_router_group_topk * tokens_G1**2))
    return load_GD.repeat_interleave(counts_GE.shape[-1] // num_devices, dim=-1)


BALANCE_LOSSES: dict[str, BalanceLoss | None] = {
    "aux_loss": BalanceLoss(aux_loss),
    "gshard": BalanceLoss(gshard_loss, counted="first"),
    # DeepSeek-V3 (2412.19437, eq. 17-20): normalised sigmoids, and counts as if there were no bias.
    "seq_aux_loss": BalanceLoss(aux_loss, counted="plain", unit="sequence"),
    "deepseek_expert": BalanceLoss(aux_loss),
    "deepseek_device": BalanceLoss(deepseek_device_loss),
    "deepseek_comm": BalanceLoss(deepseek_comm_loss, devices=True),
    "global_aux_loss": BalanceLoss(aux_loss, unit="batch"),
    "none": None,
}


def counted_ids(choice: Choice, loss: BalanceLoss) -> Tensor:
    """[G, T, K or 1]: the ids that the loss counts; -1 for none."""
    if loss.counted == "plain" and choice.plain_ids_GTK is not None:
        return choice.plain_ids_GTK
    return choice.chosen_ids_GTK[..., :1] if loss.counted == "first" else choice.chosen_ids_GTK


def balance_stats(choice: Choice, valid_GT: Tensor | None, loss: BalanceLoss, config: MoEConfig) -> BalanceStats:
    """Count what a loss counts, over the tokens held here; the layer sums over ranks that share a group."""
    num_experts = choice.scores_GTE.shape[-1]
    ids_GTK = counted_ids(choice, loss)
    device_tokens_GD = None
    if loss.devices:
        map_GTE = multi_hot(ids_GTK, num_experts)
        device_tokens_GD = by_device(map_GTE, config).amax(dim=-1).sum(dim=1)
    num_groups, num_tokens = ids_GTK.shape[:2]
    if valid_GT is None:
        tokens_G = torch.full((num_groups,), num_tokens, dtype=torch.int64, device=ids_GTK.device)
    else:
        tokens_G = valid_GT.sum(dim=1)
    return BalanceStats(expert_counts(ids_GTK, num_experts), device_tokens_GD, tokens_G)


def balance_loss(coefficients_GE: Tensor, score_sum_GE: Tensor) -> Tensor:
    """[G]: the part of each group's loss that belongs to the tokens summed in ``score_sum_GE``."""
    return (coefficients_GE.to(score_sum_GE.dtype) * score_sum_GE).sum(dim=-1)


def by_device(values_E: Tensor, config: MoEConfig) -> Tensor:
    """[..., E] -> [..., D, E/D]: experts by device, contiguous blocks of ``moe_router_num_groups``."""
    assert config.moe_router_num_groups is not None
    return values_E.unflatten(-1, (config.moe_router_num_groups, -1))


def z_loss_sum(logits_TE: Tensor, valid_T: Tensor | None) -> Tensor:
    """Sum over tokens of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5, times the number of tokens).

    Unit: the token, so that the mean over any set of tokens is this sum over their number.
    """
    squares_T = torch.logsumexp(logits_TE, dim=-1) ** 2
    return squares_T.sum() if valid_T is None else squares_T.masked_fill(~valid_T, 0).sum()


def _floats(stats: BalanceStats) -> tuple[Tensor, Tensor]:
    """Counts and tokens in float64; a group of padding alone has loss 0, not 0/0."""
    return stats.counts_GE.double(), stats.tokens_G.clamp(min=1).double().unsqueeze(-1)


class _AttachLoss(torch.autograd.Function):
    """Identity on x whose backward also sends a gradient of 1 into the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_like = (loss.shape, loss.dtype, loss.device)
        # Not x itself, which autograd would return as a view that cannot be detached in place.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.loss_like
        return grads[0], torch.ones(shape, dtype=dtype, device=device)


def attach_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return ``x``, unchanged, such that its backward pass also runs that of ``loss`` with d loss = 1.

    A balance loss so rides on an activation through any pipeline schedule. Scale the loss before. The result
    shares the memory of ``x`` and may be the last operation of a stage.
    """
    return _AttachLoss.apply(x, loss)  # type: ignore[no-any-return]


def loss_checks(config: MoEConfig) -> Iterable[str]:
    """Sentences about balance losses that cannot be or would silently do nothing."""
    names, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if "none" in names:
        if len(names) > 1:
            yield f"--moe-router-load-balancing-type {' '.join(names)}: 'none' stands alone."
        return
    for name in sorted(set(names), key=names.index):
        if names.count(name) > 1:
            yield f"--moe-router-load-balancing-type names {name} {names.count(name)} times: once is enough."
    if len(names) != len(coefficients):
        yield (
            f"--moe-router-load-balancing-type names {len(names)} losses but --moe-aux-loss-coeff has "
            f"{len(coefficients)} coefficients: give one for each."
        )
    for name, coefficient in zip(names, coefficients, strict=False):
        if coefficient == 0:
            yield f"--moe-aux-loss-coeff 0 for {name} balances nothing: drop the loss, or name 'none'."
        if name in ("deepseek_device", "deepseek_comm") and config.moe_router_num_groups is None:
            yield f"Balance loss {name} needs --moe-router-num-groups: a group of experts is a device."
        elif name == "deepseek_comm" and config.moe_router_group_topk is None:
            yield "Balance loss deepseek_comm needs --moe-router-group-topk: the devices a token may use."
    if config.moe_z_loss_coeff is not None and config.moe_z_loss_coeff == 0:
        yield "--moe-z-loss-coeff 0 does nothing: leave the flag out."
