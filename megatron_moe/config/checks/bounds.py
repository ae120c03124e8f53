"""The range of every number. A new numeric setting needs an entry here: a test sees to it.

A range is written as in mathematics: ``[1`` is at least 1, ``(0`` more than 0, ``[0 1)`` at least 0 and less
than 1.
"""

from megatron_moe.config.checks.support import typed
from megatron_moe.config.schema import Config
from megatron_moe.config.settings import settings, value_of

_NAMES_BY_RANGE = {
    "[1": """
        q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim mtp_num_layers
        original_max_position_embeddings rotary_scaling_factor
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
        make_vocab_size_divisible_by num_experts moe_segmentation_factor moe_ffn_hidden_size moe_overlap_degree
        moe_shared_expert_intermediate_size
        moe_router_topk moe_router_num_groups moe_router_group_topk moe_router_group_score_topk
        moe_router_force_skew
        tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
        expert_model_parallel_size expert_tensor_parallel_size num_virtual_stages_per_pipeline_rank
        seq_length lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples
        micro_batch_size global_batch_size train_iters train_samples eval_iters exit_interval
        save_interval keep_last save_retain_interval log_interval profile_schedule
        check_weight_hash_across_dp_replicas_interval
        """,
    "[0": """
        glu_linear_offset window_size mscale mscale_all_dim mtp_loss_scaling_factor
        moe_first_dense_layers num_workers lr_warmup_iters lr_warmup_samples rampup_batch_size seed
        cpu_offloading_num_layers min_offloaded_tensor_size
        eval_interval ckpt_step lr min_lr lr_warmup_init weight_decay clip_grad moe_router_bias_update_rate
        moe_aux_loss_coeff moe_z_loss_coeff
        """,
    "(0": """
        norm_epsilon qk_layernorm_epsilon rotary_base activation_func_clamp_value
        beta_fast beta_slow rope_low_freq_factor rope_high_freq_factor
        init_method_std moe_router_init_std moe_router_topk_scaling_factor
        distributed_timeout_minutes adam_eps exit_duration_in_mins peak_tflops
        save_interval_minutes
        moe_expert_capacity_factor moe_eval_capacity_factor moe_device_capacity_factor
        """,
    "(1": "loss_spike_factor grad_norm_spike_factor",
    "(0 1]": "rotary_percent",
    "[0 1]": "moe_device_capacity_protected",
    "[0 1)": "hidden_dropout adam_beta1 adam_beta2 lr_warmup_fraction",
    "(0 1)": "moe_input_jitter_eps",
}
RANGES = {name: bounds for bounds, names in _NAMES_BY_RANGE.items() for name in names.split()}

# Other rules divide by some of these: while one is out of range, they cannot run.
DIVISORS = frozenset(_NAMES_BY_RANGE["[1"].split())


def out_of_range(config: Config) -> list[str]:
    """A sentence for each number outside its range."""
    return [
        f"{typed(config, name)} is out of range; give {_words(bounds)}{' or none' * settings()[name].optional}."
        for name, bounds in RANGES.items()
        if not _all_inside(config, name)
    ]


def can_be_divided_by(config: Config) -> bool:
    """Whether all sizes that other rules divide by are positive."""
    return all(_all_inside(config, name) for name in DIVISORS)


def _all_inside(config: Config, name: str) -> bool:
    value = value_of(config, name)
    numbers = value if isinstance(value, tuple) else () if value is None else (value,)
    return all(_inside(number, RANGES[name]) for number in numbers)


def _inside(number: float, bounds: str) -> bool:
    low, _, high = bounds[1:].rstrip(")]").partition(" ")
    above = number >= float(low) if bounds[0] == "[" else number > float(low)
    if not high:
        return above
    return above and (number <= float(high) if bounds[-1] == "]" else number < float(high))


def _words(bounds: str) -> str:
    low, _, high = bounds[1:].rstrip(")]").partition(" ")
    lower = f"at least {low}" if bounds[0] == "[" else f"more than {low}"
    if not high:
        return lower
    return f"{lower} and " + (f"at most {high}" if bounds[-1] == "]" else f"less than {high}")
