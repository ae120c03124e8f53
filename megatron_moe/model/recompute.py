"""What is not kept for the backward pass but computed again: whole layers, or the modules that are named.

    full        a layer keeps its input only
    core_attn   scores, softmax and weighted values (not the projections) keep query, key and value
    mlp, moe    the feed-forward keeps the layer's residual stream; its norm, dispatch and shared expert go along
    shared_experts   the shared expert keeps its input
    moe_act     the routed experts keep what goes into their activation, and nothing that comes of it
    layernorm   whoever saves the output of one of the layer's two norms saves a note (``kernels/forgetting.py``)
    mla_up_proj the same for queries, keys and values of latent attention, computed again from the latents

No random state is kept: random numbers are counter-based. Routing decisions are replayed (``moe/replay.py``).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_moe.config.schema import TrainingConfig
from megatron_moe.moe.replay import record_and_replay


def recomputed_modules(config: TrainingConfig) -> frozenset[str]:
    """The names that --recompute-granularity and --recompute-modules stand for; outer ones hide those inside them."""
    if config.recompute_granularity == "full":
        return frozenset({"full"})
    if config.recompute_granularity is None:
        return frozenset()
    modules = frozenset(config.recompute_modules)
    return modules - {"shared_experts", "moe_act"} if "moe" in modules else modules


def recomputed(function: Callable[..., Tensor], *inputs: object) -> Tensor:
    """``function(*inputs)``, of which only the inputs are kept. It may itself be a module with parameters."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=record_and_replay)  # type: ignore[return-value]
