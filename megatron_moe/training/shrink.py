"""A configuration made small enough to check a layout of it on one machine: every feature kept, every size cut down.

    layers      a few of the pattern, both kinds if there are both, at least as many as there are stages
    widths      the smallest that tp and etp divide        experts   enough for ep, groups and K
    sequence    16 tokens or more, what cp and tp divide   batch     as many micro-batches as the schedule needs

Ratios that select other code are kept: key-value heads fewer than query heads or than tp, groups of tokens smaller or
larger than a sequence, several micro-batches. Precision becomes float64, initial weights large enough for routing to
vary.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from megatron_moe.config import check
from megatron_moe.config.schema import Config, ModelConfig
from megatron_moe.config.schema.model import FP8_TILE
from megatron_moe.moe.checks import moe_checks
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.pipeline.schedules import chunks_per_rank, schedule_problems
from megatron_moe.training import registries

SEQ_LENGTH, HIDDEN, VOCAB = 16, 32, 67
LATENT = {"kv_lora_rank": 10, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
LATENT_TILES = LATENT | dict.fromkeys(("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), FP8_TILE)
LAYOUT_FIELDS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank",
    "mbs": "micro_batch_size",
    "schedule": "pipeline_schedule",
    "sp": "sequence_parallel",
    "cp_comm": "cp_comm_type",
    "zero": "data_parallel_sharding_strategy",
    "dispatcher": "moe_token_dispatcher_type",
    "deduplicate": "moe_dispatch_deduplicate",
    "overlap": "moe_overlap_degree",
    "overlap_attention": "moe_overlap_attention",
}
_SWITCHES = ("sp", "deduplicate", "overlap_attention")
Kind = tuple[bool, int | None]  # of a layer: whether it is MoE, and how far it sees to its left
STRATEGIES = {"0": "no_shard", "1": "optim", "2": "optim_grads", "3": "optim_grads_params"}


def read_layout(text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """``tp=2,pp=2,schedule=zb-v,zero=1,dp=2`` -> configuration fields, and the sizes of tp, cp, pp and, if given, dp.

    Raises:
        ValueError: a name or a number that cannot be read.
    """
    values: dict[str, Any] = {}
    sizes = {"tp": 1, "cp": 1, "pp": 1}
    for part in filter(None, text.replace(" ", "").split(",")):
        key, _, value = part.partition("=")
        if key != "dp" and key not in LAYOUT_FIELDS:
            raise ValueError(f'--layout "{text}": {key} is none of dp, {", ".join(LAYOUT_FIELDS)}.')
        if key == "zero" and value in STRATEGIES:
            values[LAYOUT_FIELDS[key]] = STRATEGIES[value]
        elif key in ("schedule", "cp_comm", "dispatcher"):
            values[LAYOUT_FIELDS[key]] = value
        elif key == "zero" or not value.isdecimal() or (int(value) < 1 and key not in _SWITCHES):
            raise ValueError(f'--layout "{text}": {part} cannot be read; give {_example(key)}.')
        elif key in _SWITCHES:
            values[LAYOUT_FIELDS[key]] = value != "0"
        else:
            if key in ("tp", "cp", "pp", "dp"):
                sizes[key] = int(value)
            if key != "dp":
                values[LAYOUT_FIELDS[key]] = int(value)
    return values, sizes


def _example(key: str) -> str:
    if key in _SWITCHES:
        return f"{key}=0 or {key}=1"
    return "zero=0 to zero=3" if key == "zero" else f"a positive number, such as {key}=2"


def vary(config: Config, **values: Any) -> Config:
    """The configuration with fields set by name, whatever their section."""
    for section in fields(config):
        part = getattr(config, section.name)
        mine = {k: v for k, v in values.items() if k in {f.name for f in fields(part)}}
        config = replace(config, **{section.name: replace(part, **mine)})
        values = {k: v for k, v in values.items() if k not in mine}
    assert not values, f"no such fields: {values}"
    return config


def smallest_world(config: Config) -> int:
    """Ranks of the smallest mesh with the configured sizes: as little data parallelism as the experts allow."""
    parallel = config.parallel
    dense = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    experts = parallel.expert_tp * parallel.expert_model_parallel_size if config.moe.num_experts else 1
    return math.lcm(dense, experts) * parallel.pipeline_model_parallel_size


def shrink(config: Config, world_size: int) -> Config:
    """The small configuration; its sizes fit the mesh if those of the given one do.

    Raises:
        ValueError: what is wrong with the layout, in full sentences.
    """
    config = _whole_batch(config, world_size)
    problems = check(config, world_size, registries.CHOICES, registries.RULES, to_train=False)
    if problems:
        raise ValueError("\n".join(problems))
    sizes = MeshSizes.of(config.parallel, world_size)
    small = replace(config, **_model(config, sizes))
    small = replace(small, moe=_moe(small, config, sizes))
    pairs = small.moe.moe_group_size == str(2 * _seq_length(sizes))
    micro = 2 if pairs else min(config.training.micro_batch_size, 2)
    if config.moe.moe_overlap_attention:  # of each part
        micro = (1 + pairs) * config.moe.moe_overlap_degree
    num_microbatches = (config.training.global_batch_size or 0) // (config.training.micro_batch_size * sizes.dp)
    return vary(
        small,
        seq_length=_seq_length(sizes),
        micro_batch_size=micro,
        global_batch_size=num_microbatches * micro * sizes.dp,
        pipeline_model_parallel_layout=None,
        elastic=False,
        params_dtype="float64",
        lr=1e-2,
        adam_eps=1e-5,
        init_method_std=0.1,
        moe_router_init_std=None,
        mock_data=True,
    )


def _model(config: Config, sizes: MeshSizes) -> dict[str, Any]:
    """The decoder and, since it names layers, the pattern of MoE layers."""
    model, tp, seq_length = config.model, sizes.tp, _seq_length(sizes)
    heads, groups = _heads(model.num_attention_heads, model.query_groups, tp)
    rotated = {channels: int(channels * model.rotary_percent) for channels in (8, 16, 32, 64, 128)}
    channels = next(c for c, n in rotated.items() if n >= 2 and n % 2 == 0 and c % _unit(model, c) == 0)
    parallel = config.parallel
    stages = sizes.pp * chunks_per_rank(parallel.pipeline_schedule, parallel.num_virtual_stages_per_pipeline_rank)
    kinds = list(zip(config.moe.layer_pattern(model.num_layers), model.windows, strict=True))
    kinds = _some_layers(kinds, max(stages, 4))
    small = replace(
        model,
        num_layers=len(kinds),
        hidden_size=HIDDEN,
        ffn_hidden_size=_unit(model, 8) * tp,
        num_attention_heads=heads,
        num_query_groups=model.num_query_groups and groups,
        kv_channels=None if model.multi_latent_attention else channels,
        window_size=(min(model.window_size[0], seq_length // 4), 0) if model.window_size else (),
        window_attn_skip_freq=str([int(window is not None) for _, window in kinds]) if model.window_size else None,
        vocab_size=max(VOCAB, seq_length + 8),
        make_vocab_size_divisible_by=min(model.make_vocab_size_divisible_by, 4),
    )
    if model.multi_latent_attention:
        small = replace(small, q_lora_rank=model.q_lora_rank and 12, **(LATENT_TILES if model.fp8_format else LATENT))
    freq = str([int(is_moe) for is_moe, _ in kinds]) if config.moe.num_experts else None
    return {"model": small, "moe": replace(config.moe, moe_layer_freq=freq, moe_first_dense_layers=0)}


def _unit(model: ModelConfig, smallest: int) -> int:
    """What a rank's slice is a multiple of: of whole tiles where numbers are FP8."""
    return smallest if model.fp8_format is None else FP8_TILE


def _heads(heads: int, groups: int, tp: int) -> tuple[int, int]:
    """Fewer query and key-value heads; whether a key-value head is shared by queries, or by ranks, stays."""

    def alike(new_heads: int, new_groups: int) -> bool:
        fits = new_heads % tp == 0 and new_heads % new_groups == 0 and (new_groups % tp == 0 or tp % new_groups == 0)
        shared = (new_groups < new_heads) == (groups < heads) and (new_groups < tp) == (groups < tp)
        return fits and shared and (new_groups > 1) == (groups > 1)

    sizes = [(h, g) for h in range(1, heads + 1) for g in range(1, h + 1) if alike(h, g)]
    return sizes[0] if sizes else (heads, groups)


def _some_layers(kinds: Sequence[Kind], num: int) -> list[Kind]:
    """``num`` layers, evenly spaced, of every kind that there is as far as they reach."""
    num = min(num, len(kinds))
    chosen = [i * (len(kinds) - 1) // max(num - 1, 1) for i in range(num)]
    missing = [kinds.index(kind) for kind in dict.fromkeys(kinds) if kind not in {kinds[i] for i in chosen}]
    for index in missing:
        seen = [kinds[i] for i in chosen]
        spare = next((n for n, i in enumerate(chosen) if seen.count(kinds[i]) > 1), None)
        if spare is not None:
            chosen[spare] = index
    return [kinds[i] for i in sorted(chosen)]


def _moe(small: Config, config: Config, sizes: MeshSizes) -> Any:
    """Experts: the fewest that ep, groups and K allow, and some that no token needs."""
    moe, num_experts, unit = small.moe, small.moe.num_experts, _unit(small.model, 8)
    if num_experts is None:
        return moe
    moe = replace(
        moe,
        moe_num_experts_per_layer=None,
        moe_ffn_hidden_size=unit * sizes.etp,
        moe_shared_expert_intermediate_size=moe.moe_shared_expert_intermediate_size and unit * sizes.tp,
        moe_group_size=_group_size(config, _seq_length(sizes)),
    )
    step = math.lcm(sizes.ep, moe.moe_router_num_groups or 1)
    wanted = [n for n in range(step, num_experts, step) if n >= 2 * moe.moe_router_topk]
    if moe.moe_hash_table is not None:  # it names its experts
        wanted = []
    candidates = (replace(moe, num_experts=n) for n in wanted)
    moe = next((candidate for candidate in candidates if not list(moe_checks(candidate))), moe)
    if config.moe.moe_num_experts_per_layer is None:
        return moe
    assert moe.num_experts is not None
    num_layers, fewest = sum(moe.layer_pattern(small.model.num_layers)), moe.num_experts  # a pyramid of two steps
    counts = [fewest * (1 + (i >= num_layers // 2)) for i in range(num_layers)]
    return replace(moe, num_experts=max(counts), moe_num_experts_per_layer=str(counts))


def _seq_length(sizes: MeshSizes) -> int:
    step = math.lcm(2 * sizes.cp, sizes.cp * sizes.tp, 2)
    return math.ceil(SEQ_LENGTH / step) * step


def _group_size(config: Config, seq_length: int) -> str:
    """A group below a sequence becomes half of one, a group above it two."""
    text = config.moe.moe_group_size
    if text == "sequence":
        return text
    size, length = int(text), config.data.seq_length
    return str(seq_length // 2 if size < length else seq_length if size == length else 2 * seq_length)


def _whole_batch(config: Config, world_size: int) -> Config:
    """With as few micro-batches as the schedule takes, several if there were several.

    The batch of the real run belongs to its number of ranks, and need not divide over these.
    """
    parallel, training = config.parallel, config.training
    pp, micro = parallel.pipeline_model_parallel_size, training.micro_batch_size
    dp = max(world_size // (pp * parallel.tensor_model_parallel_size * parallel.context_parallel_size), 1)

    def fits(num: int) -> bool:
        args = parallel.pipeline_schedule, pp, num, parallel.num_virtual_stages_per_pipeline_rank
        return not schedule_problems(*args)

    given = (training.global_batch_size or 0) // (micro * dp)
    fewest = 1 if given <= 1 and pp == 1 else 2
    num = next((n for n in range(fewest, 4 * pp + 2) if fits(n)), fewest)  # none: the checks say why
    return vary(config, global_batch_size=num * micro * dp, rampup_batch_size=())
