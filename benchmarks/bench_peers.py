"""bench-small in this project, Megatron-Core, transformers and DeepSpeed, turn by turn on one machine: who is faster.

    python benchmarks/bench_peers.py --megatron-core A/bin/python --transformers B/bin/python --deepspeed C/bin/python

    case   processes x threads   layout
    one    1 x 2                 -
    ep     2 x 1                 experts over both, data parallel
    tp     2 x 1                 tensor and sequence parallel
    pp     2 x 1                 two stages, 4 micro-batches a step

Every peer runs under the Python of its own environment (README.md says how to make one). All runs of a round follow
one another, then comes the next round: a machine that drifts hits all alike. Figures are medians over the rounds; the
share is of the fastest products seen in any run, since other people's work can only slow a product down.
Prints a table in Markdown and one line of JSON.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from measure import machine, markdown
from small import FLOPS_PER_TOKEN

HERE = Path(__file__).parent
OURS = "megatron_moe"
PEERS = ("megatron-core", "transformers", "deepspeed")
# glibc.malloc: what training/memory.py asks for, for programs that do not ask themselves.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0",
}


class Entry(NamedTuple):
    """A framework's run of a case: ``python -m module *flags`` in its environment."""

    framework: str
    module: str
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As the table shows it before a run has told its version."""
        return " ".join([self.framework, *self.flags[1:2]]) if self.framework == "transformers" else self.framework


def _pair(axis: str, flags: tuple[str, ...], *more: str) -> list[Entry]:
    """This project with ``flags`` and Megatron-Core with ``--axis 2``."""
    return [
        Entry(OURS, "bench_step", (*flags, *more)),
        Entry("megatron-core", "peers.megatron_core", (f"--{axis}", "2", *more)),
    ]


CASES: dict[str, list[Entry]] = {
    "one": [
        Entry(OURS, "bench_step"),
        Entry("megatron-core", "peers.megatron_core"),
        Entry("transformers", "peers.transformers_mixtral", ("--experts", "eager")),
        Entry("transformers", "peers.transformers_mixtral", ("--experts", "grouped_mm")),
        Entry("deepspeed", "peers.deepspeed_moe"),
    ],
    "ep": [
        *_pair("ep", ("--expert-model-parallel-size", "2")),
        Entry("deepspeed", "peers.deepspeed_moe", ("--ep", "2")),
    ],
    "tp": _pair("tp", ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "pp": _pair("pp", ("--pipeline-model-parallel-size", "2"), "--micro-batches", "4"),
}


class Failure(NamedTuple):
    """Why a run has no figures."""

    reason: str


Outcome = dict[str, Any] | Failure


def last_error(text: str) -> str:
    """The last line that names an error; torchrun's own report of it says nothing; else the last line."""
    lines = [re.sub(r"^\[rank\d+\]:\s*", "", line).strip() for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line) and "ChildFailed" not in line]
    return ([line for line in lines if line] + errors or ["no output"])[-1][:200]


def run(entry: Entry, python: str, processes: int, options: argparse.Namespace) -> Outcome:
    """Start one run in its environment and read its line of JSON."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    budget = ["--steps", str(options.steps), "--most-seconds", str(options.most_seconds)]
    command = [python, "-m", *(launcher if processes > 1 else []), entry.module, *entry.flags, *budget]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = str(2 // processes)
    if entry.framework == OURS:
        environment["PYTHONPATH"] = str(HERE.parent)
    elif options.peers_keep_memory:
        environment |= KEEP_MEMORY
    return finish(command, environment, options.timeout)


def finish(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Outcome:
    """Run a command to its end or its ``timeout``, with all processes that it starts."""
    try:
        process = subprocess.Popen(
            command, cwd=HERE, env=environment, stdout=-1, stderr=-1, text=True, start_new_session=True
        )
    except OSError as error:
        return Failure(str(error))
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return Failure(f"not done after {timeout:g} s")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = [line for line in output.splitlines() if line.startswith('{"what"')]
    if process.returncode or not found:
        return Failure(last_error(errors or output))
    return json.loads(found[-1])


def rounds(pythons: Mapping[str, str], options: argparse.Namespace) -> dict[tuple[str, Entry], list[Outcome]]:
    """All outcomes; what failed once is not tried again."""
    outcomes: dict[tuple[str, Entry], list[Outcome]] = defaultdict(list)
    for number in range(options.rounds):
        for case in options.cases:
            for entry in CASES[case]:
                so_far = outcomes[case, entry]
                if entry.framework not in pythons or (so_far and isinstance(so_far[-1], Failure)):
                    continue
                outcome = run(entry, pythons[entry.framework], 1 if case == "one" else 2, options)
                so_far.append(outcome)
                said = outcome.reason if isinstance(outcome, Failure) else f"{outcome['tokens_per_second']} tokens/s"
                print(f"round {number + 1}, {case}, {entry.name}: {said}", file=sys.stderr, flush=True)
    return {key: found for key, found in outcomes.items() if found}


def summary(case: str, outcomes: Mapping[Entry, list[Outcome]], limit: float) -> list[dict[str, Any]]:
    """The table's lines of one case, this project first; ``limit`` is the machine's rate of products in GFLOP/s."""
    done = {e: [o for o in found if not isinstance(o, Failure)] for e, found in outcomes.items()}
    rate = {e: statistics.median(o["tokens_per_second"] for o in found) for e, found in done.items() if found}
    peak = {e: statistics.median(max(o["peak_mib"]) for o in found) for e, found in done.items() if found}
    ours = CASES[case][0]
    lines = []
    for entry, found in done.items():
        line: dict[str, Any] = {"case": case, "framework": found[0]["framework"] if found else entry.name}
        if found:
            line["tokens/s"] = round(rate[entry])
            line["share of products"] = round(rate[entry] * FLOPS_PER_TOKEN / 1e9 / limit, 2)
            line["MiB per rank"] = round(peak[entry])
            line["CPU s per rank"] = round(statistics.median(o["cpu_seconds"] for o in found), 2)
            line["quiet steps"] = f"{sum(o['quiet'] for o in found)} of {sum(o['total'] for o in found)}"
        if found and entry != ours and ours in rate:
            line["speed: ours / peer"] = round(rate[ours] / rate[entry], 2)
            line["memory: ours / peer"] = round(peak[ours] / peak[entry], 2)
        failures = [o.reason for o in outcomes[entry] if isinstance(o, Failure)]
        line["failed with"] = failures[0].replace("|", "/") if failures else ""
        lines.append(line)
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Every column that some line fills, in the order of the fullest line."""
    head: dict[str, None] = {}
    for line in sorted(lines, key=len, reverse=True):
        head |= dict.fromkeys(key for key in line if any(other.get(key, "") != "" for other in lines))
    return markdown([{key: line.get(key, "") for key in head} for line in lines])


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in PEERS:
        parser.add_argument(f"--{peer}", metavar="PYTHON", help="of the environment it is installed in")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES), help="one,ep,tp,pp")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="quiet steps to time in each run")
    parser.add_argument("--most-seconds", type=float, default=60.0, help="for these steps")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds until a run is given up")
    parser.add_argument("--peers-keep-memory", action="store_true", help="tune malloc for the peers as we do for us")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that ``finish`` ends what it started
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"--cases: {', '.join(sorted(unknown))} is none of {', '.join(CASES)}")
    # Not resolved: an environment's python is a link, and where it lies says which environment is meant.
    given = {peer: getattr(options, peer.replace("-", "_")) for peer in PEERS}
    pythons = {OURS: sys.executable} | {peer: os.path.abspath(path) for peer, path in given.items() if path}
    outcomes = rounds(pythons, options)
    finished = [o for found in outcomes.values() for o in found if not isinstance(o, Failure)]
    limit = max((o["product_gflops"] for o in finished), default=0.0)
    lines: list[dict[str, Any]] = []
    for case in options.cases:
        lines += summary(case, {entry: found for (of, entry), found in outcomes.items() if of == case}, limit)
    absent = [peer for peer in PEERS if peer not in pythons]
    print(table(lines))
    print(f"\nAbsent: {', '.join(f'{peer} (no --{peer} given)' for peer in absent) or 'nobody'}.")
    runs = [
        {"case": case, "entry": entry.name} | ({"failed": o.reason} if isinstance(o, Failure) else o)
        for (case, entry), found in outcomes.items()
        for o in found
    ]
    whole = {"what": "peers", "rounds": options.rounds, "product_gflops": limit, "absent": absent}
    print(json.dumps(whole | {"rows": lines, "runs": runs} | machine()))
    return int(any(line["failed with"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
