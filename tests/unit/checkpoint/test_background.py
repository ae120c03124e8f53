"""Saving in the background: what is stored, what waits, and that no failure is lost."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_moe.checkpoint import BackgroundWriter, CheckpointError, background, saved_iterations
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from tests.helpers.ranks import MAX_RANKS, RankPool
from tests.parity import harness
from tests.unit.checkpoint.small import ALONE, entry, load, state
from tests.unit.checkpoint.test_save_and_load import small_files


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writers wait for it."""
    event, real = threading.Event(), background.save_checkpoint

    def waiting(*arguments: object) -> Path:
        event.wait()
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(background, "save_checkpoint", waiting)
    return event


def save(writer: BackgroundWriter, folder: Path, iteration: int, tensors: dict[str, torch.Tensor]) -> None:
    writer.save(folder, iteration, [entry(n, t) for n, t in tensors.items()], {"seen": iteration}, "seed: 1\n", 2)


def test_what_is_stored_is_of_the_moment_of_the_save(gate: threading.Event, tmp_path: Path) -> None:
    writer, tensors = BackgroundWriter(ALONE, None), state(1.0)
    save(writer, tmp_path, 1, tensors)
    for tensor in tensors.values():
        tensor.fill_(2.0)
    assert saved_iterations(tmp_path) == []
    second = threading.Thread(target=save, args=(writer, tmp_path, 2, tensors))
    second.start()
    second.join(0.1)
    assert second.is_alive(), "a second save waits for the first"
    gate.set()
    second.join()
    writer.wait()
    assert (load(tmp_path, 1), load(tmp_path, 2), saved_iterations(tmp_path)) == (1.0, 2.0, [1, 2])


def test_a_failure_is_kept_until_it_is_asked_for_and_raised_once(tmp_path: Path) -> None:
    writer = BackgroundWriter(ALONE, None)
    save(writer, tmp_path, 1, state(1.0))
    writer.wait()
    with small_files(100):
        save(writer, tmp_path, 2, state(2.0))
        while not writer.failed:
            threading.Event().wait(0.01)
    with pytest.raises(CheckpointError, match="File too large"):
        save(writer, tmp_path, 3, state(3.0))
    assert saved_iterations(tmp_path) == [1] and not writer.failed
    writer.wait()
    save(writer, tmp_path, 3, state(3.0))
    writer.wait()
    assert load(tmp_path) == 3.0


_writers: dict[str, dist.ProcessGroup | None] = {}


def join(rank: int) -> None:
    """On every rank of the pool: the group of the writers of ranks 0 and 1."""
    group = dist.new_group([0, 1], backend="gloo")
    _writers["group"] = group if rank < 2 else None  # type: ignore[assignment]


def write_while_training(rank: int, folder: str, fails: bool) -> str:
    """Two ranks save in the background while they go on sending each other messages; one of them may fail."""
    ctx = ParallelContext.create(MeshSizes(dp=2), rank=rank, groups=harness._groups)
    writer, tensor = BackgroundWriter(ctx, _writers["group"]), torch.full((2000,), float(rank))
    for iteration in (1, 2):
        try:
            if fails and iteration == 2 and rank == 1:
                with small_files(100):
                    writer.save(folder, iteration, [entry(f"model.{rank}", tensor)], {}, "")
                    writer._thread.join()  # type: ignore[union-attr]
            else:
                writer.save(folder, iteration, [entry(f"model.{rank}", tensor)], {}, "")
            for step in range(200):
                total = torch.tensor(float(step + rank))
                dist.all_reduce(total, group=ctx.world.group)
                assert total == 2 * step + 1
            writer.wait()
        except CheckpointError as error:
            return str(error)
    return "whole"


def test_writers_agree_beside_training(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(MAX_RANKS, harness.make_groups, MeshSizes(dp=2))
    ranks.run(MAX_RANKS, join)
    assert ranks.run(2, write_while_training, str(tmp_path / "a"), False) == ["whole", "whole"]
    assert saved_iterations(tmp_path / "a") == [1, 2]
    first, second = ranks.run(2, write_while_training, str(tmp_path / "b"), True)
    assert first == second and "rank_00001.safetensors: File too large" in first
    assert saved_iterations(tmp_path / "b") == [1]
