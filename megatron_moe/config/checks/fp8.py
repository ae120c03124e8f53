"""Rules about FP8: a scale must not cover what depends on the layout, so a rank's slice is made of whole tiles."""

from collections.abc import Iterator

from megatron_moe.config.checks.support import moe_layers, typed
from megatron_moe.config.schema import Config
from megatron_moe.config.schema.model import FP8_TILE
from megatron_moe.config.settings import flag_of

_WHY_NOT = {
    "delayed": "takes one scale for a whole tensor, from the numbers of steps before, so it depends on the rows that a "
    "rank happens to hold, and the loss curve would depend on the layout",
    "tensorwise": "takes one scale for a whole tensor, so it depends on the rows that a rank happens to hold, and the "
    "loss curve would depend on the layout",
    "mxfp8": "needs other hardware (Blackwell's scales of 32 numbers), for which there is no code here yet",
    "custom": "is what a function of Transformer Engine makes of it, and there is none here",
}


def fp8_scales_do_not_depend_on_the_layout(config: Config, world_size: int) -> Iterator[str]:
    """Of Megatron's recipes the one whose scales cover a tile; its default is another, so this one is asked for."""
    model = config.model
    if model.fp8_format is not None and model.fp8_recipe != "blockwise":
        default = " (the default, as in Megatron)" * (model.fp8_recipe == "delayed")
        yield (
            f"{typed(config, 'fp8_recipe')}{default} {_WHY_NOT[model.fp8_recipe]}; add --fp8-recipe blockwise, which "
            f"scales {FP8_TILE} channels of a row and {FP8_TILE} x {FP8_TILE} of a weight at a time."
        )


def fp8_slices_are_whole_tiles(config: Config, world_size: int) -> Iterator[str]:
    """What tensor parallelism cuts, it cuts between tiles: else a tile would hold other numbers on one rank."""
    if config.model.fp8_format is None:
        return
    for what, length, axis in _slices(config):
        if length % FP8_TILE:
            yield (
                f"{typed(config, 'fp8_format')} has a scale for every {FP8_TILE} channels, and {typed(config, axis)} "
                f"gives a rank {length} of {what}, which would cut through one; choose sizes that make it a multiple "
                f"of {FP8_TILE}, or {flag_of(axis)} 1."
            )


def fp8_key_value_heads_are_not_shared(config: Config, world_size: int) -> Iterator[str]:
    """Ranks that share a key-value head each have a part of its output gradient: what is rounded is not the sum."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if model.fp8_format is not None and not model.multi_latent_attention and model.query_groups < tp:
        yield (
            f"{typed(config, 'fp8_format')} rounds output gradients, and with {flag_of('num_query_groups')} "
            f"{model.query_groups} and {typed(config, 'tensor_model_parallel_size')} the ranks that share a key-value "
            "head have parts of its gradient, whose rounded sum depends on the layout; use "
            f"--tensor-model-parallel-size {model.query_groups} or less."
        )


def _slices(config: Config) -> Iterator[tuple[str, int, str]]:
    """(what is cut, how much of it a rank has, by which setting) of every dim of a weight that an axis cuts."""
    model, moe, parallel = config.model, config.moe, config.parallel
    tp, etp, is_moe = parallel.tensor_model_parallel_size, parallel.expert_tp, moe_layers(config)
    if tp > 1:
        axis, heads = "tensor_model_parallel_size", model.num_attention_heads // tp
        if model.multi_latent_attention:
            query = model.qk_head_dim + model.qk_pos_emb_head_dim
            yield "the queries' channels", heads * query, axis
            yield "the keys' and values' channels", heads * (model.qk_head_dim + model.v_head_dim), axis
            yield "the values' channels", heads * model.v_head_dim, axis
        else:
            yield "the queries' channels", heads * model.head_channels, axis
            yield "the keys' channels", model.query_groups // tp * model.head_channels, axis
        if not all(is_moe):
            yield flag_of("ffn_hidden_size"), model.dense_ffn_size // tp, axis
        if moe.moe_shared_expert_intermediate_size is not None and any(is_moe):
            name = "moe_shared_expert_intermediate_size"
            yield flag_of(name), moe.moe_shared_expert_intermediate_size // tp, axis
    if etp > 1 and any(is_moe):
        width = (moe.moe_ffn_hidden_size or model.dense_ffn_size) // moe.moe_segmentation_factor
        yield "an expert's width", width // etp, "expert_tensor_parallel_size"


RULES = (fp8_scales_do_not_depend_on_the_layout, fp8_slices_are_whole_tiles, fp8_key_value_heads_are_not_shared)
