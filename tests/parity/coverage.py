"""What the parity matrix covers, in a table, and the verdict on one of its rows."""

from collections.abc import Collection, Sequence
from typing import Any

from megatron_moe.config.schema import Config
from megatron_moe.training.local_ranks import RankFailure, RankPool
from megatron_moe.training.parity import Trace, compare, trace
from tests.parity.factors import AXES, FACTORS, FEATURES, Row, config_of, ranks_of
from tests.parity.matrix import Pair, all_pairs, pairs_of


class References:
    """Traces of one process, each set of features run once."""

    def __init__(self, pool: RankPool) -> None:
        self.pool, self.num_made = pool, 0
        self._traces: dict[tuple[Config, bool], Trace] = {}

    def of(self, config: Config, padded: bool) -> Trace:
        """The trace of a configuration in one process."""
        key = config, padded
        if key not in self._traces:
            self.num_made += 1
            self._traces[key] = trace(config, 1, self.pool, padded=padded)
        return self._traces[key]


def verdict(row: Row, references: References) -> tuple[list[str], float]:
    """(what differs between a row's layout and one process, the largest relative difference)."""
    config, base, padded = config_of(row)
    try:
        found = trace(config, ranks_of(row), references.pool, padded=padded)
        comparison = compare(found, references.of(base, padded))
    except (RankFailure, AssertionError) as error:
        return str(error).splitlines()[-30:], 0.0
    return [str(difference) for difference in comparison.differences], comparison.largest


def describe(row: Row) -> str:
    """A row in words: what is not as in the first value of each factor."""
    words = [f"{name}={value}" for name, value in row.items() if name in AXES and value != next(iter(AXES[name]))]
    features = [
        f"{name}: {value}" for name, value in row.items() if name in FEATURES and value != next(iter(FEATURES[name]))
    ]
    return f"{' '.join(words)} | {', '.join(features)}"


def subset(rows: Sequence[dict[str, str]], at_least: int = 18) -> list[dict[str, str]]:
    """Few rows that have every value of every factor; between equals, and to fill up, those with most new meetings."""
    missing: set[Any] = {item for row in rows for item in row.items()}
    meetings = [pairs_of(row) for row in rows]
    chosen: list[int] = []
    seen: set[Pair] = set()
    while missing or len(chosen) < at_least:
        left = [i for i in range(len(rows)) if i not in chosen]
        best = max(left, key=lambda i: (len(missing & set(rows[i].items())), len(meetings[i] - seen)))
        chosen.append(best)
        missing -= set(rows[best].items())
        seen |= meetings[best]
    return [rows[i] for i in chosen]


def table(rows: Sequence[Row], impossible: Collection[Pair]) -> str:
    """Pairs met / pairs that can be, for each two factors; and what cannot be."""
    covered = set[Pair]().union(*(pairs_of(row) for row in rows))
    wanted = all_pairs()
    names = list(AXES)
    lines = [f"{len(rows)} layouts of up to {max(map(ranks_of, rows))} ranks; pairs met / possible:", ""]
    lines.append(f"{'':14}" + "".join(f"{name[:10]:>11}" for name in names))
    for name in FACTORS:
        cells = []
        for axis in names:
            pairs = [p for p in wanted if {p[0][0], p[1][0]} == {name, axis}]
            possible = [p for p in pairs if p not in impossible]
            cells.append(f"{sum(p in covered for p in possible)}/{len(possible)}" if pairs else "")
        lines.append(f"{name:14}" + "".join(f"{cell:>11}" for cell in cells))
    met = len(covered & wanted)
    lines += ["", f"{met} of {len(wanted) - len(impossible)} possible pairs met; {len(impossible)} cannot be:"]
    by_factors: dict[tuple[str, str], list[str]] = {}
    for (a, mine), (b, theirs) in sorted(impossible):
        by_factors.setdefault((a, b), []).append(f"{mine} with {theirs}")
    lines += [f"    {a}, {b}: {'; '.join(which)}" for (a, b), which in by_factors.items()]
    return "\n".join(lines) + "\n"
