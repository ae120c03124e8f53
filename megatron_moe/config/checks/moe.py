"""Rules that tie experts to layers, ranks and sequences; those of routing stand beside the routers."""

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_moe.config.checks.support import (
    divisors,
    layer_experts,
    multiples_near,
    one_of,
    splits_over,
    typed,
)
from megatron_moe.config.patterns import experts_of_layers
from megatron_moe.config.schema import Config


def layer_pattern_can_be_read(config: Config, world_size: int) -> Iterator[str]:
    """``--moe-layer-freq`` is well-formed and makes at least one layer MoE."""
    if config.moe.num_experts is None:
        return
    try:
        pattern = config.moe.layer_pattern(config.model.num_layers)
    except ValueError as error:
        yield str(error)
        return
    if not any(pattern):
        yield (
            f"No layer is MoE although {typed(config, 'num_experts')} is given: "
            f"{typed(config, 'moe_layer_freq')}, {typed(config, 'moe_first_dense_layers')} and "
            f"{typed(config, 'num_layers')} leave none. --moe-layer-freq 1 makes all layers MoE; "
            "--num-experts none asks for a dense model."
        )


def experts_per_layer_can_be_read(config: Config, world_size: int) -> Iterator[str]:
    """``--moe-num-experts-per-layer`` has a number for each MoE layer, and ``--num-experts`` is the largest of them."""
    moe = config.moe
    if moe.moe_num_experts_per_layer is None:
        return
    try:
        pattern = replace(moe, num_experts=1).layer_pattern(config.model.num_layers)
    except ValueError:
        return  # said by the rule above
    try:
        largest = max(experts_of_layers(moe.moe_num_experts_per_layer, sum(pattern)), default=0)
    except ValueError as error:
        yield str(error)
        return
    if moe.num_experts not in (None, largest):
        yield (
            f"{typed(config, 'num_experts')} and {typed(config, 'moe_num_experts_per_layer')} do not agree: the "
            f"largest layer has {largest}; leave --num-experts out."
        )


def experts_divide_over_expert_parallel(config: Config, world_size: int) -> Iterator[str]:
    """Each expert-parallel rank has the same number of experts, and there are experts."""
    ep, experts = config.parallel.expert_model_parallel_size, config.moe.num_experts
    if config.moe.moe_num_experts_per_layer is not None:
        uneven = sorted({count for count in layer_experts(config) if count % ep})
        if uneven:
            yield (
                f"{typed(config, 'moe_num_experts_per_layer')} has layers of {one_of(uneven)} experts, which do not "
                f"divide over {typed(config, 'expert_model_parallel_size')}; use multiples of {ep}, or "
                f"--expert-model-parallel-size {one_of(divisors(math.gcd(*layer_experts(config))))}."
            )
    elif experts is not None:
        yield from splits_over(config, "num_experts", experts, "expert_model_parallel_size", ep)
    elif ep > 1:
        yield (
            f"{typed(config, 'expert_model_parallel_size')} needs experts to share out; give --num-experts, "
            "or use --expert-model-parallel-size 1."
        )


def expert_ffn_divides_over_expert_tensor_parallel(config: Config, world_size: int) -> Iterator[str]:
    """An expert is cut in width."""
    if config.moe.num_experts is not None:
        size = config.moe.moe_ffn_hidden_size or config.model.dense_ffn_size
        etp = config.parallel.expert_tp
        yield from splits_over(config, "moe_ffn_hidden_size", size, "expert_tensor_parallel_size", etp)


def expert_ffn_divides_into_segments(config: Config, world_size: int) -> Iterator[str]:
    """Fine-grained experts are equal parts of an expert, and there are experts to cut."""
    factor, size = config.moe.moe_segmentation_factor, config.moe.moe_ffn_hidden_size or config.model.dense_ffn_size
    if factor > 1 and not any(layer_experts(config)):
        yield f"{typed(config, 'moe_segmentation_factor')} has no experts to cut; give --num-experts, or leave it out."
    else:
        yield from splits_over(config, "moe_ffn_hidden_size", size, "moe_segmentation_factor", factor)


def shared_expert_divides_over_tensor_parallel(config: Config, world_size: int) -> Iterator[str]:
    """The shared expert is cut like a dense layer; its gate needs one."""
    size = config.moe.moe_shared_expert_intermediate_size
    if size is not None:
        tp = config.parallel.tensor_model_parallel_size
        name = "moe_shared_expert_intermediate_size"
        yield from splits_over(config, name, size, "tensor_model_parallel_size", tp)
    elif config.moe.moe_shared_expert_gate:
        yield (
            "--moe-shared-expert-gate has no shared expert to weigh; give "
            "--moe-shared-expert-intermediate-size, or leave the gate out."
        )


def residual_coefficient_has_two_sides(config: Config, world_size: int) -> Iterator[str]:
    """A softmax over routed and shared experts needs both, and leaves no room for a second gate."""
    if not config.moe.moe_residual_coefficient:
        return
    if config.moe.moe_shared_expert_intermediate_size is None:
        yield (
            "--moe-residual-coefficient weighs routed experts against the shared one, and there is none; give "
            f"--moe-shared-expert-intermediate-size {config.model.dense_ffn_size}, or leave it out."
        )
    elif config.moe.moe_shared_expert_gate:
        yield "--moe-residual-coefficient and --moe-shared-expert-gate both weigh the shared expert; give one of them."


def group_is_whole(config: Config, world_size: int) -> Iterator[str]:
    """A group of tokens is part of a sequence or some whole sequences of one micro-batch."""
    text, seq_length = config.moe.moe_group_size, config.data.seq_length
    if config.moe.num_experts is None or text == "sequence":
        return
    if not text.isdecimal() or int(text) < 1:
        yield (
            f"--moe-group-size {text} cannot be read; give 'sequence' or a number of tokens, such as "
            f"{one_of(divisors(seq_length)[-3:])}."
        )
        return
    size = int(text)
    num_sequences, rest = divmod(size, seq_length)
    if size < seq_length and seq_length % size:
        yield (
            f"--moe-group-size {text} does not divide {typed(config, 'seq_length')}; a group below a "
            f"sequence divides it: use {one_of(divisors(seq_length)[::-1])}."
        )
    elif size > seq_length and rest:
        yield (
            f"--moe-group-size {text} is not a multiple of {typed(config, 'seq_length')}; a group above a "
            f"sequence is some whole sequences: use {multiples_near(size, seq_length)}."
        )
    elif num_sequences > 1 and config.training.micro_batch_size % num_sequences:
        micro = config.training.micro_batch_size
        yield (
            f"--moe-group-size {text} is {num_sequences} sequences, which do not divide "
            f"{typed(config, 'micro_batch_size')}; a group lies inside one micro-batch: use a group of "
            f"{one_of([d * seq_length for d in divisors(micro)])} tokens, or a micro-batch of "
            f"{multiples_near(micro, num_sequences)} sequences."
        )


def deduplication_has_an_all_to_all(config: Config, world_size: int) -> Iterator[str]:
    """All-gather sends every token once to every rank anyway."""
    if config.moe.moe_dispatch_deduplicate and config.moe.moe_token_dispatcher_type != "alltoall":
        yield (
            "--moe-dispatch-deduplicate is a way of all-to-all, and "
            f"{typed(config, 'moe_token_dispatcher_type')} is given; leave one of them out."
        )


def samples_can_take_turns(config: Config, world_size: int) -> Iterator[str]:
    """Parts are whole samples with whole groups, and nothing around a layer has to end before the next part's turn."""
    moe, training, flag = config.moe, config.training, "--moe-overlap-attention"
    if not moe.moe_overlap_attention:
        return
    parts, micro = moe.moe_overlap_degree, training.micro_batch_size
    if moe.num_experts is None:
        yield f"{flag} hides the way of tokens to experts, and there are none; give --num-experts, or leave it out."
    if parts == 1:
        yield f"{flag} needs parts that can take turns; give --moe-overlap-degree 2, or leave it out."
    if micro % parts:
        yield (
            f"{flag} shares the samples of a micro-batch out to {typed(config, 'moe_overlap_degree')} parts, which do "
            f"not divide {typed(config, 'micro_batch_size')}; use --micro-batch-size {multiples_near(micro, parts)}, "
            f"or --moe-overlap-degree {one_of(divisors(micro)[1:] or [1])}."
        )
    elif moe.moe_group_size.isdecimal() and (micro // parts * config.data.seq_length) % int(moe.moe_group_size):
        yield (
            f"{typed(config, 'moe_group_size')} is a group over samples that {flag} keeps apart; use "
            f"--moe-group-size {config.data.seq_length} or sequence."
        )
    selective = training.recompute_granularity == "selective"
    if training.recompute_granularity == "full" or (selective and "moe" in training.recompute_modules):
        yield (
            f"{flag} hides transfers that begin and end in a layer, and a MoE layer that is recomputed as a whole "
            "has none left to hide; recompute parts of it (--recompute-granularity selective --recompute-modules "
            "core_attn layernorm), or leave one of them out."
        )
    if training.cpu_offloading_num_layers:
        yield (
            f"{flag} runs layers in turns, and {typed(config, 'cpu_offloading_num_layers')} moves what one of them "
            "saves; leave one of them out."
        )
    if config.parallel.data_parallel_sharding_strategy == "optim_grads_params":
        yield (
            f"{flag} has two layers at work at a time, and {typed(config, 'data_parallel_sharding_strategy')} holds "
            "the weights of one; use optim_grads, or leave one of them out."
        )


RULES = (
    layer_pattern_can_be_read,
    experts_per_layer_can_be_read,
    experts_divide_over_expert_parallel,
    expert_ffn_divides_over_expert_tensor_parallel,
    expert_ffn_divides_into_segments,
    shared_expert_divides_over_tensor_parallel,
    residual_coefficient_has_two_sides,
    group_is_whole,
    deduplication_has_an_all_to_all,
    samples_can_take_turns,
)
