"""How fast this machine's products let bench-small be, and how much of that a step of this project reaches.

    python benchmarks/bench_roofline.py [--threads 2] [--no-step]

For every product of a step (expert fc1 and fc2, query-key-value and output projections, router, attention, head; each
forward, for its input's gradient ``dx`` and for its weight's ``dw``) the rate of PyTorch's float32 product with 1 to n
threads. Their times at the best number of threads sum up to the ideal step: 77.4 GFLOP per 2,048 tokens and nothing
else, no norm, no softmax, no optimizer, no row moved. The best of a few tries counts: other people's work can only slow
a product down. Prints a table in Markdown and one line of JSON.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import small
import torch
from measure import machine, markdown, product_gflops


class Product(NamedTuple):
    """``times`` products [rows, inner] x [inner, columns] per step, each of ``batch`` independent ones."""

    name: str
    rows: int
    inner: int
    columns: int
    times: int
    layout: str
    batch: int = 1

    @property
    def gflop(self) -> float:
        """Of all of them in a step."""
        return 2 * self.batch * self.rows * self.inner * self.columns * self.times / 1e9


def linear(name: str, rows: int, inner: int, columns: int, times: int) -> list[Product]:
    """x W^T and its two gradients, for a weight of [columns, inner] as PyTorch keeps it."""
    return [
        Product(f"{name} forward", rows, inner, columns, times, "nt"),
        Product(f"{name} dx", rows, columns, inner, times, "nn"),
        Product(f"{name} dw", columns, rows, inner, times, "tn"),
    ]


def products() -> list[Product]:
    """All products of a step of bench-small on one process; loads are taken as even."""
    rows, layers = small.TOKENS * small.TOPK // small.EXPERTS, small.LAYERS
    heads, channels = small.HEADS * small.CHANNELS, small.HEADS + 2 * small.GROUPS
    # Scores and values, forward once and backward twice. Causal: half of the square, so half of the times.
    attention = 3 * layers // 2
    sequences = small.MICRO_BATCH * small.HEADS
    return [
        *linear("expert fc1", rows, small.HIDDEN, 2 * small.WIDTH, layers * small.EXPERTS),
        *linear("expert fc2", rows, small.WIDTH, small.HIDDEN, layers * small.EXPERTS),
        *linear("qkv", small.TOKENS, small.HIDDEN, channels * small.CHANNELS, layers),
        *linear("projection", small.TOKENS, heads, small.HIDDEN, layers),
        *linear("router", small.TOKENS, small.HIDDEN, small.EXPERTS, layers),
        *linear("head", small.TOKENS, small.HIDDEN, small.VOCABULARY, 1),
        Product("attention scores", small.SEQUENCE, small.CHANNELS, small.SEQUENCE, attention, "nt", sequences),
        Product("attention values", small.SEQUENCE, small.SEQUENCE, small.CHANNELS, attention, "nn", sequences),
    ]


def rates(product: Product, threads: int, seconds: float, tries: int) -> list[float]:
    """GFLOP/s with 1, 2, ... ``threads`` threads."""
    found = []
    for count in range(1, threads + 1):
        torch.set_num_threads(count)
        sizes = (product.rows, product.inner, product.columns)
        found.append(max(product_gflops(*sizes, seconds, product.layout, product.batch) for _ in range(tries)))
    return found


def step_rate(threads: int, most_seconds: float) -> dict[str, Any]:
    """The line of bench_step.py with as many threads."""
    root = Path(__file__).parent.parent
    command = [sys.executable, "benchmarks/bench_step.py", "--threads", str(threads)]
    command += ["--most-seconds", str(most_seconds)]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=0.2, help="for one try of one product")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--most-seconds", type=float, default=60.0, help="for the timed steps")
    parser.add_argument("--no-step", action="store_true", help="products alone")
    options = parser.parse_args(argv)
    step = None if options.no_step else step_rate(options.threads, options.most_seconds)
    rows: list[dict[str, Any]] = []
    gflop = seconds = 0.0
    for product in products():
        found = rates(product, options.threads, options.seconds, options.tries)
        batch = f"{product.batch} x " if product.batch > 1 else ""
        row: dict[str, Any] = {"product": product.name}
        row["shape"] = f"{batch}[{product.rows}, {product.inner}] x [{product.inner}, {product.columns}]"
        row |= {"times": product.times, "GFLOP": round(product.gflop, 2)}
        row |= {f"GFLOP/s, threads: {count}": round(rate, 1) for count, rate in enumerate(found, 1)}
        rows.append(row | {"ms a step": round(product.gflop / max(found) * 1e3, 1)})
        gflop, seconds = gflop + product.gflop, seconds + product.gflop / max(found)
    print(markdown(rows))
    ideal = small.TOKENS / seconds
    print(
        f"\nIdeal step: {gflop:.1f} GFLOP in {seconds * 1e3:.0f} ms with up to {options.threads} threads, "
        f"{gflop / seconds:.0f} GFLOP/s, {ideal:.0f} tokens/s."
    )
    result: dict[str, Any] = {"what": "roofline", "gflop": round(gflop, 1), "ideal_seconds": round(seconds, 4)}
    result["ideal_tokens_per_second"] = round(ideal)
    if step is not None:
        result |= {"step": step, "share": round(step["tokens_per_second"] / ideal, 3)}
        print(
            f"A step of this project: {step['seconds'] * 1e3:.0f} ms, {step['tokens_per_second']} tokens/s, "
            f"{result['share']:.2f} of the ideal ({step['quiet']} of {step['total']} steps quiet)."
        )
    print(json.dumps(result | {"rows": rows} | machine()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
