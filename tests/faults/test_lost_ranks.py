"""A rank that never starts, differs, dies or stops: every rank ends within a bound, and the culprit is named."""

import os
import signal
import socket
import time

from tests.helpers.forked import Forked, rank_alone

TINY = (
    "--mock-data --vocab-size 300 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-experts 4 "
    "--seq-length 16 --global-batch-size 8 --train-iters 100000 --eval-interval 0 --peak-tflops 1 "
    "--expert-model-parallel-size 2"
)


def start(port: int, rank: int, *flags: str) -> Forked:
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return rank_alone([*TINY.split(), *flags], env)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_a_rank_that_never_starts() -> None:
    status, said = start(free_port(), 0, "--distributed-timeout-minutes", "0.05").wait(timeout=30)
    assert status == 2
    assert "1/2 clients joined" in said and "Traceback" not in said


def test_ranks_that_differ() -> None:
    port = free_port()
    ranks = [start(port, 0), start(port, 1, "--lr", "0.5")]
    ends = [rank.wait(timeout=60) for rank in ranks]
    assert [status for status, _ in ends] == [2, 2]
    assert "on rank 1" in ends[0][1] and "configuration" in ends[0][1] and ends[1][1] == ""


def test_a_rank_that_stops_is_named() -> None:
    """Stopped, not killed: nobody closes its connections, so only the bounded wait finds it out."""
    port = free_port()
    ranks = [start(port, rank, "--distributed-timeout-minutes", "0.1") for rank in range(2)]
    ranks[0].wait_for(lambda: "iter 20/" in ranks[0].said(), timeout=60)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    begin = time.monotonic()
    status, said = ranks[0].wait(timeout=60)
    assert time.monotonic() - begin < 30
    os.kill(ranks[1].pid, signal.SIGKILL)
    ranks[1].wait(timeout=10)
    assert status == 1
    assert "lost contact with rank 1" in said and "Traceback" not in said
