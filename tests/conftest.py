"""Fixtures shared by all tests."""

import os
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton, which looks once

from tests.helpers.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of gloo ranks, living as long as the session."""
    pool = RankPool()
    yield pool
    pool.stop()
