"""Rules about parts that a model may have: latent attention, rotary scalings, windows, activations, prediction modules.

A setting of a part that is not there is an error, not silence.
"""

from collections.abc import Callable, Iterator

from megatron_moe.config.checks.support import Rule, typed
from megatron_moe.config.schema import Config, ModelConfig
from megatron_moe.config.settings import settings, value_of

_Reader = tuple[str, Callable[[ModelConfig], bool], str]

# (what has to be added, whether it is there, settings that nobody reads without it)
_READERS: tuple[_Reader, ...] = (
    (
        "--multi-latent-attention",
        lambda model: model.multi_latent_attention,
        "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim",
    ),
    ("--qk-layernorm", lambda model: model.qk_layernorm, "qk_layernorm_scope qk_layernorm_epsilon"),
    ("--window-size", lambda model: bool(model.window_size), "window_attn_skip_freq"),
    ("--fp8-format", lambda model: model.fp8_format is not None, "fp8_recipe"),
    ("--mtp-num-layers", lambda model: model.mtp_num_layers is not None, "mtp_loss_scaling_factor"),
    (
        "a gated --activation",
        lambda model: model.gated,
        "activation_func_clamp_value glu_linear_offset",
    ),
    (
        "--position-embedding-type rope",
        lambda model: model.position_embedding_type == "rope",
        "rotary_interleaved rope_type",
    ),
    (
        "--rope-type linear, llama3 or yarn",
        lambda model: model.rope_type != "rope",
        "rotary_scaling_factor",
    ),
    (
        "--rope-type llama3 or yarn",
        lambda model: model.rope_type in ("llama3", "yarn"),
        "original_max_position_embeddings",
    ),
    (
        "--rope-type llama3",
        lambda model: model.rope_type == "llama3",
        "rope_low_freq_factor rope_high_freq_factor",
    ),
    (
        "--rope-type yarn",
        lambda model: model.rope_type == "yarn",
        "beta_fast beta_slow mscale mscale_all_dim yarn_correction_range_round_to_int",
    ),
)


def parts_are_there(config: Config, world_size: int) -> Iterator[str]:
    """What belongs to a part of the model needs that part."""
    for reader, is_there, names in _READERS:
        if is_there(config.model):
            continue
        for name in names.split():
            if value_of(config, name) != settings()[name].default:
                yield f"{typed(config, name)} is read with {reader} only; add that, or leave it out."


def latent_attention_has_heads_of_its_own(config: Config, world_size: int) -> Iterator[str]:
    """Latent attention has its own widths, and rotates a part of each head that is given by its own width."""
    model = config.model
    if not model.multi_latent_attention:
        return
    widths = "--qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim"
    if model.num_query_groups not in (None, model.num_attention_heads):
        yield f"{typed(config, 'num_query_groups')} is not for --multi-latent-attention, whose heads share a latent."
    if model.kv_channels is not None:
        yield f"{typed(config, 'kv_channels')} is not for --multi-latent-attention; give {widths}."
    if model.rotary_percent != 1.0:
        yield f"{typed(config, 'rotary_percent')} is not for --multi-latent-attention; give {widths}."
    if model.qk_layernorm_scope != "head":
        yield "--qk-layernorm-scope projection is not for --multi-latent-attention, which normalises latents."


def projection_norm_is_rms(config: Config, world_size: int) -> Iterator[str]:
    """A norm over heads that tensor parallelism cuts needs their squares only."""
    model = config.model
    if model.qk_layernorm and model.qk_layernorm_scope == "projection" and model.normalization != "RMSNorm":
        yield (
            f"--qk-layernorm-scope projection is an RMSNorm, not {typed(config, 'normalization')}; use --normalization "
            "RMSNorm, or --qk-layernorm-scope head."
        )


def rotary_scaling_makes_sense(config: Config, world_size: int) -> Iterator[str]:
    """A scaling has a factor, and the two ends of its line are two."""
    model = config.model
    if model.position_embedding_type != "rope" or model.rope_type == "rope":
        return
    if model.rotary_scaling_factor == 1.0:
        yield f"{typed(config, 'rope_type')} changes nothing with --rotary-scaling-factor 1.0; give a larger factor."
    for kind, low, high in (
        ("llama3", "rope_low_freq_factor", "rope_high_freq_factor"),
        ("yarn", "beta_slow", "beta_fast"),
    ):
        if model.rope_type == kind and value_of(config, low) >= value_of(config, high):
            yield f"{typed(config, low)} must be less than {typed(config, high)}."


def window_can_be_read(config: Config, world_size: int) -> Iterator[str]:
    """A window is two numbers, of which the right one is 0, and the pattern of its layers is well-formed."""
    model = config.model
    if model.window_size and (len(model.window_size) != 2 or model.window_size[1] != 0):
        yield (
            f"{typed(config, 'window_size')} cannot be read; give the tokens to the left and a 0, because the model is "
            f"causal: --window-size {model.window_size[0]} 0."
        )
    try:
        assert model.windows
    except ValueError as error:
        yield str(error)


def predictions_stay_in_the_sequence(config: Config, world_size: int) -> Iterator[str]:
    """A module that predicts further than the sequence is long has no target at all."""
    ahead, length = config.model.mtp_num_layers or 0, config.data.seq_length
    if ahead >= length:
        yield f"{typed(config, 'mtp_num_layers')} predicts beyond {typed(config, 'seq_length')}; use a smaller number."


RULES: tuple[Rule, ...] = (
    parts_are_there,
    latent_attention_has_heads_of_its_own,
    projection_norm_is_rms,
    rotary_scaling_makes_sense,
    window_can_be_read,
    predictions_stay_in_the_sequence,
)
