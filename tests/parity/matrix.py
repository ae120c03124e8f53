"""The parity matrix: which layouts are compared with one process, each with which features, chosen pairwise.

    axes       tp cp dp ep etp pp (schedule, stages per rank)  sp  ZeRO  cp_comm  dispatcher  micro-batch size
    features   router, balance loss, capacity, groups, shared experts, recomputation, documents, padding, ...

Every value of an axis meets every value of every other axis, and every axis, on and off, meets every value of every feature,
where the configuration's own checks allow the pair. Rows are made greedily and deterministically: each begins with pairs that
are missing, then every other factor takes the value that adds most. Choices come from the registries, so that a new router,
loss, schedule or dispatcher is in the matrix by being registered.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from itertools import combinations, product
from typing import Any

from megatron_moe.config import check, normalise
from megatron_moe.config.schema import Config, ParallelConfig
from megatron_moe.moe.checks import moe_checks
from megatron_moe.moe.dispatchers import DISPATCHERS
from megatron_moe.moe.losses import BALANCE_LOSSES
from megatron_moe.moe.routers import ROUTERS
from megatron_moe.pipeline.schedules import SCHEDULES, schedule_problems
from megatron_moe.training import registries
from tests.parity.harness import BASE, GLOBAL_BATCH, SEQ_LENGTH, vary

Row = Mapping[str, str]
MAX_RANKS = 8
_CP_COMM = next(f for f in fields(ParallelConfig) if f.name == "cp_comm_type").metadata["choices"]


def _pipelines() -> dict[str, dict[str, Any]]:
    """Every schedule with two ranks, the free ones with three stages per rank too, one of them with four ranks."""
    made: dict[str, dict[str, Any]] = {"none": {}}
    for name, spec in SCHEDULES.items():
        made[name] = {"pipeline_model_parallel_size": 2, "pipeline_schedule": name}
        if spec.chunks is None:
            made[f"{name} x3"] = made[name] | {"num_virtual_stages_per_pipeline_rank": 3}
    made["zb-h1 on 4"] = made["zb-h1"] | {"pipeline_model_parallel_size": 4}
    return made


PIPELINES = _pipelines()
ZERO = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SEVERAL = ("aux_loss", "gshard", "seq_aux_loss", "global_aux_loss", "deepseek_device")


def _size(name: str, *sizes: int) -> dict[str, dict[str, Any]]:
    return {str(size): {name: size} for size in sizes}


def _losses() -> dict[str, dict[str, Any]]:
    key, coefficient = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
    made = {name: {key: (name,), coefficient: (3.0 if name == "gshard" else 0.1,)} for name in BALANCE_LOSSES}
    return made | {"several": {key: SEVERAL, coefficient: (0.1, 3.0, 0.2, 0.3, 0.05)}}


AXES: dict[str, dict[str, dict[str, Any]]] = {
    "tp": _size("tensor_model_parallel_size", 1, 2, 4),
    "cp": _size("context_parallel_size", 1, 2, 4),
    "dp": {str(n): {} for n in (1, 2, 4, 8)},
    "ep": _size("expert_model_parallel_size", 1, 2, 4, 8),
    "etp": _size("expert_tensor_parallel_size", 1, 2, 4),
    "pp": PIPELINES,
    "sp": {"on": {"sequence_parallel": True}, "off": {"sequence_parallel": False}},
    "zero": {str(n): {"data_parallel_sharding_strategy": name} for n, name in enumerate(ZERO)},
    "cp_comm": {name: {"cp_comm_type": name} for name in _CP_COMM},
    "dispatcher": {name: {"moe_token_dispatcher_type": name} for name in DISPATCHERS},
    "mbs": _size("micro_batch_size", 1, 2, 4),
    "accumulation": {"1": {}, "2": {}, "4": {}, "8": {}},
}
FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "router": {name: {"moe_router": name} for name in ROUTERS},
    "balance": _losses(),
    "capacity": {"none": {}, "device": {"moe_device_capacity_factor": 1.0}}
    | {name: {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": name} for name in ("probs", "position", "random")},
    "group": {"sequence": {}, "within": {"moe_group_size": "8"}, "pair": {"moe_group_size": str(2 * SEQ_LENGTH)}},
    "bias": {"off": {}, "on": {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.05}},
    "scores": {"softmax": {}, "sigmoid": {"moe_router_score_function": "sigmoid"}},
    "z_loss": {"off": {}, "on": {"moe_z_loss_coeff": 0.1}},
    "jitter": {"off": {}, "on": {"moe_input_jitter_eps": 0.1}},
    "shared": {
        "none": {},
        "plain": {"moe_shared_expert_intermediate_size": 16},
        "gated": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    },
    "skew": {"-": {}, "all to one": {"moe_router_force_skew": 8.0}, "first always": {"moe_router_force_skew": 4.0}},
    "model": {"moe": {}, "dense": {"num_experts": None}},
    "embeddings": {"tied": {}, "untied": {"untie_embeddings_and_output_weights": True}},
    "documents": {
        "joined": {},
        "positions": {"reset_position_ids": True},
        "packed": {"reset_position_ids": True, "reset_attention_mask": True},
    },
    "tokens": {"all": {}, "uneven": {"eod_mask_loss": True}, "padded": {"padded": True}},
    "recompute": {"none": {}, "full": {"recompute_granularity": "full"}}
    | {
        " ".join(modules): {"recompute_granularity": "selective", "recompute_modules": modules}
        for modules in (("core_attn",), ("mlp", "moe"), ("norm", "core_attn"))
    },
    "dropout": {"off": {}, "on": {"hidden_dropout": 0.1}},
    "norm": {"RMSNorm": {}, "LayerNorm": {"normalization": "LayerNorm"}},
    "qk_norm": {"off": {}, "on": {"qk_layernorm": True}},
    "linear": {"plain": {}, "biases": {"add_bias_linear": True}, "qkv biases": {"add_qkv_bias": True}},
    "activation": {"swiglu": {}, "gelu": {"activation": "gelu"}},
    "kv heads": {"4": {"num_query_groups": 4}, "2": {"num_query_groups": 2}, "1": {"num_query_groups": 1}},
}
FACTORS = AXES | FEATURES


def on(axis: str, value: str) -> str:
    """The value of an axis as features meet it: sizes are 1 or more, schedules of a kind are alike."""
    if axis in ("tp", "cp", "dp", "ep", "etp", "accumulation"):
        return "1" if value == "1" else ">1"
    if axis == "pp" and value != "none":
        spec = SCHEDULES[PIPELINES[value]["pipeline_schedule"]]
        return ("V" if spec.chunks == 2 else "interleaved") if spec.chunks != 1 else "zero bubble" if "zb" in value else "plain"
    return value


Pair = tuple[tuple[str, str], tuple[str, str]]


def meetings(row: Row, name: str, value: str) -> set[Pair]:
    """The pairs that a factor's value makes with what is in a row: two axes by value, an axis and a feature."""
    found: set[Pair] = set()
    if name in FEATURES:
        if row.get("model") == "dense" and name in MOE_FEATURES:
            return found
        return {((axis, on(axis, row[axis])), (name, value)) for axis in AXES if axis in row}
    for other, theirs in row.items():
        if other in AXES:
            found.add(tuple(sorted(((name, value), (other, theirs)), key=lambda item: list(AXES).index(item[0]))))
        elif row.get("model") != "dense" or other not in MOE_FEATURES:
            found.add(((name, on(name, value)), (other, theirs)))
    return found


def pairs_of(row: Row) -> set[Pair]:
    """Everything that meets in a row."""
    items = list(row.items())
    return set().union(*(meetings(dict(items[:i]) | {"model": row["model"]}, *items[i]) for i in range(len(items))))


def all_pairs() -> set[Pair]:
    """Everything that could meet, whether or not the configuration allows it."""
    axes = {name: list(values) for name, values in AXES.items()}
    made: set[Pair] = set()
    for (a, mine), (b, theirs) in combinations(axes.items(), 2):
        made |= set(product([(a, v) for v in mine], [(b, v) for v in theirs]))
    for (a, mine), (b, theirs) in product(axes.items(), FEATURES.items()):
        made |= set(product([(a, on(a, v)) for v in mine], [(b, v) for v in theirs]))
    return made


def ranks_of(row: Row) -> int:
    """World size of a row."""
    pp = PIPELINES[row["pp"]].get("pipeline_model_parallel_size", 1)
    return int(row["tp"]) * int(row["cp"]) * int(row["dp"]) * pp


def features_of(row: Row) -> dict[str, Any]:
    """Configuration fields of a row's features, with what they need."""
    features: dict[str, Any] = {}
    for name in FEATURES:
        features |= FEATURES[name][row[name]] if name in row else {}
    losses = features.get("moe_router_load_balancing_type", ())
    if row["router"] == "switch" or row.get("skew") == "all to one":
        features["moe_router_topk"] = 1
    if row.get("capacity") == "device" or any(name.startswith("deepseek_d") for name in losses):
        features["moe_router_num_groups"] = 4
    if "deepseek_comm" in losses:
        features |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    if row["router"] == "expert_choice":
        features["moe_allow_acausal_routing"] = True
    return features


def config_of(row: Row) -> tuple[Config, Config, bool]:
    """(configuration under the layout, the same for one process, whether samples are padded)."""
    features = features_of(row)
    padded = features.pop("padded", False)
    layout: dict[str, Any] = {}
    for name in AXES:
        layout |= AXES[name][row[name]]
    stages = layout.get("num_virtual_stages_per_pipeline_rank", 2) * layout.get("pipeline_model_parallel_size", 1)
    base = vary(BASE, num_layers=max(4, stages), **features)
    return vary(base, **layout), base, padded


MOE_FEATURES = ("router", "balance", "capacity", "group", "bias", "scores", "z_loss", "jitter", "shared", "skew")
_PLAIN = {name: next(iter(FEATURES[name])) for name in MOE_FEATURES} | {"balance": "aux_loss", "dispatcher": "alltoall"}


def conflict(row: Row) -> bool:
    """Whether what is chosen so far cannot be, or has a setting that nobody reads."""
    if _sizes_conflict(row) or _features_conflict(row):
        return True
    return all(name in row for name in MOE_FEATURES) and _routing_conflict(tuple(row[name] for name in MOE_FEATURES))


@cache
def _routing_conflict(values: tuple[str, ...]) -> bool:
    features = features_of(dict(zip(MOE_FEATURES, values, strict=True)))
    return any(moe_checks(vary(BASE, **features).moe))


def _sizes_conflict(row: Row) -> bool:
    size = {name: int(row.get(name, 1)) for name in ("tp", "cp", "dp", "ep", "etp", "mbs", "accumulation")}
    pipeline = PIPELINES[row.get("pp", "none")]
    pp = pipeline.get("pipeline_model_parallel_size", 1)
    stage, experts = size["tp"] * size["cp"] * size["dp"], size["ep"] * size["etp"]
    samples = size["dp"] * size["mbs"] * size["accumulation"]
    if stage * pp > MAX_RANKS or experts * pp > MAX_RANKS or samples > GLOBAL_BATCH:
        return True
    if {"dp", "mbs", "accumulation"} <= row.keys() and samples != GLOBAL_BATCH:
        return True
    if {"tp", "cp", "dp", "ep", "etp"} <= row.keys() and stage % experts:
        return True
    if {"tp", "cp", "dp"} <= row.keys() and stage < experts:
        return True
    virtual = pipeline.get("num_virtual_stages_per_pipeline_rank")
    scheduled = pp > 1 and "accumulation" in row
    return scheduled and bool(schedule_problems(pipeline["pipeline_schedule"], pp, size["accumulation"], virtual))


def _features_conflict(row: Row) -> bool:
    get = row.get

    def given(name: str, *values: str) -> bool:
        return name in row and row[name] not in values

    dense, tp = get("model") == "dense", int(get("tp", "1"))
    slots = ("probs", "position", "random")
    return any(
        (
            get("sp") == "on" and get("tp") == "1",
            get("sp") == "off" and tp > 1 and get("model") == "moe",
            get("cp_comm") == "p2p" and get("cp") == "1",
            given("zero", "0") and get("dp") == "1" and get("cp") == "1",
            get("dispatcher") == "allgather" and get("ep") == "1" and get("etp") == "1",
            get("group") == "pair" and get("mbs") == "1",
            given("skew", "-") and given("router", "force_skewed"),
            get("skew") == "-" and get("router") == "force_skewed",
            get("bias") == "on" and given("router", "topk", "switch"),
            get("scores") == "sigmoid" and given("router", "topk"),
            get("balance") == "deepseek_comm" and given("router", "topk"),
            get("router") == "hash" and (given("balance", "none") or given("z_loss", "off")),
            get("capacity") in ("position", "random") and get("router") in ("gshard_top2", "expert_choice"),
            dense and (get("ep", "1") != "1" or get("etp", "1") != "1"),
            dense and any(given(name, value) for name, value in _PLAIN.items()),
        )
    )


def problems(row: Row) -> list[str]:
    """What the configuration's own checks say of a complete row."""
    config, _, _ = config_of(row)
    world_size = ranks_of(row)
    config, _ = normalise(config, world_size)
    return check(config, world_size, registries.CHOICES, registries.RULES, to_train=False)


ORDER = ("model", *MOE_FEATURES, "pp", "dp", "accumulation", "mbs", "tp", "cp", "ep", "etp")
ORDER += tuple(name for name in FACTORS if name not in ORDER)


def _complete(start: Row, missing: set[Pair]) -> Row | None:
    """Give every other factor the value that adds most missing pairs; back up where nothing fits."""
    order = [name for name in ORDER if name not in start]

    def extend(row: dict[str, str], rest: list[str]) -> dict[str, str] | None:
        if not rest:
            return None if problems(row) else row
        name = rest[0]
        fitting = [value for value in FACTORS[name] if not conflict(row | {name: value})]
        shift = len(missing) % max(len(fitting), 1)  # among equals not always the first
        fitting = fitting[shift:] + fitting[:shift]
        for value in sorted(fitting, key=lambda v: -len(meetings(row, name, v) & missing)):
            done = extend(row | {name: value}, rest[1:])
            if done is not None:
                return done
        return None

    return None if conflict(start) else extend(dict(start), order)


def _seeds(pair: Pair) -> Iterator[Row]:
    """Rows that hold just this pair (a coarse value of an axis stands for each of its values)."""
    options = []
    for (name, value), coarse in zip(pair, (pair[1][0] in FEATURES, False), strict=True):
        options.append([(name, v) for v in FACTORS[name] if (on(name, v) if coarse else v) == value])
    return (dict(both) for both in product(*options))


@cache
def rows() -> tuple[tuple[dict[str, str], ...], frozenset[Pair]]:
    """(the matrix, pairs that cannot be)."""
    missing, impossible, made = all_pairs(), set(), []
    while missing:
        pair = min(missing)
        done = next((row for row in (_complete(s, missing) for s in _seeds(pair)) if row is not None), None)
        if done is None:
            impossible.add(pair)
            missing.discard(pair)
            continue
        made.append(dict(done))
        missing -= pairs_of(done)
    return tuple(made), frozenset(impossible)
