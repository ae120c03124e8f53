"""Fixtures shared by all tests."""

from collections.abc import Iterator

import pytest

from tests.helpers.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of gloo ranks, living as long as the session."""
    pool = RankPool()
    yield pool
    pool.stop()
