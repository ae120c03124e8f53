"""Search for the best layout: all legal ones are guessed at, the promising ones dry-run and ranked by estimated time.

    sizes x schedules x micro-batches x recomputation --checks--> legal --fits, least guessed time--> dry-run --> best

The guess knows FLOPs, the bubble and the two largest kinds of messages; it only decides what is worth a dry run.
What is shown and compared comes from dry runs alone.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import yaml

from megatron_moe.config import check, normalise
from megatron_moe.config.schema import Config
from megatron_moe.model.flops import ForwardFlops
from megatron_moe.parallel.layout import MeshSizes, peers
from megatron_moe.pipeline.schedules import chunks_per_rank
from megatron_moe.plan.cluster import Cluster
from megatron_moe.plan.configure import configured
from megatron_moe.plan.dry_run import Plan, dry_run
from megatron_moe.plan.estimate import Estimate, collective_seconds, estimate
from megatron_moe.plan.main import memory_problem
from megatron_moe.plan.rank import steps_of
from megatron_moe.training import registries
from megatron_moe.training.shrink import vary

DRY_RUNS = 12  # how many layouts are worth one
_SCHEDULES = (("1f1b", None), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4), ("zb-h1", None))
_RECOMPUTATION = (
    {"recompute_granularity": None},
    {"recompute_granularity": "selective", "recompute_modules": ("moe", "norm")},
    {"recompute_granularity": "full"},
)


@dataclass(frozen=True)
class Found:
    """A layout that was dry-run and fits."""

    values: dict[str, Any]
    plan: Plan
    time: Estimate

    @property
    def memory_gb(self) -> float:
        """Of the fullest rank."""
        return max(sum(self.plan.memory(r).values()) for r in range(self.plan.sizes.pp)) / 1e9

    @property
    def reason(self) -> str:
        """Where its time goes."""
        parts = sorted(self.time.parts.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {seconds / self.time.step:.0%}" for name, seconds in parts[:4])


def search(argv: list[str], world_size: int, cluster: Cluster, best: int) -> list[Found]:
    """The best layouts that fit, the fastest first.

    Raises:
        ValueError: no layout is legal, or none fits; the message says what is in the way.
    """
    from tqdm import tqdm

    base = configured(argv, 1)
    guesses = sorted(_guesses(base, world_size, cluster), key=lambda guess: guess[0])
    if not guesses:
        raise ValueError(
            f"no layout of {world_size} ranks has room for weights, gradients and optimizer state in "
            f"{cluster.memory_gb:g} GB ({cluster.name}), or none divides the model; use more ranks or a smaller model."
        )
    found: list[Found] = []
    problem = None
    for _, values, config in tqdm(guesses[:DRY_RUNS], desc="dry runs", unit="layout", leave=False):
        plan = dry_run(config, world_size)
        problem = memory_problem(plan, cluster) or problem
        if memory_problem(plan, cluster) is None:
            found.append(Found(values, plan, estimate(plan, cluster)))
    if not found:
        raise ValueError(
            f"none of the {min(len(guesses), DRY_RUNS)} most promising layouts fits; of the last, {problem}"
        )
    return sorted(found, key=lambda f: f.time.step)[:best]


def _guesses(base: Config, world_size: int, cluster: Cluster) -> Iterator[tuple[float, dict[str, Any], Config]]:
    """(guessed seconds, fields, configuration) of every legal layout whose state fits."""
    model, num_experts = base.model, base.moe.num_experts or 1
    powers = [2**i for i in range(11)]
    tps = [t for t in powers if t <= min(8, cluster.gpus_per_node, model.num_attention_heads)]
    cps = [c for c in powers if c <= max(1, base.data.seq_length // 8192)]
    pps = [p for p in range(1, 33) if world_size % p == 0 and p <= model.num_layers + 2]
    eps = [e for e in range(1, world_size + 1) if num_experts % e == 0 and world_size % e == 0]
    for tp, cp, pp, ep, (schedule, virtual), mbs in product(tps, cps, pps, eps, _SCHEDULES, (1, 2)):
        if (pp == 1 and schedule != "1f1b") or world_size % (tp * cp * pp) or world_size % (ep * pp):
            continue
        values = {
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "pipeline_model_parallel_size": pp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": 1,
            "pipeline_schedule": schedule,
            "num_virtual_stages_per_pipeline_rank": virtual,
            "micro_batch_size": mbs,
            "data_parallel_sharding_strategy": "optim",
            "pipeline_model_parallel_layout": None,
        }
        config, _ = normalise(vary(base, **values), world_size)
        if check(config, world_size, registries.CHOICES, registries.RULES, to_train=False):
            continue
        for recomputation in _RECOMPUTATION:
            guess = _guess(vary(config, **recomputation), world_size, cluster)
            if guess is not None:
                yield guess, values | recomputation, vary(config, **recomputation)


def _guess(config: Config, world_size: int, cluster: Cluster) -> float | None:
    """Seconds of a step, roughly; None where weights, gradients and optimizer state alone do not fit."""
    sizes, model, moe, training = MeshSizes.of(config.parallel, world_size), config.model, config.moe, config.training
    num_layers = model.num_layers
    weights = ForwardFlops.of(replace(config, data=replace(config.data, seq_length=1)))
    expert = (3 if model.gated else 2) * model.hidden_size * (moe.moe_ffn_hidden_size or model.dense_ffn_size)
    experts = [n * expert for n in moe.experts_per_layer(num_layers)]
    dense = sum(weights.layers) / 2 - sum(moe.moe_router_topk * expert for n in experts if n) + weights.head
    per_expert_rank, per_dense_rank = sum(experts) / (sizes.ep * sizes.etp * sizes.pp), dense / (sizes.tp * sizes.pp)
    width = 2 if training.params_dtype == "bfloat16" else 4
    state = sum(
        n * (width + 4 + 16 / d) for n, d in ((per_expert_rank, sizes.edp), (per_dense_rank, sizes.dp * sizes.cp))
    )
    activations = _guess_activations(config, sizes)
    if state + activations > cluster.memory_gb * 1e9:
        return None
    num = steps_of(config, sizes)
    flops = ForwardFlops.of(config)
    tokens = training.micro_batch_size * config.data.seq_length / (sizes.tp * sizes.cp)
    factor = {None: 3.0, "selective": 3.6, "full": 4.0}[training.recompute_granularity]
    peak = cluster.peak_tflops[training.params_dtype] * 1e12 * cluster.efficiency["matmul"]
    per_microbatch = factor * (sum(flops.layers) + flops.head) * tokens / sizes.pp / peak
    layers = num_layers / sizes.pp
    row = tokens * model.hidden_size * width
    ep_bytes = 4 * moe.moe_router_topk * row * (sizes.ep - 1) / sizes.ep * layers * (bool(sum(experts)))
    tp_bytes = 10 * row * (sizes.tp - 1) * layers
    for axis, collective, sent in (("ep", "all_to_all", ep_bytes), ("tp", "all_gather", tp_bytes)):
        if sent:
            per_microbatch += collective_seconds(peers(0, axis, sizes), collective, int(6 * layers), sent, cluster)
    parallel = config.parallel
    chunks = chunks_per_rank(parallel.pipeline_schedule, parallel.num_virtual_stages_per_pipeline_rank)
    bubble = (sizes.pp - 1) / chunks * (1 / 3 if parallel.pipeline_schedule == "zb-h1" else 1)
    return per_microbatch * (num + bubble)


def _guess_activations(config: Config, sizes: MeshSizes) -> float:
    """Bytes: what layers keep (formulas of the modern block, 16 bit), times the micro-batches in flight."""
    model, moe, training = config.model, config.moe, config.training
    tokens = training.micro_batch_size * config.data.seq_length / (sizes.tp * sizes.cp)
    width = moe.moe_ffn_hidden_size or model.dense_ffn_size
    copies = moe.moe_router_topk if moe.num_experts else 1
    kept = {
        None: 16.0 * model.hidden_size + copies * (4 * model.hidden_size + 8 * width),
        "selective": 14.0 * model.hidden_size,
        "full": 2.0 * model.hidden_size,
    }[training.recompute_granularity]
    return kept * tokens * model.num_layers / sizes.pp * min(sizes.pp, steps_of(config, sizes))


def table(found: list[Found]) -> str:
    """The best layouts with what they cost and where their time goes."""
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    shown = Table(
        "tp", "cp", "pp", "ep", "schedule", "mbs", "recompute", "s/step", "TFLOP/s", "GB", "where the time goes"
    )
    for item in found:
        v = item.values
        schedule = v["pipeline_schedule"] + (f" x{n}" if (n := v["num_virtual_stages_per_pipeline_rank"]) else "")
        axes = ("tensor_model", "context", "pipeline_model", "expert_model")
        shown.add_row(
            *(str(v[f"{axis}_parallel_size"]) for axis in axes),
            schedule,
            str(v["micro_batch_size"]),
            v["recompute_granularity"] or "no",
            f"{item.time.step:.3g}",
            f"{item.time.tflops_per_gpu:.0f}",
            f"{item.memory_gb:.1f}",
            item.reason,
        )
    Console(file=out, width=140).print(shown)
    return out.getvalue()


def as_yaml(found: Found, cluster: Cluster) -> str:
    """The layout as a file for --config, after the model's."""
    time, sizes = found.time, found.plan.sizes
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in found.values.items() if v is not None}
    return (
        f"# Found by tools/plan.py search for {sizes.world} devices of {cluster.name}: {time.step:.3g} s a step, "
        f"{time.tflops_per_gpu:.0f} TFLOP/s per device,\n# {found.memory_gb:.1f} GB on the fullest (all estimated).\n"
        + yaml.safe_dump(values, sort_keys=False)
    )
