"""The model: sizes and parts of the decoder."""

import math
from dataclasses import dataclass

from megatron_moe.config.fields import flag
from megatron_moe.config.patterns import window_pattern

FP8_TILE = 128  # channels that share a scale


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
    kernels: str = flag(
        "auto",
        "Fused kernels: PyTorch's operations, or those of a library for what it has. By default what is best of the "
        "installed on the device: PyTorch's on a CPU. A line at the start says which operation uses what.",
        choices=("auto", "torch", "triton", "transformer-engine", "apex"),
    )

    fp8_format: str | None = flag(
        None,
        "Multiply in FP8 in attention projections, feed-forward layers and experts: e4m3 for everything, or hybrid: "
        "e5m2 for output gradients. Needs --fp8-recipe blockwise. See docs/fp8.md. Default: no FP8.",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = flag(
        "delayed",
        "What a scale of FP8 numbers covers. Only blockwise does not depend on the layout: 128 channels of a row, or "
        "128 x 128 of a weight.",
        choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    )

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
