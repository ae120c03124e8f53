"""A rank that never starts, differs, dies or stops: every rank ends within a bound, and the culprit is named."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = (
    "--mock-data --vocab-size 300 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-experts 4 "
    "--seq-length 16 --global-batch-size 8 --train-iters 100000 --eval-interval 0 --peak-tflops 1 "
    "--expert-model-parallel-size 2"
)


def start(port: int, rank: int, *flags: str) -> subprocess.Popen[str]:
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.Popen(
        [sys.executable, "pretrain_moe.py", *TINY.split(), *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in env.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_rank_that_never_starts() -> None:
    alone = start(free_port(), 0, "--distributed-timeout-minutes", "0.05")
    _, said = alone.communicate(timeout=30)
    assert alone.returncode == 2
    assert "1/2 clients joined" in said and "Traceback" not in said


def test_ranks_that_differ() -> None:
    port = free_port()
    ranks = [start(port, 0), start(port, 1, "--lr", "0.5")]
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert "on rank 1" in said[0] and "configuration" in said[0] and said[1] == ""


def test_a_rank_that_stops_is_named() -> None:
    """Stopped, not killed: nobody closes its connections, so only the bounded wait finds it out."""
    port = free_port()
    ranks = [start(port, rank, "--distributed-timeout-minutes", "0.1") for rank in range(2)]
    assert ranks[0].stdout is not None
    while "iter 20" not in ranks[0].stdout.readline():
        assert ranks[0].poll() is None
    os.kill(ranks[1].pid, signal.SIGSTOP)
    begin = time.monotonic()
    _, said = ranks[0].communicate(timeout=60)
    assert time.monotonic() - begin < 30
    os.kill(ranks[1].pid, signal.SIGKILL)
    ranks[1].communicate()
    assert ranks[0].returncode == 1
    assert "lost contact with rank 1" in said and "Traceback" not in said
