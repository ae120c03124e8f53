"""What a checkpoint promises: strict, verified, never executed, clear about what is wrong."""

import json
import os
import pickle
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megatron_moe.checkpoint import (
    CheckpointError,
    checkpoint_path,
    find_latest,
    read_config_text,
    saved_iterations,
)
from megatron_moe.checkpoint.checksums import CHECKSUM_FILE, checksum_text, read_checksums, stamp_file
from megatron_moe.checkpoint.index import INDEX_FILE
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from tests.helpers.ranks import MAX_RANKS, RankPool
from tests.parity import harness
from tests.unit.checkpoint.small import entry, load, save, state


def flip(path: Path, position: int) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def seal(folder: Path) -> None:
    """Make the checksums those of the files as they are: what somebody with bad intentions would do."""
    stamps = {name: stamp_file(folder / name) for name in read_checksums(folder)}
    (folder / CHECKSUM_FILE).write_text(checksum_text(stamps))


def test_round_trip_and_choice_of_iteration(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "nowhere") is None
    for iteration in (10, 20, 30):
        path = save(tmp_path, iteration, state(iteration), keep_last=2)
    assert saved_iterations(tmp_path) == [20, 30] and find_latest(tmp_path) == 30
    assert load(tmp_path) == 30.0 and load(tmp_path, 20) == 20.0
    assert read_config_text(tmp_path, 30) == "seed: 1\n"
    stored = safetensors.torch.load_file(path / "rank_00000.safetensors")
    assert torch.equal(stored["model.a@0,0"], state(30.0)["model.a"]), "any reader of safetensors reads the data"
    with pytest.raises(CheckpointError, match=r"no checkpoint of iteration 10\. Iterations there: 20, 30"):
        load(tmp_path, 10)
    save(tmp_path, 15, state(15.0), keep_last=1)
    assert saved_iterations(tmp_path) == [15, 20, 30] and load(tmp_path) == 15.0, "the one just saved is never pruned"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("40")
    with pytest.raises(
        CheckpointError, match=r"names iteration 40, which is not there\. Iterations there: \[15, 20, 30\]"
    ):
        load(tmp_path)


def test_all_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1.0))
    here = state(0.0)
    del here["model.scalar"]
    here["model.new"] = torch.zeros(2)
    here["model.a"] = torch.zeros(4, 7, dtype=torch.float64)
    here["model.b"] = torch.zeros(3)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, 1, here)
    for part in (
        "missing in the checkpoint: model.new\n",
        "left over in the checkpoint: model.scalar\n",
        "model.a: shape [4, 6] in the checkpoint, [4, 7] here\n",
        "model.b: bfloat16 in the checkpoint, float32 here\n",
    ):
        assert part in str(error.value)
    assert all(float(tensor.sum()) == 0.0 for tensor in here.values()), "nothing is touched"
    with pytest.raises(CheckpointError, match="shape"):
        load(tmp_path, 1, here, strict=False)
    relaxed = {name: tensor for name, tensor in here.items() if name == "optimizer.exp_avg.a"}
    assert load(tmp_path, 1, relaxed, strict=False) == 1.0


def test_weights_only(tmp_path: Path) -> None:
    tensors = state(1.0)
    save(tmp_path, 1, {name: tensor for name, tensor in tensors.items() if name.startswith("model")})
    here = state(float("nan"))
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: optimizer\.exp_avg\.a"):
        load(tmp_path, 1, here)
    here["optimizer.exp_avg.a"].fill_(1.0)
    assert load(tmp_path, 1, here, weights_only=True) == 1.0


@pytest.mark.parametrize("file", ["rank_00000.safetensors", INDEX_FILE, "run.json", "config.yaml", CHECKSUM_FILE])
def test_a_flipped_bit_is_found_and_the_way_out_named(file: str, tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        save(tmp_path, iteration, state(iteration))
    for iteration in (2, 3):
        path = checkpoint_path(tmp_path, iteration) / file
        flip(path, path.stat().st_size - 2)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert (file in str(error.value) or file == CHECKSUM_FILE) and "--ckpt-step 1" in str(error.value)


def test_a_truncated_and_a_missing_file_are_named(tmp_path: Path) -> None:
    data = save(tmp_path, 1, state(1.0)) / "rank_00000.safetensors"
    data.write_bytes(data.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is damaged: \d+ bytes instead of"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is damaged: it ends before"):
        load(tmp_path, verify=False)
    data.unlink()
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors: No such file"):
        load(tmp_path)


class Malicious:
    """A pickle that, loaded, leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("file", ["rank_00000.safetensors", INDEX_FILE, "run.json", CHECKSUM_FILE, ".metadata"])
def test_nothing_in_a_file_is_executed(file: str, tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "run"
    path = save(folder, 1, state(1.0))
    (path / file).write_bytes(pickle.dumps(Malicious(trace)))
    if file != CHECKSUM_FILE:
        seal(path)
    if file == ".metadata":  # where torch's own format keeps a pickle
        assert load(folder) == 1.0
    else:
        with pytest.raises(CheckpointError):
            load(folder)
    assert not trace.exists()
    pickle.loads((path / file).read_bytes())
    assert trace.exists(), "the pickle is harmless, so the test proves nothing"


@pytest.mark.parametrize("change", ["../secret", "/etc/passwd", 7])
def test_an_index_cannot_lead_elsewhere(change: object, tmp_path: Path) -> None:
    path = save(tmp_path, 1, state(1.0))
    index = json.loads((path / INDEX_FILE).read_text())
    index["tensors"]["model.a"]["chunks"][0]["file"] = change
    (path / INDEX_FILE).write_text(json.dumps(index))
    seal(path)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        load(tmp_path)


@contextmanager
def without_privileges() -> Iterator[None]:
    """As an ordinary user: root writes anywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        with without_privileges(), pytest.raises(CheckpointError, match=rf"cannot write {name}: Permission denied"):
            save(Path(name), 1, state(1.0))
        os.chmod(name, 0o755)


def test_a_save_that_does_not_fit_on_disk_leaves_the_old_one(tmp_path: Path) -> None:
    save(tmp_path, 1, state(1.0))
    with small_files(100), pytest.raises(CheckpointError, match=r"cannot write .*: File too large\. Nothing that was"):
        save(tmp_path, 2, state(2.0))
    assert load(tmp_path) == 1.0
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", "latest_checkpointed_iteration.txt"], "space is given back"


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """No file may grow beyond so many bytes; the system refuses to write as it does when a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def one_rank_fails(rank: int, folder: str, fails: str) -> str:
    """Two ranks save; one of them cannot. The message of the error."""
    from megatron_moe.checkpoint import load_checkpoint, save_checkpoint

    ctx = ParallelContext.create(MeshSizes(dp=2), rank=rank, groups=harness._groups)
    mine = [entry(f"model.{rank}", torch.full((1000,), float(rank)))]
    save_checkpoint(folder, 1, mine, {}, "", ctx)
    mine[0].held[0].tensor.zero_()
    try:
        if fails == "save" and rank == 1:
            with small_files(100):
                save_checkpoint(folder, 2, mine, {}, "", ctx)
        elif fails == "save":
            save_checkpoint(folder, 2, mine, {}, "", ctx)
        else:
            wrong = [entry("model.wrong", torch.zeros(3))] if rank == 1 else mine
            load_checkpoint(folder, 1, wrong, ctx)
    except CheckpointError as error:
        load_checkpoint(folder, None, mine, ctx)
        assert float(mine[0].held[0].tensor.sum()) == 1000.0 * rank
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("fails", ["save", "load"])
def test_what_one_rank_meets_all_ranks_raise(fails: str, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(MAX_RANKS, harness.make_groups, MeshSizes(dp=2))
    first, second = ranks.run(2, one_rank_fails, str(tmp_path), fails)
    assert first == second
    if fails == "save":
        assert "rank_00001.safetensors: File too large" in first
    else:
        assert "missing in the checkpoint: model.wrong" in first and "left over in the checkpoint: model.1" in first
