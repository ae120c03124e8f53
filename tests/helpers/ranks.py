"""The pool of ranks that all distributed tests share (``tests/conftest.py``): eight, the largest layout tested."""

from megatron_moe.training.local_ranks import RankFailure, RankPool

MAX_RANKS = 8

__all__ = ["MAX_RANKS", "RankFailure", "RankPool"]
