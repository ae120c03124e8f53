"""Ranks that hang, drift or die, and worlds that shrink and grow, as the user of the launcher meets them."""

import time
from pathlib import Path

import pytest

import pretrain_moe
from tests.helpers.forked import torchrun
from tests.helpers.running import TINY, losses, tiny_run


def launch(num_ranks: int, save: Path, flags: str, *faults: str, restarts: int = 0) -> tuple[int, str]:
    """Exit status and output of a run under torchrun."""
    argv = f"{TINY} --save {save} {flags}".split()
    return torchrun(num_ranks, argv, *faults, restarts=restarts).wait(timeout=240)


def test_a_rank_that_hangs_is_named_with_its_line(tmp_path: Path) -> None:
    begin = time.monotonic()
    status, said = launch(2, tmp_path, "--distributed-timeout-minutes 0.1", "hang rank=1 iteration=5")
    assert status != 0 and time.monotonic() - begin < 120
    lines = [line for line in said.splitlines() if line.startswith("  rank ")]
    assert any("rank 0 on host" in line and "parallel/collectives.py:" in line for line in lines), said
    assert any("rank 1 on host" in line and "training/loop.py:" in line and " train" in line for line in lines), said


def test_a_bit_that_flips_ends_the_run(tmp_path: Path) -> None:
    flags = "--check-weight-hash-across-dp-replicas-interval 2 --save-interval 1"
    status, said = launch(2, tmp_path, flags, "flip rank=1 iteration=5")
    assert status != 0 and said.count("error: iteration 6: the replicas of ") == 1, said


def test_a_disk_that_fills_up_ends_the_run_and_leaves_what_was_saved(tmp_path: Path) -> None:
    status, said = launch(2, tmp_path, "--async-save --save-interval 4", "full rank=1 iteration=7")
    assert status != 0 and "rank_00001.safetensors: File too large" in said, said
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4\n"


def test_worlds_that_shrink_and_grow_go_on_as_one_process(tmp_path: Path) -> None:
    """A killed rank and torchrun's restart on 4 ranks, then 2, then 3: the curve of one process."""
    flags = "--global-batch-size 12 --elastic --expert-model-parallel-size 2 --save-interval 2"
    tiny_run(tmp_path / "one", "--global-batch-size 12").train()
    save = tmp_path / "elastic"
    status, said = launch(4, save, f"{flags} --exit-interval 6", "kill rank=2 iteration=4", restarts=1)
    assert status == 0 and "--micro-batch-size 1 is implied by --elastic on 4 ranks" in said, said
    assert "loaded" in said, "it was killed and started again"
    status, said = launch(2, save, f"{flags} --exit-interval 12")
    assert status == 0, said
    status, said = launch(3, save, flags)
    assert status == 0 and "--expert-model-parallel-size 1 is implied by --elastic on 3 ranks" in said, said
    expected, found = losses(tmp_path / "one"), losses(save)
    assert sorted(found) == sorted(expected) == list(range(1, 21))
    assert [found[i] for i in found] == pytest.approx([expected[i] for i in found], rel=1e-9)


def test_a_world_that_cannot_share_the_batch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    monkeypatch.setenv("RANK", "0")
    assert pretrain_moe.main(f"{TINY} --save {tmp_path} --global-batch-size 12 --elastic".split()) == 2
    said = capsys.readouterr().err
    assert "--global-batch-size 12 is not a multiple of" in said and "data-parallel size 5" in said
