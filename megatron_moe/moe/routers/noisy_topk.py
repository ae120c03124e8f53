"""Noisy top-k: Gaussian noise of a learned size is added to the logits before the choice."""

import math

import torch
from torch import Tensor

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.routing import Choice, RouterInputs, best_ids, make_choice


def noisy_topk(inputs: RouterInputs, config: MoEConfig) -> Choice:
    """Route by H = x W_g + N(0, 1) softplus(x W_noise), softmax over the K largest.

    Source: arXiv 1701.06538, eq. 3-5.

    The projection has 2E outputs: x W_g, then x W_noise. Weights come from the noisy logits, so that the
    size of the noise is learned; evaluation has no noise. Scores for balance losses are those of the clean
    logits.
    """
    clean_GTE, raw_noise_GTE = inputs.logits_GTE.chunk(2, dim=-1)
    noisy_GTE = clean_GTE
    if inputs.training:
        noisy_GTE = clean_GTE + _normal(inputs, clean_GTE) * torch.nn.functional.softplus(raw_noise_GTE)
    ids_GTK = best_ids(noisy_GTE, config.moe_router_topk)
    weights_GTK = torch.softmax(noisy_GTE.gather(-1, ids_GTK), dim=-1) * config.moe_router_topk_scaling_factor
    return make_choice(ids_GTK, weights_GTK, torch.softmax(clean_GTE, dim=-1), inputs.valid_GT)


def _normal(inputs: RouterInputs, like_GTE: Tensor) -> Tensor:
    """Standard normal numbers from the tokens' uniform ones (Box-Muller)."""
    radius_GTE, angle_GTE = inputs.uniform("noise", 2 * like_GTE.shape[-1]).to(like_GTE.dtype).chunk(2, dim=-1)
    return torch.sqrt(-2 * torch.log1p(-radius_GTE)) * torch.cos(2 * math.pi * angle_GTE)
