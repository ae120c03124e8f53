"""Rules about the sizes of the decoder and how tensor parallelism cuts them."""

from collections.abc import Iterator

from megatron_moe.config.checks.support import (
    divisors,
    moe_layers,
    multiples_near,
    one_of,
    splits_over,
    typed,
)
from megatron_moe.config.schema import Config


def heads_divide_hidden_size(config: Config, world_size: int) -> Iterator[str]:
    """The width of a head follows from hidden size and heads, unless it is given."""
    model = config.model
    if model.kv_channels is None and not model.multi_latent_attention and model.hidden_size % model.num_attention_heads:
        yield (
            f"{typed(config, 'num_attention_heads')} does not divide {typed(config, 'hidden_size')}; use "
            f"--hidden-size {multiples_near(model.hidden_size, model.num_attention_heads)}, or "
            f"--num-attention-heads {one_of(divisors(model.hidden_size))}, or give the width of a head with "
            "--kv-channels."
        )


def query_groups_divide_heads(config: Config, world_size: int) -> Iterator[str]:
    """Every key-value head serves the same number of query heads."""
    model = config.model
    if model.num_attention_heads % model.query_groups:
        yield (
            f"{typed(config, 'num_query_groups')} does not divide {typed(config, 'num_attention_heads')}; "
            f"use --num-query-groups {one_of(divisors(model.num_attention_heads))}."
        )


def heads_divide_over_tensor_parallel(config: Config, world_size: int) -> Iterator[str]:
    """Each tensor-parallel rank has the same number of query heads."""
    heads, tp = config.model.num_attention_heads, config.parallel.tensor_model_parallel_size
    yield from splits_over(config, "num_attention_heads", heads, "tensor_model_parallel_size", tp)


def query_groups_fit_tensor_parallel(config: Config, world_size: int) -> Iterator[str]:
    """Key-value heads are cut over tensor-parallel ranks, or each is copied to the same number of ranks."""
    tp, groups = config.parallel.tensor_model_parallel_size, config.model.query_groups
    if not config.model.multi_latent_attention and groups % tp and tp % groups:
        fitting = [g for g in divisors(config.model.num_attention_heads) if g % tp == 0 or tp % g == 0]
        yield (
            f"--num-query-groups {groups} and {typed(config, 'tensor_model_parallel_size')} do not fit: one "
            "must divide the other, so that key-value heads are cut or copied evenly; use "
            f"--num-query-groups {one_of(fitting)}."
        )


def dense_ffn_divides_over_tensor_parallel(config: Config, world_size: int) -> Iterator[str]:
    """Dense feed-forward layers are cut in width."""
    if all(moe_layers(config)):
        return
    size, tp = config.model.dense_ffn_size, config.parallel.tensor_model_parallel_size
    yield from splits_over(config, "ffn_hidden_size", size, "tensor_model_parallel_size", tp)


def rotary_channels_are_even(config: Config, world_size: int) -> Iterator[str]:
    """A rotation turns pairs of channels."""
    model = config.model
    if model.position_embedding_type != "rope":
        return
    if model.multi_latent_attention:
        if model.qk_pos_emb_head_dim % 2:
            yield f"{typed(config, 'qk_pos_emb_head_dim')} is odd, but channels rotate in pairs; use an even number."
        return
    rotated = int(model.head_channels * model.rotary_percent)
    if rotated % 2 or rotated < 2:
        yield (
            f"{typed(config, 'rotary_percent')} of {model.head_channels} channels per head rotates "
            f"{rotated}, but channels rotate in pairs; choose --kv-channels and --rotary-percent so that "
            "their product is even and not 0."
        )


RULES = (
    heads_divide_hidden_size,
    query_groups_divide_heads,
    heads_divide_over_tensor_parallel,
    query_groups_fit_tensor_parallel,
    dense_ffn_divides_over_tensor_parallel,
    rotary_channels_are_even,
)
