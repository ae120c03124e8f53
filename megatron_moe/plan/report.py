"""A plan in words, numbers and a picture."""

import io
from pathlib import Path
from typing import Any

from megatron_moe.model.flops import training_flops_per_token
from megatron_moe.plan.cluster import Cluster
from megatron_moe.plan.dry_run import Plan
from megatron_moe.plan.estimate import Estimate, nodes_of

GB = 1e9


def as_json(plan: Plan, cluster: Cluster | None, time: Estimate | None) -> dict[str, Any]:
    """Everything, as plain values."""
    ranks = [
        {
            "rank": plan.rank_of(pp_rank),
            "pipeline_rank": pp_rank,
            "memory_bytes": plan.memory(pp_rank),
            "work": rank.work,
            "flops": rank.flops,
            "collectives": [
                {
                    "axis": axis,
                    "collective": name,
                    "ranks": len(plan.members(pp_rank, axis)),
                    "calls": calls,
                    "bytes": sent,
                }
                | ({"nodes": nodes_of(plan.members(pp_rank, axis), cluster)} if cluster else {})
                for (axis, name), (calls, sent) in sorted(rank.traffic.items())
            ],
        }
        for pp_rank, rank in enumerate(plan.ranks)
    ]
    found: dict[str, Any] = {
        "world_size": plan.sizes.world,
        "parameters": plan.num_parameters,
        "tokens_per_step": plan.tokens,
        "model_flops_per_token": training_flops_per_token(plan.config),
        "model_flops": plan.model_flops,
        "hardware_flops": plan.hardware_flops,
        "flops": plan.flops,
        "load_skew": plan.skew,
        "ranks": ranks,
    }
    if time is not None:
        found["time"] = {
            "cluster": time.cluster.name,
            "step_seconds": time.step,
            "parts_seconds": time.parts,
            "hidden_seconds": time.hidden,
            "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
            "model_tflops_per_gpu": time.tflops_per_gpu,
            "model_flop_utilization": time.utilization,
        }
    return found


def as_text(plan: Plan, cluster: Cluster | None, time: Estimate | None) -> str:
    """Tables for a terminal."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=120)
    sizes = plan.sizes
    console.print(
        f"{sizes.world} ranks = pp {sizes.pp} x dp {sizes.dp} x cp {sizes.cp} x tp {sizes.tp}, experts: "
        f"edp {sizes.edp} x ep {sizes.ep} x etp {sizes.etp}\n"
        f"{plan.num_parameters:,} parameters; {plan.tokens:,} tokens a step in "
        f"{plan.ranks[0].schedule.num_microbatches} micro-batches a rank; "
        f"{training_flops_per_token(plan.config) / 1e9:.4g} GFLOP a token, "
        f"{plan.hardware_flops / plan.model_flops:.3f} times that computed",
        highlight=False,
    )
    flops = plan.flops
    shares = ", ".join(f"{name} {value / sum(flops.values()):.1%}" for name, value in flops.items() if value)
    console.print(f"computed: {shares}", highlight=False)
    console.print(_memory_table(plan, cluster))
    console.print(_traffic_table(plan, cluster))
    if time is not None:
        console.print(_time_table(time))
    return out.getvalue()


def _memory_table(plan: Plan, cluster: Cluster | None) -> Any:
    from rich.table import Table

    title = "Memory of a rank in GB at its peak" + (f" (device: {cluster.memory_gb:g})" if cluster else "")
    table = Table("stage", "rank", *plan.memory(0), "total", title=title)
    for pp_rank in range(plan.sizes.pp):
        memory = plan.memory(pp_rank)
        total = sum(memory.values()) / GB
        full = " too much" * (cluster is not None and total > cluster.memory_gb)
        cells = [f"{value / GB:.3f}" for value in memory.values()]
        table.add_row(str(pp_rank), str(plan.rank_of(pp_rank)), *cells, f"{total:.3f}{full}")
    return table


def _traffic_table(plan: Plan, cluster: Cluster | None) -> Any:
    from rich.table import Table

    table = Table(
        "axis", "ranks", "link", "collective", "calls", "GB sent", title="Sent by one rank of the first stage in a step"
    )
    for (axis, name), (calls, sent) in sorted(plan.ranks[0].traffic.items()):
        members = plan.members(0, axis)
        link = "" if cluster is None else "in node" if nodes_of(members, cluster) == 1 else "between nodes"
        table.add_row(axis, str(len(members)), link, name, f"{calls:,}", f"{sent / GB:.4g}")
    return table


def _time_table(time: Estimate) -> Any:
    from rich.table import Table

    title = (
        f"{time.step:.3g} s a step on {time.cluster.name} (estimated): "
        f"{time.tokens_per_second_per_gpu:,.0f} tokens/s and "
        f"{time.tflops_per_gpu:.0f} TFLOP/s per GPU, utilization {time.utilization:.1%}"
    )
    table = Table("busiest rank", "seconds", "share", title=title)
    for name, seconds in sorted(time.parts.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{seconds:.4g}", f"{seconds / time.step:.1%}")
    for axis, seconds in time.hidden.items():
        table.add_row(f"hidden: communication {axis}", f"{seconds:.4g}", "")
    return table


def draw(plan: Plan, cluster: Cluster | None, time: Estimate | None, path: str | Path) -> None:
    """A picture: stacked memory of each stage, and where a step's time goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2 if time else 1, figsize=(12 if time else 7, 4.5), squeeze=False)
    left = axes[0][0]
    stages = list(range(plan.sizes.pp))
    base = [0.0] * len(stages)
    for name in plan.memory(0):
        heights = [plan.memory(pp_rank)[name] / GB for pp_rank in stages]
        left.bar(stages, heights, bottom=base, label=name)
        base = [a + b for a, b in zip(base, heights, strict=True)]
    if cluster is not None:
        left.axhline(cluster.memory_gb, color="black", linestyle="--", label="device")
    left.set(xlabel="pipeline rank", ylabel="GB at the peak", title="Memory of a rank")
    left.legend()
    if time is not None:
        parts = sorted(time.parts.items(), key=lambda item: item[1])
        axes[0][1].barh([name for name, _ in parts], [seconds for _, seconds in parts])
        axes[0][1].set(xlabel="seconds", title=f"A step on {time.cluster.name}: {time.step:.3g} s (estimated)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
