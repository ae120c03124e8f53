"""A part of the parity matrix that has every value of every factor; all of it: ``python -m tests.parity matrix``."""

import pytest

from tests.helpers.ranks import RankPool
from tests.parity.coverage import References, describe, subset, table, verdict
from tests.parity.factors import FACTORS, ranks_of
from tests.parity.matrix import all_pairs, pairs_of, problems, rows

ROWS, IMPOSSIBLE = rows()
SUBSET = subset(ROWS)


@pytest.fixture(scope="module")
def references(ranks: RankPool) -> References:
    return References(ranks)


@pytest.mark.parametrize("number", range(len(SUBSET)))
def test_layout_is_not_part_of_the_mathematics(number: int, references: References) -> None:
    differences, _ = verdict(SUBSET[number], references)
    assert differences == [], describe(SUBSET[number])


def test_matrix_covers_what_it_promises() -> None:
    assert len(ROWS) >= 40
    assert max(map(ranks_of, ROWS)) == 8
    covered = set().union(*(pairs_of(row) for row in ROWS))
    assert all_pairs() - IMPOSSIBLE <= covered
    assert not IMPOSSIBLE & covered
    assert [problem for row in ROWS for problem in problems(row)] == []
    values = {(name, value) for name, values in FACTORS.items() for value in values}
    assert values == {item for row in SUBSET for item in row.items()}
    assert f"{len(ROWS)} layouts" in table(ROWS, IMPOSSIBLE)
