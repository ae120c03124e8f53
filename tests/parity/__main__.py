"""Check layouts by hand.

python -m tests.parity matrix [first:last]                         the whole matrix, or some of its rows
python -m tests.parity dry_run [layout ...]                        plans against real runs of the quickstart's model
python -m tests.parity [field=value ...] -- tp=2,ep=2 pp=2 ...     layouts of your choice
python -m tests.parity.checkpoints [--size 12]                     every layout's checkpoint into every other
"""

import sys
import time

import yaml

from tests.helpers.ranks import RankPool
from tests.parity import coverage, dry_runs, matrix
from tests.parity.harness import BASE, differences, layout, trace, vary


def some_layouts(arguments: list[str], pool: RankPool) -> int:
    """Print equal, or what differs, for each layout; the number of those that differ."""
    border = arguments.index("--")
    values = {k: yaml.safe_load(v) for k, v in (a.split("=", 1) for a in arguments[:border])}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    padded = bool(values.pop("padded", False))
    base, failed = vary(BASE, **values), 0
    reference = trace(base, 1, pool, padded=padded)
    print(f"one process: losses {reference.losses}, {reference.statistics[-1]}")
    for text in arguments[border + 1 :]:
        fields, world_size = layout(text)
        start = time.monotonic()
        found = differences(trace(vary(base, **fields), world_size, pool, padded=padded), reference)
        failed += bool(found)
        verdict = f"{'differs' if found else 'equal'} ({time.monotonic() - start:.1f} s)"
        print(f"{text}: {verdict}", *found[:10], sep="\n    ")
    return failed


def whole_matrix(arguments: list[str], pool: RankPool) -> int:
    """Print the coverage and the verdict on each row; the number of those that differ."""
    rows, impossible = matrix.rows()
    first, last = (int(n) if n else None for n in arguments[0].split(":")) if arguments else (None, None)
    print(coverage.table(rows, impossible), flush=True)
    references, failed = coverage.References(pool), 0
    start, largest = time.monotonic(), 0.0
    for number, row in list(enumerate(rows))[first:last]:
        began = time.monotonic()
        problems, error = coverage.verdict(row, references)
        failed += bool(problems)
        largest = largest if problems else max(largest, error)
        words = "differs" if problems else f"equal to {error:.1e}"
        print(f"{number:3d}  {words}  ({time.monotonic() - began:.1f} s)  {coverage.describe(row)}", flush=True)
        for problem in problems[:8]:
            print(f"       {problem}", flush=True)
    print(
        f"{failed} rows differ; largest relative difference of the others: {largest:.2e}; "
        f"{time.monotonic() - start:.0f} s, {references.num_made} runs in one process"
    )
    return failed


def dry_runs_of(layouts: list[str], pool: RankPool) -> int:
    """Print equal, or what a plan and a real run do not agree on, for each layout; the number of those that differ."""
    failed = 0
    for text in layouts or dry_runs.LAYOUTS:
        start = time.monotonic()
        found = dry_runs.differences(*dry_runs.quickstart(text), pool)
        failed += bool(found)
        print(f"{text}: {'differs' if found else 'equal'} ({time.monotonic() - start:.1f} s)", *found, sep="\n    ")
    return failed


def main(arguments: list[str]) -> int:
    """Exit status 1 on any difference, 2 for a command that cannot be read."""
    if "--" not in arguments and arguments[:1] not in (["matrix"], ["dry_run"]):
        print(__doc__, file=sys.stderr)
        return 2
    pool = RankPool()
    try:
        named = {"matrix": whole_matrix, "dry_run": dry_runs_of}.get(arguments[0])
        return int(bool(named(arguments[1:], pool) if named else some_layouts(arguments, pool)))
    finally:
        pool.stop()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
