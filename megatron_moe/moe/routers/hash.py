"""Hash routing: the expert is a fixed function of the token's id; nothing is learned."""

import functools
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.routing import Choice, RouterInputs, best_ids, make_choice


def hash_router(inputs: RouterInputs, config: MoEConfig) -> Choice:
    """Look up the experts of each token id (Hash layers, arXiv 2106.04426), with weight 1/K each.

    ``moe_hash_table`` names a table, such as one of ``balanced_hash_table``; otherwise ids are hashed,
    which the paper calls random hashing. The logits choose nothing, so the router's weights get no
    gradient.

    Raises:
        ValueError: if a token id is not in the table.
    """
    assert inputs.vocab_ids_GT is not None, "hash routing needs token ids"
    topk, num_experts = config.moe_router_topk, inputs.logits_GTE.shape[-1]
    if config.moe_hash_table is None:
        ids_GTK = best_ids(_mix(inputs.vocab_ids_GT, num_experts), topk)
    else:
        table_VK = _read_table(config.moe_hash_table, num_experts, topk).to(inputs.vocab_ids_GT.device)
        ids_GTK = table_VK[inputs.vocab_ids_GT]
    weights_GTK = inputs.logits_GTE.new_full(ids_GTK.shape, config.moe_router_topk_scaling_factor / topk)
    scores_GTE = torch.softmax(inputs.logits_GTE, dim=-1)
    return make_choice(ids_GTK, weights_GTK, scores_GTE, inputs.valid_GT)


def balanced_hash_table(frequency_V: list[int], num_experts: int) -> tuple[list[int], list[int]]:
    """Give each token id an expert, the most frequent id to the emptiest expert, so that loads nearly agree.

    Args:
        frequency_V: how often each id occurs in the data.

    Returns:
        The expert of each id [V], and the resulting load of each expert [E]. Lower ids and experts win ties.
    """
    table_V, load_E = [0] * len(frequency_V), [0] * num_experts
    for vocab_id in sorted(range(len(frequency_V)), key=lambda i: -frequency_V[i]):
        expert = min(range(num_experts), key=load_E.__getitem__)
        table_V[vocab_id] = expert
        load_E[expert] += frequency_V[vocab_id]
    return table_V, load_E


def _mix(vocab_ids_GT: Tensor, num_experts: int) -> Tensor:
    """Int64 [G, T, E]: a number per (id, expert) whose top-k is a random choice of experts for the id."""
    expert_ids_E = torch.arange(num_experts, device=vocab_ids_GT.device)
    mixed_GTE = vocab_ids_GT.long().unsqueeze(-1) * num_experts + expert_ids_E
    for multiplier in (0x45D9F3B, 0x45D9F3B, 1):  # multiply and xor-shift in 32 bits: no signed overflow
        mixed_GTE = ((mixed_GTE ^ (mixed_GTE >> 16)) * multiplier) & 0xFFFFFFFF
    return mixed_GTE


@functools.cache
def _read_table(path: str, num_experts: int, topk: int) -> Tensor:
    """Read a table of experts, int64 [V, K]."""
    table = torch.from_numpy(np.load(path).astype(np.int64))
    table_VK = table.unsqueeze(-1) if table.dim() == 1 else table
    if table_VK.dim() != 2 or table_VK.shape[1] != topk:
        raise ValueError(f"--moe-hash-table {path} has shape {tuple(table.shape)}, not [V, {topk}].")
    if int(table_VK.min()) < 0 or int(table_VK.max()) >= num_experts:
        raise ValueError(f"--moe-hash-table {path} names experts outside 0..{num_experts - 1}.")
    return table_VK


def hash_checks(config: MoEConfig) -> Iterable[str]:
    """Sentences about losses that could not act on a fixed choice."""
    if config.moe_router_load_balancing_type != ("none",):
        yield (
            "--moe-router hash learns nothing, so a balance loss cannot act: say --moe-router-load-balancing-type none."
        )
