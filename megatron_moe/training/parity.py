"""Whether a layout changes the mathematics: a run under it against a run in one process.

    trace(configuration, world size) -> losses, statistics, gradient norms, gradients and weights by logical name
    compare(trace, trace)            -> what differs, in the order in which a step makes it

In float64 layouts differ in the order of additions alone, so 1e-9 relative is a wide margin, and a wrong factor, a
missing reduction or a decision that depends on a rank stands out by many orders of magnitude. Gradients are those of
the first and the last step: only in the first has a fault in one of them not yet reached all others.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_moe.config import normalise
from megatron_moe.config.schema import Config
from megatron_moe.data.batch import Batch, CollateOptions, collate
from megatron_moe.data.sampler import micro_batches
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes, all_groups
from megatron_moe.training.build import Machine, build_machine
from megatron_moe.training.local_ranks import RankPool
from megatron_moe.training.statistics import collect
from megatron_moe.training.step import train_step

TOLERANCE, STEPS, EOD = 1e-9, 3, 3

Prepare = Callable[[Machine], AbstractContextManager[None]]
"""Something that holds on a rank while it runs, undone afterwards; must be picklable. For tests."""


@dataclass
class Trace:
    """What a run left, by logical name; the same for every layout if the layout is not part of the mathematics.

    Attributes:
        losses, norms, statistics: per step.
        gradients: of the first and of the last step, before clipping.
        weights: after the last step, with the selection biases.
        traffic: per rank, calls and bytes by (axis, collective), of the last step.
        disagreements: where ranks differ that should hold the same.
    """

    losses: list[float]
    norms: list[float]
    statistics: list[dict[str, float]]
    gradients: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
    weights: dict[str, np.ndarray]
    traffic: list[dict[tuple[str, str], tuple[int, int]]]
    disagreements: list[str] = field(default_factory=list)


class Piece(NamedTuple):
    """A rank's elements [start, stop) of its slices of a logical tensor, and their values."""

    name: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    slices: tuple[tuple[int, int], ...]
    start: int
    stop: int
    values: tuple[np.ndarray, ...]


class RankResult(NamedTuple):
    """What one rank hands back."""

    losses: list[float]
    norms: list[float]
    statistics: list[dict[str, float]]
    pieces: list[Piece]
    biases: dict[str, np.ndarray]
    order: list[str]  # its parameters in the model's order
    traffic: dict[tuple[str, str], tuple[int, int]]


def sample(index: int, config: Config) -> np.ndarray:
    """[S + 1] random tokens with ends of documents: a function of the index and the sizes alone.

    No two tokens of a sample have the same past: their scores would be equal but for rounding, and a router that ranks
    tokens would choose between them by rounding, which layouts may do differently.
    """
    assert config.model.vocab_size is not None
    generator = np.random.default_rng(index)
    length = config.data.seq_length + 1
    tokens = generator.permutation(np.arange(EOD + 1, config.model.vocab_size))[:length]
    assert len(tokens) == length, "the vocabulary is smaller than the sequence"
    ends = generator.random(length) < 0.2
    ends[1:] &= ~ends[:-1]  # no document is an end alone, but for the first
    tokens[ends] = EOD
    return tokens


def batches(config: Config, consumed: int, dp_rank: int, dp_size: int, padded: bool) -> list[Batch]:
    """The micro-batches of a data rank; with ``padded``, the tails of some samples are padding without loss."""
    assert config.training.global_batch_size is not None and config.model.vocab_size is not None
    length = config.data.seq_length
    options = CollateOptions(
        vocab_size=config.model.vocab_size,
        eod_id=EOD,
        reset_position_ids=config.data.reset_position_ids,
        reset_attention_mask=config.data.reset_attention_mask,
        eod_mask_loss=config.data.eod_mask_loss,
    )
    made = []
    sizes = config.training.global_batch_size, config.training.micro_batch_size
    for ids in micro_batches(consumed, *sizes, dp_rank, dp_size):
        batch = collate([sample(i, config) for i in ids], ids, options)
        if padded:
            lengths = torch.tensor([[length - (5 * i) % (length + 1)] for i in ids])
            padding = torch.arange(length) >= lengths
            batch = replace(batch, padding_mask=padding, loss_mask=batch.loss_mask & ~padding)
        made.append(batch)
    return made


_groups: dict[tuple[int, ...], Any] = {}  # process groups of this worker, kept from call to call


def make_groups(rank: int, sizes: MeshSizes) -> None:
    """On every rank of the pool alike: make the groups of a mesh that are not there yet."""
    for members in all_groups(sizes):
        if members not in _groups:
            _groups[members] = dist.new_group(list(members))


def run_rank(rank: int, config: Config, world_size: int, padded: bool, prepare: Prepare | None) -> RankResult:
    """Train under a layout on one rank."""
    torch.set_num_threads(1)
    config, _ = normalise(config, world_size)
    ctx = ParallelContext.create(MeshSizes.of(config.parallel, world_size), rank=rank, groups=_groups)
    machine = build_machine(config, ctx)
    with nullcontext() if prepare is None else prepare(machine):
        return _train(machine, padded)


def _train(machine: Machine, padded: bool) -> RankResult:
    config, ctx = machine.config, machine.ctx
    assert config.training.global_batch_size is not None
    losses, norms, statistics, gradients = [], [], [], []
    for iteration in range(1, STEPS + 1):
        ctx.traffic.clear()
        consumed = (iteration - 1) * config.training.global_batch_size
        step_batches = batches(config, consumed, ctx.dp.rank, ctx.dp.size, padded)
        result = train_step(machine, step_batches, iteration, config.optim.lr)
        sent = {k: (calls, ctx.traffic.sent_bytes[k]) for k, calls in ctx.traffic.calls.items()}
        losses.append(result.loss)
        norms.append(result.grad_norm)
        statistics.append(collect(machine).scalars())
        if iteration in (1, STEPS):
            limit = config.optim.clip_grad  # undone: a wrong norm is not to show in every gradient
            factor = max(1.0, (result.grad_norm + 1e-6) / limit) if limit > 0 else 1.0
            gradients.append([(piece.grad * factor).numpy() for piece in machine.pieces])
    pieces = []
    for piece, *values in zip(machine.pieces, *gradients, strict=True):
        spec = piece.parameter.spec
        slices = tuple((s.start, s.stop) for s in spec.storage_slices(ctx))
        arrays = *values, piece.weight.numpy().copy()
        pieces.append(Piece(spec.name, spec.shape, spec.storage_shape, slices, piece.start, piece.stop, arrays))
    biases = {f"layers.{i}.moe.gate.bias": g.bias_E.numpy() for i, g in machine.gates.items() if g.bias_E is not None}
    return RankResult(losses, norms, statistics, pieces, biases, list(machine.parameters), sent)


def trace(
    config: Config, world_size: int, pool: RankPool, *, padded: bool = False, prepare: Prepare | None = None
) -> Trace:
    """Train under a layout and put the logical tensors together.

    Raises:
        RankFailure: a rank raised, died or hung.
    """
    if world_size == 1:
        return assemble([run_rank(0, config, 1, padded, prepare)])
    pool.run(pool.size, make_groups, MeshSizes.of(config.parallel, world_size))
    return assemble(pool.run(world_size, run_rank, config, world_size, padded, prepare))


def assemble(results: list[RankResult]) -> Trace:
    """Logical tensors from the pieces of all ranks; replicas must be the same bits."""
    first, disagreements = results[0], []
    for rank, other in enumerate(results[1:], 1):
        if other.losses != first.losses:
            disagreements.append(f"rank {rank} reports the losses {other.losses}, rank 0 {first.losses}")
        if other.norms != first.norms:
            disagreements.append(f"rank {rank} reports the gradient norms {other.norms}, rank 0 {first.norms}")
    wholes: tuple[dict[str, np.ndarray], ...] = ({}, {}, {})
    shapes = {}
    for piece in (piece for result in results for piece in result.pieces):
        shapes[piece.name] = piece.shape
        numbers = np.arange(np.prod(piece.stored)).reshape(piece.stored)
        positions = numbers[tuple(slice(*s) for s in piece.slices)].ravel()[piece.start : piece.stop]
        for whole, part in zip(wholes, piece.values, strict=True):
            flat = whole.setdefault(piece.name, np.full(piece.stored, np.nan)).reshape(-1)
            known = ~np.isnan(flat[positions])
            if not np.array_equal(flat[positions][known], part[known]):
                disagreements.append(f"replicas of {piece.name} differ")
            flat[positions] = part
    for name, shape in shapes.items():
        for whole in wholes:
            whole[name] = whole[name][tuple(slice(0, n) for n in shape)]
            assert not np.isnan(whole[name]).any(), f"a part of {name} is nowhere, or is not a number"
    order = {name: i for i, name in enumerate(dict.fromkeys(name for result in results for name in result.order))}
    early, late, weights = (dict(sorted(whole.items(), key=lambda item: order[item[0]])) for whole in wholes)
    for result in results:
        weights |= result.biases
    traffic = [result.traffic for result in results]
    disagreements = list(dict.fromkeys(disagreements))
    return Trace(first.losses, first.norms, first.statistics, (early, late), weights, traffic, disagreements)


class Difference(NamedTuple):
    """Something that is not as in one process; ``parameter`` is set for a gradient of the first step."""

    what: str
    error: float
    parameter: str | None = None

    def __str__(self) -> str:
        return f"{self.what}: relative difference {self.error:.3g}"


@dataclass(frozen=True)
class Comparison:
    """All differences above the tolerance, in the order in which a run makes them, and the largest one of all."""

    differences: list[Difference | str]
    largest: float

    @property
    def parameters(self) -> list[Difference]:
        """Parameters whose gradient differs in the first step, in the model's order."""
        return [d for d in self.differences if isinstance(d, Difference) and d.parameter is not None]


def compare(found: Trace, expected: Trace, tolerance: float = TOLERANCE) -> Comparison:
    """Everything of a trace against that of one process, relative to the largest value of each tensor.

    Gradients that are zero but for rounding are measured by the gradient norm instead.
    """
    differences: list[Difference | str] = list(found.disagreements)
    largest = 0.0
    for what, parameter, mine, theirs, floor in _things(found, expected):
        if mine is None or theirs is None or np.shape(mine) != np.shape(theirs):
            shapes = ("nothing" if thing is None else f"shape {np.shape(thing)}" for thing in (mine, theirs))
            differences.append(f"{what}: {' instead of '.join(shapes)}")
            continue
        a, b = np.asarray(mine, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
        error = float(np.abs(a - b).max(initial=0.0)) / max(float(np.abs(b).max(initial=0.0)), floor)
        largest = max(largest, error)
        if not error <= tolerance:
            differences.append(Difference(what, error, parameter))
    return Comparison(differences, largest)


def _things(found: Trace, expected: Trace) -> Iterator[tuple[str, str | None, Any, Any, float]]:
    """(what it is, parameter, mine, theirs, smallest scale) in the order of a run."""
    last, tiny = len(expected.losses) - 1, 1e-30
    for step in range(last + 1):
        suffix = f" of step {step + 1}"
        yield "loss" + suffix, None, found.losses[step], expected.losses[step], tiny
        mine, theirs = found.statistics[step], expected.statistics[step]
        for name in theirs | mine:
            yield name + suffix, None, mine.get(name), theirs.get(name), tiny
        if step in (0, last):
            mine, theirs = (t.gradients[0 if step == 0 else 1] for t in (found, expected))
            for name in theirs | mine:
                parameter, floor = name if step == 0 else None, 1e-5 * expected.norms[step]
                yield f"gradient of {name}" + suffix, parameter, mine.get(name), theirs.get(name), floor
        yield "gradient norm" + suffix, None, found.norms[step], expected.norms[step], tiny
    for name in expected.weights | found.weights:
        yield f"weight {name} at the end", None, found.weights.get(name), expected.weights.get(name), tiny
