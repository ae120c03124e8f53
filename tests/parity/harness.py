"""The parity harness: train a tiny model for a few steps under a layout and compare everything with one process.

    trace(config, world size) -> losses, balance losses, gradient norms, every gradient and weight by logical name

Everything is float64; what differs between layouts is only the order of additions, so 1e-9 relative is a wide margin and any
wrong factor, missing reduction or rank-dependent decision stands out by many orders of magnitude.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from megatron_moe.config import normalise
from megatron_moe.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_moe.data.batch import Batch, CollateOptions, collate
from megatron_moe.data.sampler import micro_batches
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes, all_groups
from megatron_moe.training.build import Machine, build_machine
from megatron_moe.training.statistics import collect
from megatron_moe.training.step import train_step
from tests.helpers.ranks import MAX_RANKS, RankPool

SEQ_LENGTH, VOCAB, EOD, GLOBAL_BATCH, STEPS = 16, 67, 3, 8, 3
TOLERANCE = 1e-9

BASE = Config(
    model=ModelConfig(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=VOCAB,
        make_vocab_size_divisible_by=4,
        init_method_std=0.1,
    ),
    moe=MoEConfig(num_experts=8, moe_ffn_hidden_size=16),
    data=DataConfig(seq_length=SEQ_LENGTH, mock_data=True),
    optim=OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1, adam_eps=1e-5),
    training=TrainingConfig(
        params_dtype="float64", global_batch_size=GLOBAL_BATCH, micro_batch_size=GLOBAL_BATCH, train_iters=STEPS
    ),
)


def vary(config: Config, **values: Any) -> Config:
    """The configuration with fields set by name, whatever their section."""
    for section in fields(config):
        part = getattr(config, section.name)
        mine = {k: v for k, v in values.items() if k in {f.name for f in fields(part)}}
        config = replace(config, **{section.name: replace(part, **mine)})
        values = {k: v for k, v in values.items() if k not in mine}
    assert not values, f"no such fields: {values}"
    return config


@dataclass
class Trace:
    """What a run left, by logical name; identical for every layout if the layout is not part of the mathematics."""

    losses: list[float]
    norms: list[float]
    balance: list[dict[str, float]]
    gradients: dict[str, np.ndarray]  # after the last step
    weights: dict[str, np.ndarray]


def sample(index: int, pad_from: int | None = None) -> np.ndarray:
    """Sample i: random tokens with ends of documents; a function of i alone."""
    generator = np.random.default_rng(index)
    tokens = generator.integers(4, VOCAB, SEQ_LENGTH + 1)
    tokens[generator.random(SEQ_LENGTH + 1) < 0.15] = EOD
    return tokens


def batches(config: Config, consumed: int, dp_rank: int, dp_size: int, padded: bool) -> list[Batch]:
    """The micro-batches of a data rank; with ``padded``, the tails of some samples are padding without loss."""
    options = CollateOptions(
        vocab_size=VOCAB,
        eod_id=EOD,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
        eod_mask_loss=config.data.eod_mask_loss,
    )
    assert config.training.global_batch_size is not None
    plan = micro_batches(
        consumed, config.training.global_batch_size, config.training.micro_batch_size, dp_rank, dp_size
    )
    made = []
    for ids in plan:
        batch = collate([sample(i) for i in ids], ids, options)
        if padded:
            lengths = torch.tensor([[SEQ_LENGTH - (5 * i) % (SEQ_LENGTH + 1)] for i in ids])
            padding = torch.arange(SEQ_LENGTH) >= lengths
            batch = replace(batch, padding_mask=padding, loss_mask=batch.loss_mask & ~padding)
        made.append(batch)
    return made


_groups: dict[tuple[int, ...], Any] = {}  # process groups of this worker, kept over tests


def make_groups(rank: int, sizes: MeshSizes) -> None:
    """On every rank of the pool alike: make the groups of a mesh that are not there yet."""
    for members in all_groups(sizes):
        if members not in _groups:
            _groups[members] = torch.distributed.new_group(list(members))

Prepare = Callable[[Machine], None]


def run_rank(rank: int, config: Config, world_size: int, padded: bool, prepare: Prepare | None) -> dict[str, Any]:
    """Train under a layout on one rank; returns this rank's pieces of gradients and weights."""
    torch.set_num_threads(1)
    config, _ = normalise(config, world_size)
    sizes = MeshSizes.of(config.parallel, world_size)
    ctx = ParallelContext.create(sizes, rank=rank, groups=_groups)
    machine = build_machine(config, ctx)
    if prepare is not None:
        prepare(machine)
    losses, norms, balance = [], [], []
    for iteration in range(1, STEPS + 1):
        consumed = (iteration - 1) * GLOBAL_BATCH
        result = train_step(
            machine,
            batches(config, consumed, ctx.dp.rank, ctx.dp.size, padded),
            iteration,
            config.optim.lr,
        )
        losses.append(result.loss)
        norms.append(result.grad_norm)
        balance.append(collect(machine).scalars())
    pieces = []
    for piece in machine.pieces:
        spec = piece.parameter.spec
        slices = [(s.start, s.stop) for s in spec.storage_slices(ctx)]
        arrays = piece.grad.numpy().copy(), piece.weight.numpy().copy()
        pieces.append((spec.name, spec.shape, spec.storage_shape, slices, piece.start, piece.stop, *arrays))
    biases = {f"layers.{i}.bias": g.bias_E.numpy() for i, g in machine.gates.items() if g.bias_E is not None}
    return {"losses": losses, "norms": norms, "balance": balance, "pieces": pieces, "biases": biases}


def trace(
    config: Config, world_size: int, ranks: RankPool, *, padded: bool = False, prepare: Prepare | None = None
) -> Trace:
    """Train under a layout and put the logical tensors together; replicas must agree."""
    if world_size == 1:
        results = [run_rank(0, config, 1, padded, prepare)]
    else:
        ranks.run(MAX_RANKS, make_groups, MeshSizes.of(config.parallel, world_size))
        results = ranks.run(world_size, run_rank, config, world_size, padded, prepare)
    for other in results[1:]:
        assert other["losses"] == results[0]["losses"], "ranks report different losses"
        assert other["norms"] == results[0]["norms"], "ranks report different gradient norms"
    gradients: dict[str, np.ndarray] = {}
    weights: dict[str, np.ndarray] = {}
    shapes = {}
    for result in results:
        for name, shape, stored, slices, start, stop, grad, weight in result["pieces"]:
            shapes[name] = shape
            positions = np.arange(np.prod(stored)).reshape(stored)[tuple(slice(*s) for s in slices)].ravel()[start:stop]
            for whole, part in ((gradients, grad), (weights, weight)):
                flat = whole.setdefault(name, np.full(stored, np.nan)).reshape(-1)
                known = ~np.isnan(flat[positions])
                assert np.array_equal(flat[positions][known], part[known]), f"replicas of {name} differ"
                flat[positions] = part
        for name, bias in result["biases"].items():
            weights[name] = bias
            shapes[name] = bias.shape
    for whole in (gradients, weights):
        for name in whole:
            whole[name] = whole[name][tuple(slice(0, n) for n in shapes[name])]
            assert not np.isnan(whole[name]).any(), f"a part of {name} is nowhere"
    return Trace(results[0]["losses"], results[0]["norms"], results[0]["balance"], gradients, weights)


def differences(found: Trace, expected: Trace) -> list[str]:
    """Everything that differs by more than the tolerance, relative to the largest value of its tensor."""
    problems = []

    def compare(what: str, a: Any, b: Any) -> None:
        a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
        if a.shape != b.shape:
            problems.append(f"{what}: shape {a.shape} instead of {b.shape}")
            return
        scale = max(float(np.abs(b).max(initial=0.0)), 1e-30)
        error = float(np.abs(a - b).max(initial=0.0)) / scale
        if not error <= TOLERANCE:
            problems.append(f"{what}: relative error {error:.3g}")

    compare("losses", found.losses, expected.losses)
    compare("gradient norms", found.norms, expected.norms)
    for step, (mine, theirs) in enumerate(zip(found.balance, expected.balance, strict=True), 1):
        if mine.keys() != theirs.keys():
            problems.append(f"statistics {sorted(mine)} instead of {sorted(theirs)}")
            continue
        for name in theirs:
            compare(f"step {step}: {name}", mine[name], theirs[name])
    for kind, mine, theirs in (
        ("gradient", found.gradients, expected.gradients),
        ("weight", found.weights, expected.weights),
    ):
        if mine.keys() != theirs.keys():
            problems.append(f"{kind}s of {sorted(mine.keys() ^ theirs.keys())} on one side only")
        for name in mine.keys() & theirs.keys():
            compare(f"{kind} of {name}", mine[name], theirs[name])
    return problems


def layout(text: str) -> tuple[dict[str, Any], int]:
    """``tp=2,pp=2,ep=2,dp=2`` -> configuration fields and world size. ``vpp``, ``schedule``, ``zero``, ``cp_comm`` too."""
    names = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "vpp": "num_virtual_stages_per_pipeline_rank",
        "mbs": "micro_batch_size",
        "schedule": "pipeline_schedule",
        "sp": "sequence_parallel",
        "cp_comm": "cp_comm_type",
        "zero": "data_parallel_sharding_strategy",
        "dispatcher": "moe_token_dispatcher_type",
    }
    strategies = {"0": "no_shard", "1": "optim", "2": "optim_grads", "3": "optim_grads_params"}
    values: dict[str, Any] = {}
    world_size = 1
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key in ("dp", "tp", "pp", "cp"):
            world_size *= int(value)
        if key == "zero":
            values[names[key]] = strategies[value]
        elif key == "sp":
            values[names[key]] = value == "1"
        elif key != "dp":
            values[names[key]] = value if key in ("schedule", "cp_comm", "dispatcher") else int(value)
    values.setdefault("expert_tensor_parallel_size", 1)
    values.setdefault("micro_batch_size", 1)
    return values, world_size


__all__ = ["BASE", "ParallelConfig", "Trace", "differences", "layout", "trace", "vary"]
