"""The functions of ``scoring.py`` in Triton: a block of tokens with all their experts stays on the chip.

Experts are compared as integers that order as their keys do. So NaN and -inf have their place as in a stable sort, what
is taken goes below all of them, and a tie goes to the lower index.
"""

# Triton's own types do not know x[:, None].
# pyright: reportArgumentType=false, reportCallIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_moe.kernels.blocks import launch, power_of_two
from megatron_moe.kernels.scoring import Scored, ScoringRule

_NUMBERS = 4096  # scores that one program holds


@triton.jit
def _scored(logits, known, SIGMOID: tl.constexpr):
    """(logarithm of the scores, scores divided by their sum)"""
    if SIGMOID:
        log_scores = tl.minimum(logits, 0.0) - tl.log(1 + tl.exp(-tl.abs(logits)))
    else:
        log_scores = logits
    log_scores = tl.where(known, log_scores, float("-inf"))
    shifted = log_scores - tl.max(log_scores, 1)[:, None]
    exps = tl.exp(shifted)
    sums = tl.sum(exps, 1)[:, None]
    if not SIGMOID:
        log_scores = shifted - tl.log(sums)
    return log_scores, exps / sums


@triton.jit
def _comparable(keys, known, lowest, KEY: tl.constexpr):
    """Integers in the order of the keys: NaN above all, what is no expert below all."""
    keys = tl.where(keys == 0, 0.0, keys)
    bits = keys.to(KEY, bitcast=True)
    order = tl.where(bits < 0, bits ^ ~lowest, bits)
    order = tl.where(keys != keys, ~lowest, order)
    return tl.where(known, order, lowest)


@triton.jit
def _weights(chosen, NORMALISED: tl.constexpr):
    if NORMALISED:
        weights = tl.exp(chosen - tl.max(chosen, 1)[:, None])
        return weights / tl.sum(weights, 1)[:, None]
    else:  # noqa: RET505  (Triton wants both ends of a compile-time branch)
        return tl.exp(chosen)


@triton.jit
def _places(ids, taken, experts, slots, NUM_SLOTS: tl.constexpr):
    """Places of the chosen among the copies of their experts, within the block."""
    ranks = tl.cumsum(taken, 0) - taken
    positions = tl.zeros_like(ids)
    for k in range(NUM_SLOTS):
        best = tl.sum(tl.where(slots[None, :] == k, ids, 0), 1)
        rank = tl.sum(tl.where(experts[None, :] == best[:, None], ranks, 0), 1)
        positions = tl.where(slots[None, :] == k, rank[:, None], positions)
    return positions


@triton.jit
def _score(
    logits_ptr,
    bias_ptr,
    decided_ptr,
    ids_ptr,
    weights_ptr,
    scores_ptr,
    positions_ptr,
    counts_ptr,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SCALE: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_DECIDED: tl.constexpr,
    KEY: tl.constexpr,
    SIGN_BIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    tokens, experts, slots = block * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    known = (experts < NUM_EXPERTS)[None, :]
    inside = (tokens < num_tokens)[:, None] & known
    places = tokens[:, None] * NUM_EXPERTS + experts[None, :]
    logits = tl.load(logits_ptr + places, mask=inside, other=0.0)

    log_scores, scores = _scored(logits, known, SIGMOID)
    tl.store(scores_ptr + places, scores, mask=inside)
    keys = logits
    if HAS_BIAS:
        keys = tl.exp(log_scores) + tl.load(bias_ptr + experts, mask=experts < NUM_EXPERTS, other=0.0)[None, :]
    lowest = tl.full((), 1, KEY) << SIGN_BIT
    order = _comparable(keys, known, lowest, KEY)

    ids = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.int32)
    chosen = tl.full((BLOCK_T, BLOCK_K), float("-inf"), dtype=logits.dtype)
    taken = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int32)
    for k in range(NUM_SLOTS):
        if IS_DECIDED:
            best = tl.load(decided_ptr + tokens * NUM_SLOTS + k, mask=tokens < num_tokens, other=0).to(tl.int32)
        else:
            best = tl.argmax(order, 1)
        hit = experts[None, :] == best[:, None]
        ids = tl.where(slots[None, :] == k, best[:, None], ids)
        value = tl.sum(tl.where(hit, log_scores, 0.0), 1)
        chosen = tl.where(slots[None, :] == k, value[:, None], chosen)
        taken = tl.where(hit & inside, 1, taken)
        order = tl.where(hit, lowest, order)

    written = (tokens < num_tokens)[:, None] & (slots < NUM_SLOTS)[None, :]
    at = tokens[:, None] * NUM_SLOTS + slots[None, :]
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=written)
    tl.store(weights_ptr + at, _weights(chosen, NORMALISED) * SCALE, mask=written)
    tl.store(positions_ptr + at, _places(ids, taken, experts, slots, NUM_SLOTS).to(tl.int64), mask=written)
    tl.store(counts_ptr + block * NUM_EXPERTS + experts, tl.sum(taken, 0).to(tl.int64), mask=experts < NUM_EXPERTS)


@triton.jit
def _add_first(positions_ptr, ids_ptr, first_ptr, num_copies, copies_per_block, num_experts, BLOCK: tl.constexpr):
    copies = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = copies < num_copies
    expert = tl.load(ids_ptr + copies, mask=inside, other=0)
    first = tl.load(first_ptr + copies // copies_per_block * num_experts + expert, mask=inside, other=0)
    tl.store(positions_ptr + copies, tl.load(positions_ptr + copies, mask=inside, other=0) + first, mask=inside)


@triton.jit
def _backward(
    grad_weights_ptr,
    grad_scores_ptr,
    logits_ptr,
    scores_ptr,
    ids_ptr,
    weights_ptr,
    grad_ptr,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SCALE: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    tokens, experts, slots = block * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside = (tokens < num_tokens)[:, None] & (experts < NUM_EXPERTS)[None, :]
    places = tokens[:, None] * NUM_EXPERTS + experts[None, :]
    scores = tl.load(scores_ptr + places, mask=inside, other=0.0)
    grad_scores = tl.load(grad_scores_ptr + places, mask=inside, other=0.0)
    there = (tokens < num_tokens)[:, None] & (slots < NUM_SLOTS)[None, :]
    at = tokens[:, None] * NUM_SLOTS + slots[None, :]
    weights = tl.load(weights_ptr + at, mask=there, other=0.0)
    products = weights * tl.load(grad_weights_ptr + at, mask=there, other=0.0)
    ids = tl.load(ids_ptr + at, mask=there, other=-1)
    total = tl.sum(products, 1)[:, None]
    if NORMALISED:
        products -= weights * total / SCALE
    grad = scores * (grad_scores - tl.sum(grad_scores * scores, 1)[:, None])
    if not NORMALISED:
        grad -= scores * total
    for k in range(NUM_SLOTS):
        expert = tl.sum(tl.where(slots[None, :] == k, ids, 0), 1)
        product = tl.sum(tl.where(slots[None, :] == k, products, 0.0), 1)
        grad += tl.where(experts[None, :] == expert[:, None], product[:, None], 0.0)
    if SIGMOID:
        grad *= 1 / (1 + tl.exp(tl.load(logits_ptr + places, mask=inside, other=0.0)))
    tl.store(grad_ptr + places, grad, mask=inside)


def _blocks(num_experts: int, num_slots: int) -> dict[str, int]:
    experts = power_of_two(num_experts, 1 << 20)
    return {
        "BLOCK_T": max(1, min(64, _NUMBERS // experts)),
        "BLOCK_E": experts,
        "BLOCK_K": power_of_two(num_slots, 1 << 20),
    }


def score_topk_forward(
    logits_TE: Tensor, bias_E: Tensor | None, rule: ScoringRule, decided_TK: Tensor | None
) -> Scored:
    """The decision; logits and what is decided contiguous."""
    (num_tokens, num_experts), device = logits_TE.shape, logits_TE.device
    slots = (num_tokens, rule.num_slots)
    ids_TK = torch.empty(slots, dtype=torch.int64, device=device)
    positions_TK = torch.empty_like(ids_TK)
    weights_TK, scores_TE = logits_TE.new_empty(slots), torch.empty_like(logits_TE)
    blocks = _blocks(num_experts, rule.num_slots)
    num_blocks = triton.cdiv(num_tokens, blocks["BLOCK_T"])
    counts_BE = torch.zeros(num_blocks, num_experts, dtype=torch.int64, device=device)
    double = logits_TE.dtype == torch.float64
    launch(
        _score,
        (num_blocks,),
        logits_TE,
        bias_E,
        decided_TK,
        ids_TK,
        weights_TK,
        scores_TE,
        positions_TK,
        counts_BE,
        num_tokens,
        NUM_EXPERTS=num_experts,
        NUM_SLOTS=rule.num_slots,
        SCALE=rule.scale,
        SIGMOID=rule.sigmoid,
        NORMALISED=rule.normalised,
        HAS_BIAS=bias_E is not None,
        IS_DECIDED=decided_TK is not None,
        KEY=tl.int64 if double else tl.int32,
        SIGN_BIT=63 if double else 31,
        **blocks,
    )
    first_BE = counts_BE.cumsum(0) - counts_BE
    per_block = blocks["BLOCK_T"] * rule.num_slots
    grid = (triton.cdiv(ids_TK.numel(), 1024),)
    launch(_add_first, grid, positions_TK, ids_TK, first_BE, ids_TK.numel(), per_block, num_experts, BLOCK=1024)
    return Scored(ids_TK, weights_TK, scores_TE, positions_TK, counts_BE.sum(0))


def score_topk_backward(
    grad_weights_TK: Tensor, grad_scores_TE: Tensor, logits_TE: Tensor, scored: Scored, rule: ScoringRule
) -> Tensor:
    """Gradient of the logits [T, E]."""
    num_tokens, num_experts = logits_TE.shape
    grad_TE = torch.empty_like(scored.scores_TE)
    blocks = _blocks(num_experts, rule.num_slots)
    launch(
        _backward,
        (triton.cdiv(num_tokens, blocks["BLOCK_T"]),),
        grad_weights_TK.contiguous(),
        grad_scores_TE.contiguous(),
        logits_TE.contiguous(),
        scored.scores_TE,
        scored.ids_TK,
        scored.weights_TK,
        grad_TE,
        num_tokens,
        NUM_EXPERTS=num_experts,
        NUM_SLOTS=rule.num_slots,
        SCALE=rule.scale,
        SIGMOID=rule.sigmoid,
        NORMALISED=rule.normalised,
        **blocks,
    )
    return grad_TE
