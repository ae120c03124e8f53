"""Checkpoints against one process: from any layout to any other, the same tensors and the same curve.

A chain of layouts: each loads what the one before it wrote, writes it again, and trains on. All that they
write of iteration 2 must be the same bits; all that they reach at iteration 4 must be what one process
reaches.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_moe.checkpoint import Checkpoint, entries_of, load_checkpoint, save_checkpoint
from megatron_moe.checkpoint import entries as entries_module
from megatron_moe.checkpoint.offline import read_run
from megatron_moe.config import normalise
from megatron_moe.config.schema import Config
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.training.build import Machine, build_machine
from megatron_moe.training.step import train_step
from tests.helpers.ranks import MAX_RANKS, RankPool
from tests.parity import harness
from tests.parity.harness import BASE, GLOBAL_BATCH, TOLERANCE, layout, make_groups, vary

BIASED = vary(BASE, moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
CHAIN = [
    "dp=2,ep=2,zero=1",
    "tp=2,pp=2,ep=2,dp=2",
    "pp=4,schedule=zb-h1",
    "cp=2,dp=2,ep=4,zero=2",
    "tp=4,etp=2,ep=2",
    "dp=4,ep=2,zero=3",
    "pp=2,vpp=2,schedule=interleaved-1f1b,dp=2,zero=1",
    "tp=2,cp=2,dp=2,ep=2,etp=2,zero=2",
    "pp=2,schedule=zb-v,tp=2,zero=1",
    "dp=1",
]


def entries(machine: Machine) -> list[Any]:
    """Everything a run stores of its tensors."""
    state = {id(piece): machine.optimizer.tensors(i) for i, piece in enumerate(machine.pieces)}
    buffers = {f"layers.{i}.moe.gate.bias_E": g.bias_E for i, g in machine.gates.items() if g.bias_E is not None}
    with patch.object(entries_module, "PART_NUMEL", 100):  # so that replicas share the writing of tiny tensors, too
        return entries_of(machine.pieces, lambda piece: state[id(piece)], buffers, machine.ctx)


def go_on(
    rank: int, config: Config, world_size: int, source: str | None, targets: dict[int, str], last: int
) -> list[float]:
    """On one rank: load the latest of ``source``, train to iteration ``last``, save where ``targets`` says."""
    torch.set_num_threads(1)
    config, _ = normalise(config, world_size)
    ctx = ParallelContext.create(MeshSizes.of(config.parallel, world_size), rank=rank, groups=harness._groups)
    machine = build_machine(config, ctx)
    start = 0
    if source is not None:
        with torch.no_grad():
            scalars = load_checkpoint(source, None, entries(machine), ctx)
            for stage in machine.stages.values():
                stage.reducer.gather_weights()
        start, machine.optimizer.num_steps = scalars["iteration"], scalars["iteration"]
    losses = []
    for iteration in range(start, last + 1):
        if iteration > start:
            consumed = (iteration - 1) * GLOBAL_BATCH
            batches = harness.batches(config, consumed, ctx.dp.rank, ctx.dp.size, False)
            losses.append(train_step(machine, batches, iteration, config.optim.lr).loss)
        if iteration in targets:
            with patch("os.fsync"):  # no power fails here, and a disk takes its time
                save_checkpoint(targets[iteration], iteration, entries(machine), {"iteration": iteration}, "", ctx)
    return losses


def run(
    text: str, config: Config, ranks: RankPool, source: Path | None, targets: dict[int, Path], last: int
) -> list[float]:
    """The same under a layout; the losses, equal on all ranks."""
    values, world_size = layout(text)
    config = vary(config, **values)
    arguments = (config, world_size, source and str(source), {i: str(p) for i, p in targets.items()}, last)
    if world_size == 1:
        return go_on(0, *arguments)
    ranks.run(MAX_RANKS, make_groups, MeshSizes.of(config.parallel, world_size))
    results = ranks.run(world_size, go_on, *arguments)
    assert all(result == results[0] for result in results)
    return results[0]


def largest_difference(folder: Path, expected: Path, iteration: int) -> float:
    """Over all tensors, relative to the largest value of each; their names, shapes and types must agree."""
    name = f"iter_{iteration:07d}"
    mine, theirs = Checkpoint(folder / name), Checkpoint(expected / name)
    assert list(mine.names) == list(theirs.names)
    worst = 0.0
    for tensor in mine.names:
        assert mine.describe(tensor) == theirs.describe(tensor)
        a, b = mine.read(tensor).double(), theirs.read(tensor).double()
        worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)))
    return worst


@pytest.mark.parametrize("untie", [False, True], ids=["tied", "untied"])
def test_chain_of_layouts(untie: bool, ranks: RankPool, tmp_path: Path) -> None:
    config = vary(BIASED, untie_embeddings_and_output_weights=untie)
    one = tmp_path / "one"
    reference = run("dp=1,mbs=8", config, ranks, None, {2: one, 4: one}, 4)
    first = tmp_path / "first"
    run("tp=2,pp=2,dp=2,ep=2,zero=1", config, ranks, None, {2: first}, 2)
    assert largest_difference(first, one, 2) < TOLERANCE
    source = first
    for number, text in enumerate(CHAIN if not untie else CHAIN[1:4]):
        again, after = tmp_path / f"again{number}", tmp_path / f"after{number}"
        losses = run(text, config, ranks, source, {2: again, 4: after}, 4)
        assert largest_difference(again, first, 2) == 0.0, text
        assert losses == pytest.approx(reference[2:], rel=TOLERANCE), text
        assert largest_difference(after, one, 4) < TOLERANCE, text
        source = again


def test_resume_is_exact_with_master_weights(ranks: RankPool, tmp_path: Path) -> None:
    """bfloat16 weights, float32 masters, ranges that cut through rows: not a bit differs from the uninterrupted run."""
    config, text = vary(BIASED, params_dtype="bfloat16"), "tp=2,dp=2,ep=2,zero=1"
    whole, part, resumed = tmp_path / "whole", tmp_path / "part", tmp_path / "resumed"
    losses = run(text, config, ranks, None, {4: whole}, 4)
    losses_part = run(text, config, ranks, None, {2: part}, 2)
    assert losses_part + run(text, config, ranks, part, {4: resumed}, 4) == losses
    assert largest_difference(resumed, whole, 4) == 0.0
    stored = Checkpoint(part / "iter_0000002")
    name = "embedding.weight"
    assert stored.describe(f"model.{name}")[1] == torch.bfloat16
    assert stored.describe(f"optimizer.master.{name}")[1] == torch.float32
    assert read_run(part / "iter_0000002")["layout"]["tp"] == 2
