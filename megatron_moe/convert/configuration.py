"""Configurations both ways: config.json of a family <-> settings of ours; what cannot be said is an error.

On the way out the new config.json is read back. Any setting that then differs, and that what the model computes would
notice, is one that the family cannot express: it is named. No family needs a list of what it lacks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from megatron_moe.config import ConfigError, compare, from_dict, to_dict
from megatron_moe.config.schema import Config, ModelConfig, MoEConfig
from megatron_moe.config.settings import flag_of, settings
from megatron_moe.convert.errors import ConversionError, listed
from megatron_moe.convert.family import NEUTRAL, Family

# Settings that do not change what a trained model computes: how it is trained, or what acts beside another one only.
_TRAINING_ONLY = frozenset(
    {
        "hidden_dropout",
        "init_method_std",
        "moe_router_init_std",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_input_jitter_eps",
        "moe_router_bias_update_rate",
        "moe_token_dispatcher_type",
        "moe_dispatch_deduplicate",
        "moe_overlap_degree",
        "moe_overlap_attention",
        "moe_expert_backend",
        "make_vocab_size_divisible_by",
        "moe_token_drop_policy",
        "moe_group_size",
        "moe_gshard_second_policy",
        "moe_gshard_slot_counting",
        "moe_gshard_normalize",
        "moe_device_capacity_factor",
        "moe_device_capacity_protected",
        "moe_allow_acausal_routing",
        "moe_router_force_skew",
        "moe_segmentation_factor",
        "mtp_loss_scaling_factor",
    }
)


def family_of(theirs: Mapping[str, Any], families: Mapping[str, Family]) -> Family:
    """The family that config.json names.

    Raises:
        ConversionError: it is unknown; says which are known.
    """
    name = theirs.get("model_type")
    if not isinstance(name, str) or name not in families:
        known = ", ".join(f"{f.model_type} ({f.architecture})" for f in families.values())
        raise ConversionError(f"config.json has model_type {name!r}, which is not known. Known are: {known}.")
    return families[name]


def read_config(family: Family, theirs: Mapping[str, Any], ignore: Iterable[str] = ()) -> Config:
    """The model of a config.json as a configuration of ours; training settings have their defaults.

    Args:
        ignore: keys to leave out, on the user's word that they change nothing.

    Raises:
        ConversionError: names each key that cannot be expressed or is not known.
    """
    theirs = {key: value for key, value in theirs.items() if key not in set(ignore)}
    values: dict[str, Any] = {}
    problems = []
    for part in family.parts:
        try:
            values |= part.read(theirs)
        except ConversionError as error:
            problems.append(str(error))
        except KeyError as error:
            problems.append(f"config.json has no {error}.")
    known = {key for part in family.parts for key in part.keys} | NEUTRAL | family.neutral
    unknown = sorted(key for key in theirs if key not in known and not key.startswith("_"))
    if unknown:
        problems.append(
            listed("config.json has keys that are not known here, and may change what the model computes", unknown)
            + ". If they do not, say --ignore-config-key NAME for each."
        )
    if problems:
        raise ConversionError("\n".join(dict.fromkeys(problems)))
    return config_of(values, "config.json gives")


def config_of(values: Mapping[str, Any], source: str) -> Config:
    """The configuration with these settings, the others at their defaults.

    Args:
        source: who gives them, with its verb, for the message.

    Raises:
        ConversionError: settings that cannot be.
    """
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        sections.setdefault(settings()[name].section, {})[name] = value
    try:
        return from_dict(sections)
    except ConfigError as error:
        raise ConversionError(f"{source} settings that cannot be: {error}") from error


def carried(family: Family, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The neutral keys of a config.json that are worth keeping for the way out."""
    ours = {key for part in family.parts for key in part.keys}
    dropped = {"quantization_config", "transformers_version", "torch_dtype", "dtype", "auto_map", "model_type"}
    kept = (NEUTRAL | family.neutral) - ours - dropped
    return {key: value for key, value in theirs.items() if key in kept}


def write_config(family: Family, config: Config, dtype: str, kept: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the keys of old and new readers.

    Args:
        dtype: of the weights, as transformers names it.
        kept: neutral keys from :func:`carried`.

    Raises:
        ConversionError: names each setting that the family cannot express.
    """
    theirs: dict[str, Any] = {"max_position_embeddings": config.data.seq_length, **kept}
    theirs |= {"architectures": [family.architecture], "model_type": family.model_type}
    theirs |= {"torch_dtype": dtype, "dtype": dtype}
    config = _explicit(config)
    for part in family.parts:
        theirs |= part.write(config)
    back = read_config(family, theirs)
    lost = [
        f"{flag_of(d.name)} {d.current} (would be read as {d.saved})"
        for d in compare(to_dict(_function_of(back)), _function_of(config)).must
        if d.name not in _TRAINING_ONLY
    ]
    if lost:
        raise ConversionError(listed(f"a {family.model_type} model cannot express", lost))
    return theirs


def _explicit(config: Config) -> Config:
    """With widths that follow from others written out."""
    model, moe = config.model, config.moe
    model = replace(model, ffn_hidden_size=model.dense_ffn_size)
    if moe.num_experts is not None and moe.moe_ffn_hidden_size is None:
        moe = replace(moe, moe_ffn_hidden_size=model.dense_ffn_size)
    return replace(config, model=model, moe=moe)


def _function_of(config: Config) -> Config:
    """What the model computes, in one form: without settings that cannot matter, and one of two ways to say a thing."""
    config = _explicit(config)
    return Config(model=_model_function(config), moe=_moe_function(config))


def _model_function(config: Config) -> ModelConfig:
    model, plain = config.model, ModelConfig()
    inert: list[str] = []
    if model.multi_latent_attention:
        inert += ["num_query_groups", "kv_channels"]
    else:
        inert += ["q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"]
    if not model.qk_layernorm:
        inert += ["qk_layernorm_scope", "qk_layernorm_epsilon"]
    if model.rope_type == "rope":
        inert += ["rotary_scaling_factor", "original_max_position_embeddings"]
    if model.rope_type != "yarn":
        inert += ["beta_fast", "beta_slow", "mscale", "mscale_all_dim", "yarn_correction_range_round_to_int"]
    if model.rope_type != "llama3":
        inert += ["rope_low_freq_factor", "rope_high_freq_factor"]
    if config.moe.num_experts is not None and all(config.moe.layer_pattern(model.num_layers)):
        inert += ["ffn_hidden_size"]
    return replace(model, **{name: getattr(plain, name) for name in inert})


def _moe_function(config: Config) -> MoEConfig:
    moe = config.moe
    if moe.num_experts is None:
        return MoEConfig()
    if moe.moe_router_score_function == "sigmoid" or moe.moe_router_norm_topk:
        moe = replace(moe, moe_router_pre_softmax=False, moe_router_norm_topk=False)
    if moe.moe_router_num_groups is None or moe.moe_router_group_topk in (None, moe.moe_router_num_groups):
        return replace(moe, moe_router_num_groups=None, moe_router_group_topk=None, moe_router_group_score_topk=None)
    counted = moe.moe_router_group_score_topk or (2 if moe.moe_router_score_function == "sigmoid" else 1)
    return replace(moe, moe_router_group_score_topk=counted)


def families_for(config: Config, families: Mapping[str, Family]) -> tuple[list[Family], dict[str, str]]:
    """The families that can express a configuration, and of each other one why it cannot."""
    fitting, reasons = [], {}
    for name, family in families.items():
        try:
            write_config(family, config, "float32", {})
            fitting.append(family)
        except ConversionError as error:
            reasons[name] = str(error)
    return fitting, reasons
