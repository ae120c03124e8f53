"""Memory and time of a training step of bench-small (``bench_step.py``), feature by feature, in one process.

    python benchmarks/bench_memory.py                            # every feature that the model has
    python benchmarks/bench_memory.py nothing full               # some of them
    python benchmarks/bench_memory.py --num-layers 8 --hidden-size 512

``kept`` is what the forward pass leaves for the backward pass, ``peak`` the most that is alive in a step, both over
weights, gradients and optimizer state, as torch's profiler sees the allocator hand it out; ``planned`` is the peak of a
dry run of the same. Seconds are the processor's, which neighbours on the machine change least. What is offloaded is on
the host: here it is copied to where the allocator does not see it, as on a device. Prints a table and one line of JSON.
Flags that are not the benchmark's own are the configuration's.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
from bench_step import BENCH_SMALL, build, random_batches
from measure import machine, markdown
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_moe.model.offload import Mover
from megatron_moe.pipeline.actions import Kind
from megatron_moe.plan.live import replaced
from megatron_moe.plan.rank import trace_rank
from megatron_moe.training.step import train_step

FEATURES: dict[str, list[str]] = {
    "nothing": [],
    **{
        f"recompute {name}": ["--recompute-granularity", "selective", "--recompute-modules", *name.split()]
        for name in ("core_attn", "layernorm", "moe_act", "moe", "core_attn layernorm moe")
    },
    "recompute full": ["--recompute-granularity", "full"],
    "offload half the layers": ["--cpu-offloading-num-layers", "2", "--min-offloaded-tensor-size", "65536"],
    "offload all layers": ["--cpu-offloading-num-layers", "4", "--min-offloaded-tensor-size", "65536"],
    "compile": ["--torch-compile", "inductor"],
}
MIB, FORWARD_ENDS = 1 << 20, "the forward pass ends"


def _unseen(mover: Mover, whole_X: Tensor) -> Tensor:
    """A copy in memory of NumPy's."""
    return torch.from_numpy(whole_X.numpy().copy())


def measured(flags: list[str], steps: int) -> dict[str, Any]:
    """One feature: MiB kept and at the peak, as seen and as planned; the median of the processor's seconds."""
    batch = str(BENCH_SMALL["micro-batch-size"])
    # gloo: the plan is then that of a CPU, where a norm is several operations
    here, config = build(["--global-batch-size", batch, "--distributed-backend", "gloo", *flags])
    batches, runtime = random_batches(config, 0, 1, 0), here.runtime
    forward = runtime._do[Kind.F]

    def marked(*arguments: Any) -> None:
        forward(*arguments)
        with record_function(FORWARD_ENDS):
            pass

    runtime._do[Kind.F] = marked
    seconds = []
    for iteration in range(1, steps + 3):
        start = time.process_time()
        train_step(here, batches, iteration, 1e-4)
        seconds.append(time.process_time() - start)
    run = runtime.run

    def watched(*arguments: Any) -> Tensor:
        nonlocal events
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = run(*arguments)
        assert profiler.profiler is not None
        events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        return result

    events: list[Any] = []
    runtime.run = watched  # type: ignore[method-assign]
    with replaced(Mover, "to_host", _unseen):
        train_step(here, batches, steps + 3, 1e-4)
    now = peak = kept = 0
    for event in events:
        if event.name() == FORWARD_ENDS:
            kept = now
        elif event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return {
        "kept MiB": round(kept / MIB, 1),
        "peak MiB": round(peak / MIB, 1),
        "planned MiB": round(trace_rank(config, 1, 0).peak[0] / MIB, 1),
        "CPU seconds": round(statistics.median(seconds[2:]), 3),
    }


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="*", help=f"of {', '.join(FEATURES)}; default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="steps to time")
    arguments, rest = parser.parse_known_args(argv)
    unknown = set(arguments.features) - set(FEATURES)
    if unknown:
        parser.error(f"no feature is called {', '.join(sorted(unknown))}; there are {', '.join(FEATURES)}")
    torch.set_num_threads(arguments.threads)
    rows = []
    for name in arguments.features or FEATURES:
        found = measured([*FEATURES[name], *rest], arguments.steps)
        first = rows[0] if rows else found
        shares = {"kept": found["kept MiB"] / first["kept MiB"], "peak": found["peak MiB"] / first["peak MiB"]}
        rows.append({"feature": name, **found, **{f"{key} ratio": round(share, 2) for key, share in shares.items()}})
    print(markdown(rows))
    print(json.dumps({"what": "bench-memory", "rows": rows, **machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
