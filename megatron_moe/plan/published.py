"""Estimates beside published throughputs: the same models and layouts, the same efficiencies for all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_moe.config.schema import Config
from megatron_moe.plan.cluster import Cluster
from megatron_moe.plan.configure import configured
from megatron_moe.plan.dry_run import Plan, dry_run
from megatron_moe.plan.estimate import estimate


@dataclass(frozen=True)
class Row:
    """A published throughput.

    Attributes:
        published: lowest and highest TFLOP/s per GPU.
        per_node: whether the published run sends a token once to each node, and not once for each expert.
        flags: words of the command line after the model's file.
    """

    name: str
    model: str
    gpus: int
    published: tuple[float, float]
    precision: str
    per_node: bool
    flags: tuple[str, ...]

    def configured(self, models: Path) -> Config:
        """The row's run, checked.

        Raises:
            ConfigError: everything that is wrong with it.
        """
        return configured(["--config", str(models / f"{self.model}.yaml"), *self.flags], self.gpus)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file such as configs/published.yaml."""
    data = yaml.safe_load(path.read_text())
    return [
        Row(
            row["name"],
            row["model"],
            row["gpus"],
            (row["published"][0], row["published"][-1]),
            row["precision"],
            row["dispatch"] == "per node",
            (*data["common"].split(), *row["flags"].split()),
        )
        for row in data["rows"]
    ]


@dataclass(frozen=True)
class Comparison:
    """A row and what is estimated for it, in TFLOP/s per GPU.

    Attributes:
        here: for this code, in bfloat16, which sends a row for each copy of a token.
        per_node: the same if it sent one for each node, as the published run did; else equal to ``here``.
        memory_gb: of the fullest rank.
        time: the largest parts of the step.
    """

    row: Row
    here: float
    per_node: float
    memory_gb: float
    time: str


def compare(row: Row, models: Path, cluster: Cluster) -> Comparison:
    """Dry-run a row and time it."""
    plan: Plan = dry_run(row.configured(models), row.gpus)
    here = estimate(plan, cluster)
    per_node = estimate(plan, cluster, per_node=True) if row.per_node else here
    memory = max(sum(plan.memory(pp_rank).values()) for pp_rank in range(plan.sizes.pp))
    return Comparison(row, here.tflops_per_gpu, per_node.tflops_per_gpu, memory / 1e9, here.largest(3))


def as_markdown(found: Sequence[Comparison]) -> Iterator[str]:
    """A table, line by line; ratios are of the estimate for the published kind of dispatch to the lowest published."""
    yield "| model, layout | GPUs | published | estimated here | one copy a node | ratio | where the time goes here |"
    yield "|---|---|---|---|---|---|---|"
    for each in found:
        row, (low, high) = each.row, each.row.published
        span = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        per_node = f"{each.per_node:.0f}" if row.per_node else ""
        yield (
            f"| {row.name} | {row.gpus} | {span}, {row.precision} | {each.here:.0f} | {per_node} | "
            f"{each.per_node / low:.2f} | {each.time} |"
        )
