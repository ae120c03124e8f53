"""The configuration: frozen dataclasses, the single source of flags, YAML keys, defaults and help.

A field that Megatron-LM users know has its Megatron name and meaning. Modules take the section they need,
never the whole. Values that follow from others are properties, not fields.
"""

import math
from dataclasses import dataclass, field, replace

from megatron_moe.config.fields import flag
from megatron_moe.config.patterns import experts_of_layers, moe_layer_pattern, window_pattern


@dataclass(frozen=True)
class ModelConfig:
    """Model: sizes and parts of the decoder."""

    num_layers: int = flag(4, "Number of transformer layers.")
    hidden_size: int = flag(256, "Width of the residual stream (D).")
    ffn_hidden_size: int | None = flag(
        None, "Width of dense feed-forward layers (F). Default: 4 D, or 8/3 D rounded up to 64 for gated activations."
    )
    num_attention_heads: int = flag(8, "Number of query heads (H).")
    num_query_groups: int | None = flag(
        None, "Number of key-value heads (G) of grouped-query attention. Default: one per query head."
    )
    kv_channels: int | None = flag(None, "Channels of one head (C). Default: hidden size / heads.")
    vocab_size: int | None = flag(None, "Vocabulary size. Default: that of the tokenizer.")
    make_vocab_size_divisible_by: int = flag(
        128, "The stored vocabulary is padded to a multiple of this times the tensor-parallel size."
    )
    normalization: str = flag("RMSNorm", "Kind of normalisation.", choices=("RMSNorm", "LayerNorm"))
    norm_epsilon: float = flag(1e-5, "Epsilon of the normalisation.")
    activation: str = flag(
        "swiglu",
        "Activation of the feed-forward layers and experts; those that end in glu are gated. quick_geglu is GPT-OSS's "
        "x sigmoid(1.702 x).",
        choices=("swiglu", "geglu", "quick_geglu", "gelu", "relu", "squared_relu"),
        synonyms={"--swiglu": "swiglu", "--quick-geglu": "quick_geglu", "--squared-relu": "squared_relu"},
    )
    activation_func_clamp_value: float | None = flag(
        None, "Gated activations: the gate is at most this, the other factor within plus or minus this (GPT-OSS: 7)."
    )
    glu_linear_offset: float = flag(0.0, "Gated activations: added to the factor that is not activated (GPT-OSS: 1).")
    add_bias_linear: bool = flag(
        False,
        "Bias in all linear layers: attention, dense feed-forward, routed experts, router; none in shared experts.",
        synonyms={"--disable-bias-linear": False},
    )
    add_qkv_bias: bool = flag(
        False, "Bias in the query, key and value projections only (latent attention: in its down projections)."
    )
    qk_layernorm: bool = flag(
        False, "Normalise queries and keys before the rotary embedding; latent attention: the latents instead."
    )
    qk_layernorm_scope: str = flag(
        "head",
        "What --qk-layernorm normalises: each head by itself, or all heads as one vector (OLMoE).",
        choices=("head", "projection"),
    )
    qk_layernorm_epsilon: float | None = flag(None, "Epsilon of these norms. Default: --norm-epsilon. DeepSeek: 1e-6.")
    window_size: tuple[int, ...] = flag(
        (), "Sliding window: tokens that a token sees to its left, and to its right, which is 0. Default: all."
    )
    window_attn_skip_freq: str | None = flag(
        None,
        "Which layers attend in the window. An integer N: all but every N-th, so that N - 1 of N layers do. A list "
        'such as "[1,0]*12": one entry a layer. Default: all.',
    )
    softmax_type: str = flag(
        "vanilla",
        "Softmax of attention: plain, with one more score of 0 in its sum, or with a learned one per head (sink).",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    multi_latent_attention: bool = flag(
        False, "Latent attention (DeepSeek): keys and values of all heads come from one short vector per token."
    )
    q_lora_rank: int | None = flag(None, "Latent attention: channels of the queries' latent. Default: no latent.")
    kv_lora_rank: int = flag(32, "Latent attention: channels of the latent of keys and values.")
    qk_head_dim: int = flag(128, "Latent attention: channels of a query head without position.")
    qk_pos_emb_head_dim: int = flag(64, "Latent attention: channels of a query head that are rotated.")
    v_head_dim: int = flag(128, "Latent attention: channels of a value head.")
    untie_embeddings_and_output_weights: bool = flag(
        False, "An output layer of its own instead of the embedding's weights."
    )
    position_embedding_type: str = flag("rope", "Position information.", choices=("rope", "none"))
    rotary_base: float = flag(10000.0, "Base (theta) of the rotary frequencies.")
    rotary_percent: float = flag(1.0, "Share of a head's channels that is rotated.")
    rotary_interleaved: bool = flag(
        False, "Rotate pairs of neighbouring channels instead of channels of the first and the second half."
    )
    rope_type: str = flag(
        "rope",
        "How rotary frequencies are changed for sequences longer than those trained on before.",
        choices=("rope", "linear", "llama3", "yarn"),
    )
    rotary_scaling_factor: float = flag(
        1.0, "Longest sequence over the original longest; of every --rope-type but rope."
    )
    original_max_position_embeddings: int = flag(4096, "yarn, llama3: longest sequence of the training before.")
    beta_fast: float = flag(32.0, "yarn: channels with more turns in an original sequence keep their frequency.")
    beta_slow: float = flag(1.0, "yarn: channels with fewer turns are scaled in full.")
    mscale: float = flag(1.0, "yarn: strength of the scaling of rotated channels by the logarithm of the factor.")
    mscale_all_dim: float = flag(
        0.0, "yarn: the same for all channels: divides the other, and scales the scores of latent attention."
    )
    yarn_correction_range_round_to_int: bool = flag(
        True, "yarn: round the channels between which frequencies pass from one to the other (GPT-OSS does not)."
    )
    rope_low_freq_factor: float = flag(
        1.0, "llama3: wavelengths above the original length over this are scaled in full."
    )
    rope_high_freq_factor: float = flag(4.0, "llama3: wavelengths below the original length over this are kept.")
    hidden_dropout: float = flag(0.0, "Dropout after attention and feed-forward, before the residual addition.")
    init_method_std: float = flag(
        0.02, "Standard deviation of initial weights; output projections use it divided by sqrt(2 * layers)."
    )
    mtp_num_layers: int | None = flag(
        None, "Multi-token prediction: modules that predict so many tokens more, one each (DeepSeek-V3). Default: none."
    )
    mtp_loss_scaling_factor: float = flag(0.1, "Weight of the mean of their losses.")

    @property
    def head_channels(self) -> int:
        """Channels of one head (C)."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Number of key-value heads (G)."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate projection beside the up projection."""
        return self.activation.endswith("glu")

    @property
    def qk_norm_epsilon(self) -> float:
        """Epsilon of the norms of queries and keys."""
        return self.norm_epsilon if self.qk_layernorm_epsilon is None else self.qk_layernorm_epsilon

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer how many tokens to its left a token sees. Raises ValueError for a malformed pattern."""
        if not self.window_size:
            return (None,) * self.num_layers
        pattern = window_pattern(self.window_attn_skip_freq, self.num_layers)
        return tuple(self.window_size[0] if in_window else None for in_window in pattern)

    @property
    def dense_ffn_size(self) -> int:
        """Width of dense feed-forward layers (F)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return math.ceil(8 * self.hidden_size / 3 / 64) * 64 if self.gated else 4 * self.hidden_size


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
    moe_eval_capacity_factor: float | None = flag(
        None, "Capacity factor in evaluation. Default: that of training."
    )
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
    moe_router_force_skew: float = flag(
        2.0, "Router force_skewed: load of expert 0 over the mean load, from 1 to E/K."
    )
    moe_router_init_std: float | None = flag(
        None, "Standard deviation of the router's initial weights. Default: --init-method-std."
    )
    moe_token_dispatcher_type: str = flag(
        "alltoall", "How tokens reach their experts.", registry="dispatchers"
    )
    moe_expert_backend: str = flag(
        "auto",
        "Expert product: one grouped matrix product, or a loop over experts; auto picks by device and type.",
        choices=("auto", "loop", "grouped_mm"),
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


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism: sizes of the mesh's axes; data parallelism takes the ranks that are left."""

    tensor_model_parallel_size: int = flag(1, "Ranks that share the matrices of attention and dense layers (tp).")
    pipeline_model_parallel_size: int = flag(1, "Ranks that share the layers (pp).")
    context_parallel_size: int = flag(1, "Ranks that share a sequence in attention (cp).")
    expert_model_parallel_size: int = flag(1, "Ranks that share the experts (ep); free of tp, cp and dp.")
    expert_tensor_parallel_size: int | None = flag(None, "Ranks that share one expert (etp). Default: tp.")
    sequence_parallel: bool = flag(
        False, "Cut the sequence over tp between the matrices. Switched on by MoE with tp > 1, and said."
    )
    cp_comm_type: str = flag(
        "allgather",
        "Context parallelism: gather keys and values, or pass them round a ring.",
        choices=("allgather", "p2p"),
    )
    pipeline_schedule: str = flag("1f1b", "Pipeline schedule.", registry="schedules")
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "Model chunks per pipeline rank, for interleaved schedules. Default: what the schedule needs."
    )
    pipeline_model_parallel_layout: str | None = flag(
        None, 'Layers of each stage in Megatron\'s syntax, e.g. "Et*3|(tt|)*29,m|L". Default: balanced by cost.'
    )
    data_parallel_sharding_strategy: str = flag(
        "no_shard",
        "What data-parallel ranks share out: nothing, optimizer state (ZeRO-1), and gradients (ZeRO-2), "
        "and parameters (ZeRO-3).",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    distributed_backend: str | None = flag(
        None, "Backend of the process groups. Default: nccl with GPUs, else gloo.", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: float = flag(10.0, "How long a collective may wait before the run is ended.")
    elastic: bool = flag(
        False,
        "Fit the layout to however many ranks are started: data parallelism takes what is there, expert parallelism and "
        "the micro-batch shrink to the largest divisors that fit; the global batch stays.",
    )

    @property
    def expert_tp(self) -> int:
        """Size of the expert tensor-parallel axis."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size


@dataclass(frozen=True)
class DataConfig:
    """Data: token files, tokenizer, packing."""

    data_path: tuple[str, ...] = flag(
        (), "Prefix of a .bin/.idx pair, or 'weight prefix weight prefix ...' for a blend; cut by --split."
    )
    train_data_path: tuple[str, ...] = flag((), "As --data-path, for training alone.")
    valid_data_path: tuple[str, ...] = flag((), "As --data-path, for validation alone.")
    test_data_path: tuple[str, ...] = flag((), "As --data-path, for the final test alone.")
    split: str = flag("969,30,1", "Shares of the documents of --data-path for training, validation and test.")
    seq_length: int = flag(256, "Tokens per sequence (S).")
    tokenizer_type: str = flag("ByteTokenizer", "Kind of tokenizer.", registry="tokenizers")
    tokenizer_model: str | None = flag(None, "File or folder of the tokenizer.")
    reset_position_ids: bool = flag(False, "Positions start anew at every document of a packed sequence.")
    reset_attention_mask: bool = flag(False, "Attention does not cross documents of a packed sequence.")
    eod_mask_loss: bool = flag(False, "No loss on the token that follows an end of document.")
    mock_data: bool = flag(False, "Random tokens with a learnable structure instead of files.")
    num_workers: int = flag(1, "Threads that prepare batches ahead; 0 prepares them in line.")


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer: AdamW and its learning-rate schedule."""

    lr: float = flag(3e-4, "Peak learning rate.")
    min_lr: float = flag(0.0, "Learning rate at the end of the decay.")
    lr_decay_style: str = flag(
        "cosine",
        "Shape of the decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(None, "Iterations until --min-lr. Default: --train-iters.")
    lr_decay_samples: int | None = flag(None, "The same in samples.")
    lr_warmup_iters: int = flag(0, "Iterations of linear warm-up.")
    lr_warmup_samples: int = flag(0, "The same in samples.")
    lr_warmup_fraction: float | None = flag(None, "The same as a share of the decay.")
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.")
    lr_wsd_decay_iters: int | None = flag(None, "WSD: iterations of the final decay.")
    lr_wsd_decay_samples: int | None = flag(None, "The same in samples.")
    lr_wsd_decay_style: str = flag(
        "exponential", "WSD: shape of the final decay.", choices=("exponential", "linear", "cosine")
    )
    weight_decay: float = flag(0.01, "Decoupled weight decay; norms and biases have none.")
    adam_beta1: float = flag(0.9, "Decay of the first moment.")
    adam_beta2: float = flag(0.999, "Decay of the second moment.")
    adam_eps: float = flag(1e-8, "Epsilon of Adam.")
    clip_grad: float = flag(1.0, "Largest global gradient norm; 0 for no clipping.")


@dataclass(frozen=True)
class TrainingConfig:
    """Training: batch, length, precision, recomputation, evaluation, limits."""

    micro_batch_size: int = flag(1, "Sequences per rank and micro-batch (B).")
    global_batch_size: int | None = flag(
        None, "Sequences per optimizer step over all ranks. Default: micro-batch size x data-parallel size."
    )
    rampup_batch_size: tuple[int, ...] = flag(
        (), "Start, increment and samples: grow the global batch in equal steps over so many samples."
    )
    train_iters: int | None = flag(None, "Optimizer steps of the run.")
    train_samples: int | None = flag(None, "Length of the run in samples instead of steps.")
    seed: int = flag(1234, "Seed of weights, data order and random numbers in the model.")
    params_dtype: str = flag(
        "float32",
        "Type of compute and activations; master weights and moments are float32 (float64 for float64).",
        choices=("float32", "bfloat16", "float64"),
        synonyms={"--bf16": "bfloat16"},
    )
    recompute_granularity: str | None = flag(
        None,
        "Recompute activations in the backward pass: whole layers, or the modules named.",
        choices=("full", "selective"),
    )
    recompute_modules: tuple[str, ...] = flag(
        ("core_attn",),
        "Modules to recompute with --recompute-granularity selective: core_attn, mlp, moe, shared_experts, norm.",
    )
    eval_interval: int = flag(1000, "Iterations between evaluations; 0 for none.")
    eval_iters: int = flag(10, "Global batches per evaluation.")
    exit_interval: int | None = flag(None, "Save and end after every so many iterations, to be started again.")
    exit_duration_in_mins: float | None = flag(None, "Save and end after so many minutes.")
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "Look at loss and gradient norm before the weights are touched; --on-nonfinite says what then happens."
    )
    on_nonfinite: str = flag(
        "stop",
        "A loss or gradient norm that is not finite: end the run, skip the batch, or roll back to the last checkpoint "
        "and go on after the batch.",
        choices=("stop", "skip", "rollback"),
    )
    loss_spike_factor: float | None = flag(
        None, "A loss above so many times the median of recent ones is a spike: --on-spike. Default: none is."
    )
    grad_norm_spike_factor: float | None = flag(
        None, "A gradient norm above so many times the median of recent ones is a spike: --on-spike. Default: none is."
    )
    on_spike: str = flag(
        "skip", "A spike in loss or gradient norm: the same choices.", choices=("stop", "skip", "rollback")
    )
    check_weight_hash_across_dp_replicas_interval: int | None = flag(
        None, "Iterations between checks that all ranks which hold the same weights hold the same bits. Default: never."
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: where they go and come from."""

    save: str | None = flag(None, "Folder for checkpoints, metrics and the configuration.")
    load: str | None = flag(None, "Folder to start from, unless --save holds a checkpoint, from which the run then goes on.")
    save_interval: int | None = flag(None, "Iterations between checkpoints. Default: at the end only.")
    save_interval_minutes: float | None = flag(None, "Minutes between checkpoints, besides --save-interval.")
    async_save: bool = flag(
        False, "Write checkpoints in the background: training waits only while its state is copied to host memory."
    )
    keep_last: int | None = flag(None, "Keep only so many newest checkpoints. Default: all.")
    keep_every: int | None = flag(
        None, "With --keep-last, also keep every checkpoint whose iteration is a multiple of this."
    )
    auto_recover: bool = flag(
        False, "If the checkpoint to resume from is damaged, say so and take the newest one that is whole."
    )
    ckpt_step: int | None = flag(None, "Load this iteration instead of the latest.")
    finetune: bool = flag(False, "Load the weights alone and start at iteration 0.")


@dataclass(frozen=True)
class LoggingConfig:
    """Logging: progress line, metrics file and the services behind it."""

    log_interval: int = flag(1, "Iterations between progress lines and records.")
    tensorboard_dir: str | None = flag(None, "Write TensorBoard events here.")
    wandb_project: str | None = flag(None, "Weights & Biases project; WANDB_MODE=offline works.")
    wandb_exp_name: str | None = flag(None, "Weights & Biases run name.")
    wandb_save_dir: str | None = flag(None, "Folder of Weights & Biases' files. Default: below --save.")
    log_straggler: bool = flag(
        False, "Report at each log interval which ranks the others wait for: busy and waiting seconds of every rank."
    )
    profile_schedule: int | None = flag(
        None, "Record in this iteration what each pipeline rank does when, into schedule.jsonl below --save."
    )
    peak_tflops: float | None = flag(
        None, "Peak TFLOP/s of one device, for MFU. Default: a table of GPUs; measured once on a CPU."
    )


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
