"""A save that is killed, at every single step, leaves a checkpoint that loads."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_moe.checkpoint import checkpoint_path, find_latest, saved_iterations
from megatron_moe.checkpoint.checksums import damage
from megatron_moe.checkpoint.folder import LATEST_FILE
from tests.unit.checkpoint.small import load, save, state

STEPS = ("replace", "fsync", "mkdir", "unlink", "rmdir", "open")
KILLED = 77


def save_and_die(step: int, action: Callable[[], Any]) -> bool:
    """Do it in a child that dies, without any clean-up, before its ``step``-th call of the system; whether it did."""
    child = os.fork()
    if child == 0:
        calls = 0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> Any:
                nonlocal calls
                if calls == step:
                    os._exit(KILLED)
                calls += 1
                return call(*arguments, **named)

            return run

        for name in STEPS:
            setattr(os, name, counted(getattr(os, name)))
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


@pytest.mark.parametrize("iteration", [10, 20], ids=["the same again", "the next"])
def test_kill_at_every_step(iteration: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    step, outcomes = 0, set()
    while True:
        folder = tmp_path / str(step)
        save(folder, 5, state(0.5))
        save(folder, 10, state(1.0))
        killed = save_and_die(step, lambda folder=folder: save(folder, iteration, state(2.0), keep_last=2))
        value = load(folder)
        assert value in (1.0, 2.0), "what loads is the old checkpoint or the new one, whole"
        assert not any(damage(checkpoint_path(folder, i)) for i in saved_iterations(folder)), (
            "all others are whole, too"
        )
        outcomes.add((value, killed))
        save(folder, 30, state(3.0))
        assert load(folder) == 3.0
        left = {path.name for path in folder.iterdir()} - {f"iter_{i:07d}" for i in saved_iterations(folder)}
        assert left == {LATEST_FILE}, "the next save tidies up"
        if not killed:
            break
        step += 1
    assert step > 15, "the system's calls are not counted"
    assert {(1.0, True), (2.0, True), (2.0, False)} <= outcomes


def test_kill_during_the_first_save(tmp_path: Path) -> None:
    step, folder = 0, tmp_path / "0"
    while save_and_die(step, lambda folder=folder: save(folder, 10, state(2.0))):
        assert find_latest(folder) is None or load(folder) == 2.0
        step += 1
        folder = tmp_path / str(step)
    assert step > 10
