"""Layouts against one process."""

import pytest

from tests.helpers.ranks import RankPool
from tests.parity.harness import BASE, Trace, differences, layout, trace, vary


@pytest.fixture(scope="module")
def reference(ranks: RankPool) -> Trace:
    return trace(BASE, 1, ranks)


@pytest.mark.parametrize("text", ["dp=1,mbs=2", "dp=2", "dp=2,ep=2", "dp=4,ep=2", "dp=4,ep=2,mbs=2"])
def test_layout(text: str, reference: Trace, ranks: RankPool) -> None:
    values, world_size = layout(text)
    assert differences(trace(vary(BASE, **values), world_size, ranks), reference) == []
