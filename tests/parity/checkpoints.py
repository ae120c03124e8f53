"""The matrix of checkpoints: ``python -m tests.parity.checkpoints [--size 12]``.

Layouts are chosen so that every value of every axis (tp, cp, pp and its schedule, dp, ep, etp, ZeRO) meets every value
of every other, as far as eight ranks allow. Each saves once, at iteration 2; then each loads what each saved:

    saved by    loaded by every layout: written again at once -> the same bits, tensor by tensor
                and trained for 3 further iterations in float64 -> losses and tensors of one process to 1e-9
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_moe.config import check, normalise
from megatron_moe.training import registries
from tests.helpers.ranks import MAX_RANKS, RankPool
from tests.parity.harness import TOLERANCE, layout, vary
from tests.parity.test_checkpoint_layouts import BIASED, largest_difference, run

AXES: dict[str, tuple[str, ...]] = {
    "tp": ("1", "2", "4"),
    "cp": ("1", "2"),
    "pp": ("pp=1", "pp=2", "pp=4,schedule=zb-h1", "pp=2,vpp=2,schedule=interleaved-1f1b", "pp=2,schedule=zb-v"),
    "dp": ("1", "2", "4", "8"),
    "ep": ("1", "2", "4", "8"),
    "etp": ("1", "2"),
    "zero": ("0", "1", "2", "3"),
}
Values = tuple[str, ...]


def text_of(values: Values) -> str:
    """As :func:`layout` reads it."""
    named = dict(zip(AXES, values, strict=True))
    pipeline = named.pop("pp")
    return ",".join([pipeline, *(f"{axis}={value}" for axis, value in named.items())])


def allowed() -> Iterator[Values]:
    """Every combination that fits eight ranks and passes the configuration's own checks."""
    for values in itertools.product(*AXES.values()):
        fields, world_size = layout(text_of(values))
        if world_size > MAX_RANKS:
            continue
        config, _ = normalise(vary(BIASED, **fields), world_size)
        if not check(config, world_size, registries.CHOICES, registries.RULES):
            yield values


def pairs(values: Values) -> set[tuple[int, str, int, str]]:
    """Which values meet in a layout."""
    return {(i, values[i], j, values[j]) for i, j in itertools.combinations(range(len(values)), 2)}


def chosen(size: int) -> list[str]:
    """At least so many layouts, greedily: each the one with most pairs that have not met, until all have that can."""
    candidates = list(allowed())
    missing = set().union(*map(pairs, candidates))
    found: list[Values] = []
    while missing or len(found) < size:
        best = max((c for c in candidates if c not in found), key=lambda c: len(pairs(c) & missing))
        if len(found) >= size and not pairs(best) & missing:
            break
        found.append(best)
        missing -= pairs(best)
    return [text_of(values) for values in found]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=12, help="layouts, at least (default 12); more until all pairs met")
    parser.add_argument("--at-most", type=int, help="cut the list after so many")
    arguments = parser.parse_args(argv)
    layouts = chosen(arguments.size)[: arguments.at_most]
    pool, failures, begin = RankPool(MAX_RANKS), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, one = Path(name), Path(name) / "one"
        reference = run("dp=1,mbs=8", BIASED, pool, None, {2: one, 5: one}, 5)
        sources = {}
        for number, text in enumerate(layouts):
            sources[text] = folder / f"source{number}"
            run(text, BIASED, pool, None, {2: sources[text]}, 2)
        print(f"{len(layouts)} layouts have saved, {time.monotonic() - begin:.0f} s", flush=True)
        for target in layouts:
            worst, start = 0.0, time.monotonic()
            for number, (text, source) in enumerate(sources.items()):
                again = folder / "again" / f"{number}"
                losses = run(target, BIASED, pool, source, {2: again, 5: again}, 5)
                bits = largest_difference(again, source, 2)
                curve = max(abs(a / b - 1) for a, b in zip(losses, reference[2:], strict=True))
                tensors = largest_difference(again, one, 5)
                worst = max(worst, curve, tensors)
                if bits or curve > TOLERANCE or tensors > TOLERANCE:
                    failures += 1
                    print(f"{text} -> {target}: bits {bits:.3g}, losses {curve:.3g}, tensors {tensors:.3g}", flush=True)
            print(f"{target}: from {len(sources)}, {worst:.1e}, {time.monotonic() - start:.0f} s", flush=True)
    pool.stop()
    seconds = time.monotonic() - begin
    print(f"{len(layouts)} x {len(layouts)} layouts, {failures} that differ, {seconds:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
