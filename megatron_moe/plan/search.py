"""Search for the best layout: all are guessed at, the promising ones checked, dry-run and ranked by estimated time.

    sizes x schedules x micro-batches x recomputation x ZeRO --fits, least guessed time--> legal --> dry-run --> best

What is shown and compared comes from dry runs alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatron_moe.config import check, normalise, resolve
from megatron_moe.config.schema import Config
from megatron_moe.plan.cluster import Cluster
from megatron_moe.plan.configure import configured
from megatron_moe.plan.dry_run import Plan, dry_run
from megatron_moe.plan.estimate import Estimate, estimate
from megatron_moe.plan.guess import Guesser, measure
from megatron_moe.plan.main import memory_problem
from megatron_moe.training import registries
from megatron_moe.training.shrink import vary

DRY_RUNS = 14  # at most, however few fit
ROOM = 0.95  # of a device; the rest is for the communication library's buffers and the allocator's fragments
RECOMPUTATION: dict[str, dict[str, Any]] = {
    "none": {"recompute_granularity": None},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "moe, layernorm": {"recompute_granularity": "selective", "recompute_modules": ("moe", "layernorm")},
    "full": {"recompute_granularity": "full"},
}
_SCHEDULES = (
    ("1f1b", None),
    *(("interleaved-1f1b", virtual) for virtual in (2, 3, 4, 6, 7, 8)),
    ("zb-h1", None),
    ("zb-v", None),
    ("dualpipe-v", None),
)


@dataclass(frozen=True)
class Found:
    """A layout that was dry-run.

    Attributes:
        values: its fields of the configuration.
        name: what to call it; empty if the search found it.
    """

    values: dict[str, Any]
    plan: Plan
    time: Estimate
    name: str = ""

    @property
    def memory_gb(self) -> float:
        """Of the fullest rank."""
        return max(sum(self.plan.memory(r).values()) for r in range(self.plan.sizes.pp)) / 1e9

    @property
    def reason(self) -> str:
        """Where its time goes."""
        return self.time.largest(4)


@dataclass(frozen=True)
class Search:
    """What was looked for, and what was found.

    Attributes:
        guessed: how many layouts fit by the guess.
        found: those that were dry-run and fit, the fastest first.
        beside: a given layout, whether it fits or not.
    """

    base: Config
    guessed: int
    found: list[Found]
    beside: Found | None


def search(
    argv: Sequence[str], world_size: int, cluster: Cluster, best: int, beside: Sequence[str] | None = None
) -> Search:
    """The best layouts that fit, the fastest first.

    Args:
        argv: the model and what is fixed; without --params-dtype bfloat16, without --global-batch-size four
            sequences for each rank.
        beside: words of the command line for a layout to compare with, over ``argv``.

    Raises:
        ValueError: no layout is legal, or none fits; the message says what is in the way.
    """
    from tqdm import tqdm

    base = searchable(argv, world_size)
    measured = {
        name: measure(base, values, cluster)
        for name, values in tqdm(RECOMPUTATION.items(), desc="layers", unit="trace", leave=False)
    }
    guesser = Guesser(base, cluster, world_size, measured)
    guesses = []
    for values, recompute in tqdm(list(layouts(base, world_size, cluster)), desc="guesses", leave=False):
        guess = guesser.guess(values, recompute)
        if guess is not None:
            guesses.append((*guess, values | RECOMPUTATION[recompute]))
    room = replace(cluster, memory_gb=cluster.memory_gb * ROOM)
    fitting = sorted((guess for guess in guesses if guess[1] <= room.memory_gb * 1e9), key=lambda guess: guess[0])
    if not fitting:
        raise ValueError(_nothing_fits(guesses, world_size, cluster))
    found: list[Found] = []
    problem = None
    chosen = list(_promising([values for *_, values in fitting], base, world_size))
    for values, config in tqdm(chosen, desc="dry runs", unit="layout", leave=False):
        if len(found) == best:
            break
        plan = dry_run(config, world_size)
        problem = memory_problem(plan, room)
        if problem is None:
            found.append(Found(values, plan, estimate(plan, cluster)))
    if not found:
        raise ValueError(f"none of the {len(chosen)} most promising layouts fits; of the last, {problem}")
    given = None if beside is None else _given([*argv, *beside], base, world_size, cluster)
    return Search(base, len(fitting), sorted(found, key=lambda f: f.time.step), given)


def searchable(argv: Sequence[str], world_size: int) -> Config:
    """The model with what a search fixes, checked on one rank.

    Raises:
        ConfigError: everything that is wrong with it.
    """
    named = resolve(argv, registries.CHOICES).provenance
    batch, dtype = ("global_batch_size", 4 * world_size), ("params_dtype", "bfloat16")
    flags = [(f"--{key.replace('_', '-')}", str(v)) for key, v in (batch, dtype) if named[key] == "default"]
    return configured([*argv, *(word for flag in flags for word in flag)], 1)


def layouts(base: Config, world_size: int, cluster: Cluster) -> Iterator[tuple[dict[str, Any], str]]:
    """Fields of the configuration of all layouts, and how they recompute."""
    model, num_experts = base.model, base.moe.num_experts or 1
    tps = [2**i for i in range(4) if 2**i <= min(cluster.gpus_per_node, model.num_attention_heads)]
    cps = [2**i for i in range(11) if 2**i <= max(1, base.data.seq_length // 8192)]
    pps = [p for p in range(1, 33) if world_size % p == 0 and p <= model.num_layers + 2]
    eps = [e for e in range(1, world_size + 1) if num_experts % e == 0 and world_size % e == 0]
    sizes = product(tps, cps, pps, eps, (False, True))
    for (tp, cp, pp, ep, cut), (schedule, virtual), mbs in product(sizes, _SCHEDULES, (1, 2, 4, 8)):
        if (pp == 1 and schedule != "1f1b") or (cut and tp == 1) or (cut and num_experts == 1):
            continue
        values = {
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "pipeline_model_parallel_size": pp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": tp if cut else 1,
            "pipeline_schedule": schedule,
            "num_virtual_stages_per_pipeline_rank": virtual,
            "micro_batch_size": mbs,
            "pipeline_model_parallel_layout": None,
        }
        for zero in ("optim", "optim_grads", "optim_grads_params"):
            for recompute in RECOMPUTATION:
                yield values | {"data_parallel_sharding_strategy": zero}, recompute


def _promising(
    ordered: Sequence[dict[str, Any]], base: Config, world_size: int
) -> Iterator[tuple[dict[str, Any], Config]]:
    """The first that are legal, no more than two of the same sizes, so that a wrong guess cannot fill the list."""
    seen: dict[tuple[int, ...], int] = {}
    for values in ordered:
        sizes = tuple(value for key, value in values.items() if key.endswith("_parallel_size"))
        if seen.get(sizes, 0) == 2:
            continue
        config, _ = normalise(vary(base, **values), world_size)
        if not check(config, world_size, registries.CHOICES, registries.RULES, to_train=False):
            seen[sizes] = seen.get(sizes, 0) + 1
            yield values, config
            if sum(seen.values()) == DRY_RUNS:
                return


def _given(argv: Sequence[str], base: Config, world_size: int, cluster: Cluster) -> Found:
    """A layout that somebody else chose, with the batch and the type of the search."""
    config = configured(argv, world_size)
    config = vary(config, global_batch_size=base.training.global_batch_size, params_dtype=base.training.params_dtype)
    plan = dry_run(config, world_size)
    names = [name for name, _ in next(layouts(base, world_size, cluster))[0].items()]
    flat = vars(config.parallel) | vars(config.training)
    values = {name: flat[name] for name in (*names, "recompute_granularity", "recompute_modules")}
    return Found(values, plan, estimate(plan, cluster), name="given")


def _nothing_fits(guesses: Sequence[tuple[float, float, Any]], world_size: int, cluster: Cluster) -> str:
    if not guesses:
        return (
            f"no layout divides {world_size} ranks and the global batch: its sequences must be a multiple of the "
            "micro-batch times the data-parallel size; choose another --gpus or --global-batch-size."
        )
    _, least, values = min(guesses, key=lambda guess: guess[1])
    sizes = ", ".join(
        f"--{key.replace('_', '-')} {value}" for key, value in values.items() if key.endswith("size") and value > 1
    )
    zero, recompute = values["data_parallel_sharding_strategy"], values["recompute_granularity"] or "nothing"
    return (
        f"the model fits nowhere: of {len(guesses):,} layouts of {world_size} ranks the smallest ({sizes}, {zero}, "
        f"recomputing {recompute}) needs about {least / 1e9:.0f} GB of the {cluster.memory_gb:g} GB of {cluster.name}. "
        "Use more ranks, larger devices, a shorter --seq-length or a smaller model; `tools/plan.py show` of that "
        "layout says what fills it."
    )
