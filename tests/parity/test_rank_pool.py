"""The pool of ranks itself: a rank that hangs or raises fails its test with the story of every rank."""

import time

import pytest

from tests.helpers.ranks import RankFailure, RankPool


def sleeper(rank: int, seconds: float) -> int:
    time.sleep(seconds if rank == 1 else 0.0)
    if seconds < 0:
        raise ValueError("a negative rest")
    return rank


def test_a_hanging_rank_is_shown_with_its_stack_and_the_pool_lives_again() -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(RankFailure) as failure:
            pool.run(2, sleeper, 60.0, timeout=1.0)
        said = str(failure.value)
        assert "rank 0 done" in said and "rank 1 did not answer" in said and "in sleeper" in said
        assert pool.run(2, sleeper, 0.0) == [0, 1]
        with pytest.raises(RankFailure, match="a negative rest"):
            pool.run(2, sleeper, -1.0)
    finally:
        pool.stop()
