"""Draws what runs recorded: loss, learning rate, gradient norm, and the load of every expert over time.

python tools/plot_metrics.py runs/quickstart
python tools/plot_metrics.py runs/a runs/b --output compare.png

┌───────────────┬──────┬──────┐   Curves show every run; the heat maps, one per MoE layer, the first.
│     loss      │  lr  │ norm │   Colour is an expert's load over the mean load: white is balance, red
├────────┬──────┴─┬────┴──────┤   too many tokens, blue too few.
│ max/   │ heat   │ heat      │
│ mean   │ map 1  │ map 3     │
└────────┴────────┴───────────┘
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from megatron_moe.training.records import Record, max_over_mean, read_records

MAX_HEAT_MAPS = 8
COLUMNS = 3
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Run:
    """The records of one run, apart by kind."""

    name: str
    training: list[Record]
    evaluations: list[Record]

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Iterations and values of one key of the training records, where it is present."""
        points = [(r["iteration"], r[key]) for r in self.training if r.get(key) is not None]
        return [iteration for iteration, _ in points], [value for _, value in points]

    def moe_layers(self) -> list[str]:
        """Names of the layers that report loads, in order of depth."""
        names = {name for record in self.training for name in record.get("expert_load") or {}}
        return sorted(names, key=lambda name: int(name.rsplit(" ", 1)[-1]))

    def loads(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
        """Iterations, shape (records,), and each expert's share in one layer, shape (records, E)."""
        records = [r for r in self.training if layer in (r.get("expert_load") or {})]
        iterations = np.array([r["iteration"] for r in records])
        return iterations, np.array([r["expert_load"][layer] for r in records], dtype=float)


def read_run(run_dir: Path) -> Run:
    """Reads RUN_DIR/metrics.jsonl; raises ValueError where there is none or it holds no training record."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the --save folder of a run.")
    records = read_records(path)
    training = [record for record in records if "lm_loss" in record]
    if not training:
        raise ValueError(f"{path} holds no training record yet.")
    name = run_dir.resolve().name
    return Run(name, training, [record for record in records if "valid_loss" in record])


def plot(runs: list[Run], reference_loss: float | None, reference_name: str) -> Figure:
    """One figure of all runs; the caller saves and closes it."""
    heat_layers = _evenly(runs[0].moe_layers(), MAX_HEAT_MAPS)
    has_load = any(run.moe_layers() for run in runs)
    num_panels = (1 + len(heat_layers)) if has_load else 0
    num_rows = 1 + -(-num_panels // COLUMNS)
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(13, 3.6 * num_rows), layout="constrained")
        grid = figure.add_gridspec(num_rows, 12)
        draw_loss(figure.add_subplot(grid[0, :6]), runs, reference_loss, reference_name)
        draw_curves(figure.add_subplot(grid[0, 6:9]), runs, "learning_rate", "Learning rate")
        draw_curves(figure.add_subplot(grid[0, 9:]), runs, "grad_norm", "Gradient norm", log=True)
        panels = [
            figure.add_subplot(grid[1 + i // COLUMNS, 4 * (i % COLUMNS) : 4 * (i % COLUMNS) + 4])
            for i in range(num_panels)
        ]
        if panels:
            draw_balance(panels[0], runs)
            title = "Experts' load" if len(runs) == 1 else f"{runs[0].name}: experts' load"
            images = [
                draw_heat_map(ax, runs[0], layer, title) for ax, layer in zip(panels[1:], heat_layers, strict=True)
            ]
            if images:
                bar = figure.colorbar(images[-1], ax=panels[1:], shrink=0.8, pad=0.01, extend="max")
                bar.set_label("load / mean load")
                bar.set_ticks([0, 0.5, 1, 2, 3])
    return figure


def draw_loss(ax: Axes, runs: list[Run], reference_loss: float | None, reference_name: str) -> None:
    """Training and validation loss of every run, and a line to compare with."""
    for i, run in enumerate(runs):
        color = f"C{i}"
        label = "training" if len(runs) == 1 else run.name
        iterations, losses = run.curve("lm_loss")
        ax.plot(iterations, losses, color=color, alpha=0.25 if len(losses) > 50 else 1.0, linewidth=1)
        if len(losses) > 50:
            ax.plot(iterations, smoothed(losses), color=color, linewidth=1.6, label=label)
        else:
            ax.lines[-1].set_label(label)
        if run.evaluations:
            at = [record["iteration"] for record in run.evaluations]
            valid = [record["valid_loss"] for record in run.evaluations]
            validation = "validation" if len(runs) == 1 else f"{run.name}, validation"
            ax.plot(at, valid, "o", color=color, markersize=5, markeredgecolor="black", label=validation)
    if reference_loss is not None:
        name = f"{reference_name} {reference_loss:.2f}"
        ax.axhline(reference_loss, color="black", linestyle="--", linewidth=1, label=name)
    ax.set(title="Loss", xlabel="iteration", ylabel="nats per token")
    ax.legend()


def draw_curves(ax: Axes, runs: list[Run], key: str, title: str, log: bool = False) -> None:
    """One key of every run over the iterations."""
    for i, run in enumerate(runs):
        ax.plot(*run.curve(key), color=f"C{i}", linewidth=1.2)
    if log:
        ax.set_yscale("log")
        ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
    else:
        ax.yaxis.set_major_formatter("{x:g}")
    ax.set(title=title, xlabel="iteration")


def draw_balance(ax: Axes, runs: list[Run]) -> None:
    """Busiest expert over the mean: the layers of a single run, or of each run the worst layer."""
    for i, run in enumerate(runs):
        series = {layer: [max_over_mean(row) for row in run.loads(layer)[1]] for layer in run.moe_layers()}
        if len(runs) > 1 or len(series) > MAX_HEAT_MAPS:
            by_iteration: dict[int, float] = {}
            for layer, ratios in series.items():
                for iteration, ratio in zip(run.loads(layer)[0].tolist(), ratios, strict=True):
                    by_iteration[iteration] = max(ratio, by_iteration.get(iteration, 1.0))
            label = f"{run.name}, worst layer" if len(runs) > 1 else "worst layer"
            ax.plot(list(by_iteration), list(by_iteration.values()), color=f"C{i}", linewidth=1.2, label=label)
        else:
            for layer, ratios in series.items():
                ax.plot(run.loads(layer)[0], ratios, linewidth=1.2, label=layer)
    ax.axhline(1.0, color="black", linestyle="--", linewidth=1)
    ax.set(title="Busiest expert over the mean", xlabel="iteration")
    ax.legend()


def draw_heat_map(ax: Axes, run: Run, layer: str, title: str) -> QuadMesh:
    """Each expert's load over the mean load of one layer: experts up, iterations to the right."""
    iterations, shares = run.loads(layer)
    totals = shares.sum(axis=1, keepdims=True)
    relative = shares * shares.shape[1] / np.where(totals > 0, totals, 1.0)
    edges = np.concatenate([[0], iterations])
    experts = np.arange(shares.shape[1] + 1) - 0.5
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=3.0)
    image = ax.pcolormesh(edges, experts, relative.T, cmap="RdBu_r", norm=norm, rasterized=True)
    ax.grid(False)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(title=f"{title}, {layer}", xlabel="iteration", ylabel="expert")
    return image


def smoothed(values: list[float]) -> np.ndarray:
    """Running mean over a fiftieth of the curve, of as many values as there are at its ends."""
    half = max(1, len(values) // 100)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def _evenly(names: list[str], limit: int) -> list[str]:
    """All names, or `limit` of them evenly from first to last."""
    if len(names) <= limit:
        return names
    return [names[i] for i in np.linspace(0, len(names) - 1, limit).round().astype(int)]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Draw the metrics of one run, or compare several.")
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="--save folder of a run")
    parser.add_argument("--output", type=Path, help="PNG, SVG or PDF (default: metrics.png in the first folder)")
    parser.add_argument("--reference-loss", type=float, help="draw a line at this loss")
    parser.add_argument("--reference-name", default="reference", help="name of that line")
    args = parser.parse_args(argv)
    output = args.output or args.run_dirs[0] / "metrics.png"
    try:
        runs = [read_run(run_dir) for run_dir in args.run_dirs]
        figure = plot(runs, args.reference_loss, args.reference_name)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=130)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    plt.close(figure)
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
