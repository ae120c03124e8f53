"""Ranks that die: the run ends everywhere, and the same command goes on with not one bit of difference."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = (
    "--mock-data --vocab-size 300 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-experts 4 "
    "--moe-ffn-hidden-size 32 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 --train-iters 40 --lr 1e-2 "
    "--eval-interval 10 --eval-iters 1 --save-interval 5 --peak-tflops 1 --expert-model-parallel-size 2"
)


def start(save: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*command, "pretrain_moe.py", *TINY.split(), "--save", str(save), *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def iterations(save: Path) -> int:
    path = save / "metrics.jsonl"
    return path.read_text().count('"lm_loss"') if path.exists() else 0


def ranks_of(agent: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return [pid for pid in map(int, children) if b"pretrain_moe.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def kill_at(save: Path, iteration: int, *, everyone: bool) -> None:
    """Start, wait for an iteration to be reported, and kill -9; the run must end by itself, and not with success."""
    agent = start(save)
    deadline = time.monotonic() + 60
    while iterations(save) < iteration:
        assert agent.poll() is None and time.monotonic() < deadline, agent.communicate()[0]
        time.sleep(0.002)
    ranks = ranks_of(agent)
    for pid in [*ranks, agent.pid] if everyone else ranks[1:]:
        os.kill(pid, signal.SIGKILL)
    said = agent.communicate(timeout=30)[0]
    assert agent.returncode != 0, said


def losses(save: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return [(r["iteration"], r.get("lm_loss", r.get("valid_loss", r.get("test_loss")))) for r in records]


def test_killed_and_started_again_gives_the_same_curve(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    uninterrupted = start(whole)
    said = uninterrupted.communicate(timeout=120)[0]
    assert uninterrupted.returncode == 0, said
    moments = sorted(random.sample(range(6, 35), 2))
    print(f"kills at iterations {moments}")  # shown where the test fails
    kill_at(killed, moments[0], everyone=False)
    kill_at(killed, moments[1], everyone=True)
    last = start(killed)
    said = last.communicate(timeout=120)[0]
    assert last.returncode == 0, said
    assert losses(killed) == losses(whole)


def test_sigterm_saves_and_leaves_in_order(tmp_path: Path) -> None:
    agent = start(tmp_path)
    deadline = time.monotonic() + 60
    while iterations(tmp_path) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    for pid in ranks_of(agent):
        os.kill(pid, signal.SIGTERM)
    said = agent.communicate(timeout=30)[0]
    assert agent.returncode == 0, said
    assert "signal SIGTERM" in said
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= saved < 40 and saved == iterations(tmp_path)
