"""Ranks that die: the run ends everywhere, and the same command goes on with not one bit of difference."""

import json
import os
import random
import signal
from pathlib import Path

from tests.helpers.forked import Forked, torchrun

TINY = (
    "--mock-data --vocab-size 300 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-experts 4 "
    "--moe-ffn-hidden-size 32 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 40 --lr 1e-2 "
    "--eval-interval 10 --eval-iters 1 --save-interval 5 --peak-tflops 1 --expert-model-parallel-size 2"
)


def start(save: Path) -> Forked:
    return torchrun(2, [*TINY.split(), "--save", str(save)])


def iterations(save: Path) -> int:
    path = save / "metrics.jsonl"
    return path.read_text().count('"lm_loss"') if path.exists() else 0


def kill_at(save: Path, iteration: int, *, everyone: bool) -> None:
    """Start, wait for an iteration to be reported, and kill -9; the run must end by itself, and not with success."""
    agent = start(save)
    agent.wait_for(lambda: iterations(save) >= iteration, timeout=60)
    ranks = agent.ranks()
    for pid in [*ranks, agent.pid] if everyone else ranks[1:]:
        os.kill(pid, signal.SIGKILL)
    status, said = agent.wait(timeout=60)
    assert len(ranks) == 2 and status != 0, said


def losses(save: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return [(r["iteration"], r.get("lm_loss", r.get("valid_loss", r.get("test_loss")))) for r in records]


def test_killed_and_started_again_gives_the_same_curve(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    status, said = start(whole).wait(timeout=120)
    assert status == 0, said
    moments = sorted(random.sample(range(6, 35), 2))
    print(f"kills at iterations {moments}")  # shown where the test fails
    kill_at(killed, moments[0], everyone=False)
    kill_at(killed, moments[1], everyone=True)
    status, said = start(killed).wait(timeout=120)
    assert status == 0, said
    assert losses(killed) == losses(whole)


def test_sigterm_saves_and_leaves_in_order(tmp_path: Path) -> None:
    agent = start(tmp_path)
    agent.wait_for(lambda: iterations(tmp_path) >= 3, timeout=60)
    for pid in agent.ranks():
        os.kill(pid, signal.SIGTERM)
    status, said = agent.wait(timeout=60)
    assert status == 0, said
    assert "signal SIGTERM" in said
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= saved < 40 and saved == iterations(tmp_path)
