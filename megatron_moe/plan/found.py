"""What a search found, in words: a table, the difference from a given layout, and a file to start it with."""

import io

import yaml

from megatron_moe.plan.cluster import Cluster
from megatron_moe.plan.search import Found, Search


def table(result: Search) -> str:
    """The best layouts with what they cost and where their time goes; a given one below."""
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    columns = ["", "tp", "etp", "cp", "pp", "ep", "schedule", "mbs", "recompute", "ZeRO", "s/step", "TFLOP/s", "GB"]
    shown = Table(*columns, "where the time goes")
    numbered = [(str(i + 1), found) for i, found in enumerate(result.found)]
    for name, item in [*numbered, *([("given", result.beside)] if result.beside else [])]:
        v = item.values
        schedule = v["pipeline_schedule"] + (f" x{n}" if (n := v["num_virtual_stages_per_pipeline_rank"]) else "")
        axes = ("tensor_model", "expert_tensor", "context", "pipeline_model", "expert_model")
        zero = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        modules = v.get("recompute_modules") or ()
        recompute = " ".join(modules) if v["recompute_granularity"] == "selective" else v["recompute_granularity"]
        shown.add_row(
            name,
            *(str(v[f"{axis}_parallel_size"]) for axis in axes),
            schedule,
            str(v["micro_batch_size"]),
            recompute or "no",
            str(zero[v["data_parallel_sharding_strategy"]]),
            f"{item.time.step:.3g}",
            f"{item.time.tflops_per_gpu:.0f}",
            f"{item.memory_gb:.1f}",
            item.reason,
        )
    Console(file=out, width=150).print(shown)
    return out.getvalue()


def difference(best: Found, given: Found) -> str:
    """Why one step is shorter than another: what of its time differs, the largest first."""
    if best.plan.config == given.plan.config:
        return "The best is the given layout."
    parts = {
        name: best.time.parts.get(name, 0.0) - given.time.parts.get(name, 0.0)
        for name in best.time.parts | given.time.parts
    }
    largest = sorted(parts.items(), key=lambda item: -abs(item[1]))[:4]
    listed = ", ".join(f"{name} {seconds:+.3g} s" for name, seconds in largest if abs(seconds) > 5e-4)
    change = best.time.step / given.time.step - 1
    memory = f"{best.memory_gb:.0f} GB instead of {given.memory_gb:.0f}"
    return (
        f"The best step takes {abs(change):.1%} {'less' if change < 0 else 'more'} than the given: {listed}; {memory}."
    )


def as_yaml(found: Found, cluster: Cluster) -> str:
    """The layout as a file for --config, after the model's."""
    time, sizes, training = found.time, found.plan.sizes, found.plan.config.training
    fixed = {"global_batch_size": training.global_batch_size, "params_dtype": training.params_dtype}
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in (found.values | fixed).items() if v is not None}
    return (
        f"# Found by tools/plan.py search for {sizes.world} devices of {cluster.name}: {time.step:.3g} s a step, "
        f"{time.tflops_per_gpu:.0f} TFLOP/s per device,\n# {found.memory_gb:.1f} GB on the fullest (all estimated).\n"
        + yaml.safe_dump(values, sort_keys=False)
    )
