"""The parity matrix: which layouts are compared with one process, each with which features, chosen pairwise.

    axes       tp cp dp ep etp pp (schedule, stages per rank)  sp  ZeRO  cp_comm  dispatcher  micro-batch size
    features   router, balance loss, capacity, groups, shared experts, recomputation, documents, padding, ...

Every value of an axis meets every value of every other axis, and every axis, on and off, meets every value of every
feature, where the configuration's own checks allow the pair. Rows are made greedily and deterministically: each begins
with a pair that is missing, then every other factor takes the value that adds most.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product

from megatron_moe.config import check, normalise
from megatron_moe.moe.checks import moe_checks
from megatron_moe.pipeline.schedules import SCHEDULES, schedule_problems
from megatron_moe.training import registries
from tests.parity.factors import AXES, FACTORS, FEATURES, PIPELINES, Row, config_of, features_of, ranks_of
from tests.parity.harness import BASE, GLOBAL_BATCH, vary

MAX_RANKS = 8


def on(axis: str, value: str) -> str:
    """The value of an axis as features meet it: sizes are 1 or more, schedules of a kind are alike."""
    if axis in ("tp", "cp", "dp", "ep", "etp", "accumulation"):
        return "1" if value == "1" else ">1"
    if axis == "pp" and value != "none":
        chunks = SCHEDULES[PIPELINES[value]["pipeline_schedule"]].chunks
        of_one = "zero bubble" if value.startswith("zb") else "plain"
        return {None: "interleaved", 1: of_one, 2: "V"}[chunks]
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
            first, second = sorted(((name, value), (other, theirs)), key=lambda item: list(AXES).index(item[0]))
            found.add((first, second))
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


MOE_FEATURES: tuple[str, ...] = ("router", "balance", "capacity", "group", "bias", "scores", "z_loss", "jitter")
MOE_FEATURES += ("shared", "skew", "experts")
_PLAIN = {name: next(iter(FEATURES[name])) for name in MOE_FEATURES} | {"balance": "aux_loss", "dispatcher": "alltoall"}


def conflict(row: Row) -> bool:
    """Whether what is chosen so far cannot be, or has a setting that nobody reads."""
    if _sizes_conflict(row) or _features_conflict(row):
        return True
    return all(name in row for name in MOE_FEATURES) and _routing_conflict(tuple(row[name] for name in MOE_FEATURES))


@cache
def _routing_conflict(values: tuple[str, ...]) -> bool:
    row: Row = dict(zip(MOE_FEATURES, values, strict=True))
    moe = normalise(vary(BASE, **features_of(row)), 1)[0].moe
    return any(moe_checks(replace(moe, num_experts=4) if row["experts"] == "pyramid" else moe))


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

    dense, tp, in_turns = get("model") == "dense", int(get("tp", "1")), get("dispatcher") == "samples in turns"
    return any(
        (
            get("sp") == "on" and get("tp") == "1",
            get("sp") == "off" and tp > 1 and get("model") == "moe",
            get("cp_comm") == "p2p" and get("cp") == "1",
            given("zero", "0") and get("dp") == "1" and get("cp") == "1",
            get("dispatcher") in ("allgather", "deduplicated") and get("ep") == "1" and get("etp") == "1",
            get("group") == "pair" and get("mbs") == "1",
            in_turns and (get("mbs") == "1" or (get("group") == "pair" and get("mbs") == "2")),
            in_turns and (get("zero") == "3" or get("recompute") in ("full", "mlp moe", "offloaded")),
            given("skew", "-") and given("router", "force_skewed"),
            get("skew") == "-" and get("router") == "force_skewed",
            get("bias") == "on" and given("router", "topk", "switch"),
            get("scores") == "sigmoid" and given("router", "topk"),
            get("balance") == "deepseek_comm" and given("router", "topk"),
            get("router") == "hash" and (given("balance", "none") or given("z_loss", "off")),
            get("capacity") in ("position", "random") and get("router") in ("gshard_top2", "expert_choice"),
            get("experts") == "pyramid" and get("ep") == "8",
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


SIZES = ("pp", "dp", "accumulation", "mbs", "tp", "cp", "ep", "etp")


Refused = set[frozenset[tuple[str, str]]]


def _complete(start: Row, missing: set[Pair], refused: Refused) -> Row | None:
    """Give every other factor the value that adds most missing pairs; back up where nothing fits."""
    # Those first that rule each other out: what cannot be is found before much else has been chosen.
    first = (*MOE_FEATURES, *SIZES) if any(name in MOE_FEATURES for name in start) else (*SIZES, *MOE_FEATURES)
    order = [name for name in dict.fromkeys(("model", *first, *FACTORS)) if name not in start]

    def fits(row: Row) -> bool:
        return not conflict(row) and not any(items <= row.items() for items in refused)

    def extend(row: dict[str, str], rest: list[str]) -> dict[str, str] | None:
        if not rest:
            return row
        name = rest[0]
        fitting = [value for value in FACTORS[name] if fits(row | {name: value})]
        shift = len(missing) % max(len(fitting), 1)  # among equals not always the first
        fitting = fitting[shift:] + fitting[:shift]
        for value in sorted(fitting, key=lambda v: -len(meetings(row, name, v) & missing)):
            done = extend(row | {name: value}, rest[1:])
            if done is not None:
                return done
        return None

    while fits(start):
        row = extend(dict(start), order)
        if row is None or not problems(row):
            return row
        refused.add(_culprits(row))
    return None


ONE_PROCESS = {name: next(iter(AXES[name])) for name in AXES} | {"sp": "off", "mbs": "2", "accumulation": "4"}


def _culprits(row: Row) -> frozenset[tuple[str, str]]:
    """The values for which a row is refused: of a rule of the checks that ``conflict`` does not know."""
    alone = dict(row) | ONE_PROCESS
    row = dict(row) if conflict(alone) or not problems(alone) else alone
    for name in FACTORS:
        plain = row | {name: next(iter(FACTORS[name]))}
        if not conflict(plain) and problems(plain):
            row = plain
    features_alone = row.items() >= ONE_PROCESS.items()
    kept = (name for name in row if row[name] != next(iter(FACTORS[name])))
    return frozenset((name, row[name]) for name in kept if not (features_alone and name in AXES))


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
    refused: Refused = set()
    while missing:
        pair = min(missing)
        done = next((row for row in (_complete(s, missing, refused) for s in _seeds(pair)) if row is not None), None)
        if done is None:
            impossible.add(pair)
            missing.discard(pair)
            continue
        made.append(dict(done))
        missing -= pairs_of(done)
    return tuple(made), frozenset(impossible)
