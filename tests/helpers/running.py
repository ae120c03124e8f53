"""A whole training run of a tiny model in this process: seconds for dozens of iterations."""

from pathlib import Path
from typing import Any

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training.loop import Run
from megatron_moe.training.records import read_records
from pretrain_moe import configuration

TINY = (
    "--mock-data --vocab-size 300 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-experts 4 "
    "--moe-ffn-hidden-size 32 --seq-length 16 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --train-iters 20 "
    "--eval-interval 0 --peak-tflops 1 --num-workers 0 --params-dtype float64"
)


def tiny_run(save: Path | str, flags: str = "") -> Run:
    """Built, and resumed if there is something in the folder."""
    argv = f"{TINY} --save {save} {flags}".split()
    resolved = configuration(argv)
    return Run(resolved.config, ParallelContext.single(), resolved.provenance)


def losses(save: Path) -> dict[int, float]:
    """Training loss by iteration."""
    return {r["iteration"]: r["lm_loss"] for r in read_records(save / "metrics.jsonl") if "lm_loss" in r}


def events(save: Path) -> list[dict[str, Any]]:
    """What happened besides training as usual."""
    return [record for record in read_records(save / "metrics.jsonl") if "event" in record]
