"""The mixture of experts: which layers, how tokens are routed, how load is balanced."""

from dataclasses import dataclass, replace

from megatron_moe.config.fields import flag
from megatron_moe.config.patterns import experts_of_layers, moe_layer_pattern


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: which layers, how tokens are routed, how load is balanced."""

    num_experts: int | None = flag(None, "Number of routed experts (E) of an MoE layer. Default: a dense model.")
    moe_num_experts_per_layer: str | None = flag(
        None,
        "Routed experts of each MoE layer where they differ (PR-MoE's pyramid), one entry an MoE layer, such as "
        '"[8]*2+[16]*2". Implies --num-experts, the largest of them.',
    )
    moe_segmentation_factor: int = flag(
        1,
        "Cut every expert into so many of that fraction of its width, and choose so many times more (DeepSeekMoE). "
        "Implies --num-experts, --moe-ffn-hidden-size and --moe-router-topk.",
    )
    moe_layer_freq: str | None = flag(
        None,
        "Which layers are MoE. An integer N: layers i (from 0) with i % N == 0. A list such as "
        '"[0]*3+[1]*58": one entry a layer. Default: every second layer, the odd ones (GShard).',
    )
    moe_first_dense_layers: int = flag(0, "The first so many layers are dense, whatever the pattern says.")
    moe_ffn_hidden_size: int | None = flag(None, "Width of one expert (F). Default: that of dense layers.")
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "Total width of the shared experts, which see every token; n of width F are one of n F. Default: none."
    )
    moe_shared_expert_gate: bool = flag(False, "Weigh the shared expert by a sigmoid gate of the token.")
    moe_residual_coefficient: bool = flag(
        False,
        "Weigh routed and shared experts by a learned softmax over the two (residual MoE of DeepSpeed's code) instead "
        "of adding them.",
    )
    moe_router: str = flag("topk", "Routing method.", registry="routers")
    moe_router_topk: int = flag(2, "Experts per token (K).")
    moe_router_score_function: str = flag(
        "softmax", "Scores from logits, for routers that leave the choice.", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = flag(
        False, "Softmax over all experts before the top-k (not renormalised) instead of over the chosen ones after it."
    )
    moe_router_norm_topk: bool = flag(
        False, "With --moe-router-pre-softmax: divide the chosen weights by their sum (Qwen3's norm_topk_prob)."
    )
    moe_router_topk_scaling_factor: float = flag(1.0, "Factor on the final weights (DeepSeek's routed scaling).")
    moe_router_num_groups: int | None = flag(
        None, "Groups of experts (devices, nodes): for limited routing, and for device-level losses and capacity."
    )
    moe_router_group_topk: int | None = flag(None, "Groups a token may use. Needs --moe-router-num-groups.")
    moe_router_group_score_topk: int | None = flag(
        None,
        "A group is ranked by the sum of its so many best scores. Default: 1 with softmax (DeepSeek-V2), 2 "
        "with sigmoid (DeepSeek-V3's code; its paper and Megatron say K / groups of a token, which is 2 there).",
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "Auxiliary-loss-free balancing: a bias per expert, used for the choice only (DeepSeek-V3)."
    )
    moe_router_bias_update_rate: float = flag(1e-3, "Step of the expert bias, once per optimizer step.")
    moe_router_load_balancing_type: tuple[str, ...] = flag(
        ("aux_loss",), "Balance losses, any number of them; 'none' for none.", registry="balance_losses"
    )
    moe_aux_loss_coeff: tuple[float, ...] = flag(
        (0.01,), "Coefficients, one per balance loss. Zero is refused: drop the loss instead."
    )
    moe_z_loss_coeff: float | None = flag(None, "Coefficient of the router z-loss (ST-MoE).")
    moe_input_jitter_eps: float | None = flag(
        None, "Multiply the router's input by U(1 - eps, 1 + eps) in training (Switch)."
    )
    moe_expert_capacity_factor: float | None = flag(
        None, "Slots per expert and group = ceil(factor * K * tokens / E). Default: dropless."
    )
    moe_eval_capacity_factor: float | None = flag(None, "Capacity factor in evaluation. Default: that of training.")
    moe_token_drop_policy: str = flag(
        "probs",
        "Which tokens keep their slot: highest weight, earliest position, or random (by a counter-based number).",
        choices=("probs", "position", "random"),
    )
    moe_group_size: str = flag(
        "sequence",
        "Logical group over which capacity and balance losses are defined: 'sequence', or a number of tokens that "
        "divides the sequence length or is a multiple of it. Never what a rank happens to hold.",
    )
    moe_gshard_second_policy: str = flag(
        "random", "GShard's second expert: by a coin with odds 2 g2, or always.", choices=("random", "all")
    )
    moe_gshard_slot_counting: str = flag(
        "paper",
        "Whether a second choice lost by the coin still uses a slot (Algorithm 1 as printed) or not (published code).",
        choices=("paper", "code"),
    )
    moe_gshard_normalize: str = flag(
        "before",
        "When GShard's pair of weights is divided by its sum: before slots run out, so that the weights of a "
        "token left with one expert sum to less than 1 (the paper), or after, over those it kept (DeepSpeed).",
        choices=("before", "after"),
    )
    moe_device_capacity_factor: float | None = flag(
        None,
        "DeepSeek-V2's device-level dropping in training: each of the --moe-router-num-groups groups of "
        "experts keeps floor(factor * K * tokens / groups) copies, the lowest weights go. Default: none.",
    )
    moe_device_capacity_protected: float = flag(
        0.1, "Share of the token groups that device-level dropping spares (DeepSeek-V2: 10% of sequences)."
    )
    moe_allow_acausal_routing: bool = flag(
        False,
        "Let a routing method that looks at later tokens (expert_choice) train a causal language model. The "
        "loss is then not that of a model that could generate.",
    )
    moe_hash_table: str | None = flag(
        None,
        "Hash routing: .npy file with the experts of each token id, shape [V] or [V, K]. Default: a fixed "
        "hash of the id.",
    )
    moe_router_force_skew: float = flag(2.0, "Router force_skewed: load of expert 0 over the mean load, from 1 to E/K.")
    moe_router_init_std: float | None = flag(
        None, "Standard deviation of the router's initial weights. Default: --init-method-std."
    )
    moe_token_dispatcher_type: str = flag("alltoall", "How tokens reach their experts.", registry="dispatchers")
    moe_dispatch_deduplicate: bool = flag(
        False,
        "With alltoall: send a token once to each rank that has experts for it, and copy it there, instead of one row "
        "for each of its experts.",
    )
    moe_overlap_degree: int = flag(
        1,
        "Send a layer's tokens in so many parts: one part travels while the experts of another compute. The same "
        "bytes in more and smaller messages.",
    )
    moe_overlap_attention: bool = flag(
        False,
        "The parts are samples of a micro-batch and take turns through all layers, so that attention hides the way of "
        "another part's tokens as well. --moe-overlap-degree says how many.",
    )
    moe_expert_backend: str = flag(
        "auto",
        "Expert product: one grouped matrix product, PyTorch's or Transformer Engine's, or a loop over experts; auto "
        "picks one of PyTorch's by device and type.",
        choices=("auto", "loop", "grouped_mm", "transformer-engine"),
    )

    def layer_pattern(self, num_layers: int) -> tuple[bool, ...]:
        """For each layer whether it is MoE. Raises ValueError for a malformed --moe-layer-freq."""
        if self.num_experts is None:
            return (False,) * num_layers
        return moe_layer_pattern(self.moe_layer_freq, num_layers, self.moe_first_dense_layers)

    def experts_per_layer(self, num_layers: int) -> tuple[int, ...]:
        """Routed experts of each layer; 0 where it is dense. Raises ValueError for a malformed pattern or list."""
        pattern, text = self.layer_pattern(num_layers), self.moe_num_experts_per_layer
        if text is None or self.num_experts is None:
            return tuple(is_moe * (self.num_experts or 0) for is_moe in pattern)
        counts = iter(experts_of_layers(text, sum(pattern)))
        return tuple(next(counts) if is_moe else 0 for is_moe in pattern)

    def for_layer(self, layer_id: int, num_layers: int) -> "MoEConfig":
        """What one MoE layer needs to know: ``num_experts`` is its own number of experts."""
        num_experts = self.experts_per_layer(num_layers)[layer_id]
        return replace(self, num_experts=num_experts or None, moe_num_experts_per_layer=None)
