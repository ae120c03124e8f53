"""When a run saves, what it keeps, and what it resumes from."""

import time
from pathlib import Path

import pytest

from megatron_moe.checkpoint import checkpoint_path, saved_iterations
from megatron_moe.training import signals
from megatron_moe.training.records import read_records
from tests.helpers.running import losses, tiny_run
from tests.unit.checkpoint.test_save_and_load import flip


def test_damage_is_named_and_recovered_from_if_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run(tmp_path, "--save-interval 5").train()
    whole = losses(tmp_path)
    for iteration in (15, 20):
        flip(checkpoint_path(tmp_path, iteration) / "rank_00000.safetensors", -1)
    with pytest.raises(SystemExit):
        tiny_run(tmp_path)
    said = capsys.readouterr().err
    assert "iter_0000020 cannot be trusted" in said and "iteration 10: load it with --ckpt-step 10" in said
    assert "--auto-recover" in said
    run = tiny_run(tmp_path, "--save-interval 5 --auto-recover")
    assert run.position.iteration == 10
    assert "--auto-recover: going on from iteration 10." in capsys.readouterr().err
    run.train()
    assert losses(tmp_path) == whole and tiny_run(tmp_path).position.iteration == 20


def test_a_name_of_the_latest_that_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run(tmp_path, "--save-interval 10").train()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3x")
    with pytest.raises(SystemExit):
        tiny_run(tmp_path)
    assert "holds '3x' instead of an iteration" in capsys.readouterr().err
    assert tiny_run(tmp_path, "--auto-recover").position.iteration == 20


def test_in_the_background_it_is_the_same_run(tmp_path: Path) -> None:
    keep = "--save-interval 3 --keep-last 2 --save-retain-interval 6"
    tiny_run(tmp_path / "a", keep).train()
    run = tiny_run(tmp_path / "b", f"{keep} --async-save --exit-interval 10")
    run.train()
    assert saved_iterations(tmp_path / "b") == [6, 9, 10], "the end of the run waits for the last save"
    tiny_run(tmp_path / "b", f"{keep.replace('save-retain-interval', 'keep-every')} --async-save").train()
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert saved_iterations(tmp_path / "a") == saved_iterations(tmp_path / "b") == [6, 12, 18, 20]
    stalls = {r["iteration"] for r in read_records(tmp_path / "a" / "metrics.jsonl") if "save_stall_seconds" in r}
    assert stalls == {4, 7, 10, 13, 16, 19}, "the record after a save"


def test_what_is_retained_without_a_number_of_newest(tmp_path: Path) -> None:
    tiny_run(tmp_path, "--save-interval 2 --save-retain-interval 4 --train-iters 7").train()
    assert saved_iterations(tmp_path) == [4, 7], "Megatron's meaning: multiples, and the last"


def test_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path, "--save-interval-minutes 1")
    real, begin = time.monotonic, time.monotonic()

    class Clock:
        """Twelve seconds an iteration."""

        @staticmethod
        def monotonic() -> float:
            return begin + (real() - begin) / 1e6 + 12.001 * run.position.iteration

    monkeypatch.setattr(signals, "time", Clock)
    run.train()
    assert saved_iterations(tmp_path) == [5, 10, 15, 20]
