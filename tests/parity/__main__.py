"""Check layouts by hand: ``python -m tests.parity [field=value ...] -- tp=2,ep=2 pp=2,mbs=1 ...``."""

import sys
import time

import yaml

from tests.helpers.ranks import RankPool
from tests.parity.harness import BASE, differences, layout, trace, vary


def main(arguments: list[str]) -> int:
    """Print equal, or what differs, for each layout."""
    border = arguments.index("--")
    values = {k: yaml.safe_load(v) for k, v in (a.split("=", 1) for a in arguments[:border])}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    padded = bool(values.pop("padded", False))
    base, pool, failed = vary(BASE, **values), RankPool(), False
    reference = trace(base, 1, pool, padded=padded)
    print(f"one process: losses {reference.losses}, {reference.balance[-1]}")
    for text in arguments[border + 1 :]:
        fields, world_size = layout(text)
        start = time.monotonic()
        found = differences(trace(vary(base, **fields), world_size, pool, padded=padded), reference)
        failed |= bool(found)
        print(f"{text}: {'differs' if found else 'equal'} ({time.monotonic() - start:.1f} s)", *found[:10], sep="\n    ")
    pool.stop()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
