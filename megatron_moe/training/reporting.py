"""What a run tells: records of steps, evaluations and events, for the sinks, which rank 0 alone has."""

import math
from pathlib import Path
from typing import Any

import torch

from megatron_moe.config import dump, to_dict
from megatron_moe.config.schema import Config
from megatron_moe.model.flops import training_flops_per_token
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training.build import Machine
from megatron_moe.training.launch import is_main_rank
from megatron_moe.training.progress import Progress
from megatron_moe.training.records import Record
from megatron_moe.training.sinks import Sink, build_sinks
from megatron_moe.training.statistics import collect
from megatron_moe.training.step import StepResult
from megatron_moe.training.utilization import device_peak_tflops


class Reporter:
    """Writes records to all sinks of the run; a rank without sinks takes part in what it takes to make them.

    Args:
        start_iteration: the last iteration that is done.

    Raises:
        ValueError, OSError: a sink cannot be opened, on rank 0 alone.
    """

    def __init__(
        self,
        config: Config,
        ctx: ParallelContext,
        provenance: dict[str, str],
        total_iterations: int,
        start_iteration: int,
    ) -> None:
        self._config, self._sinks, self._peak_flops = config, list[Sink](), None
        if not is_main_rank():
            return
        dtype = getattr(torch, config.training.params_dtype)
        peak = config.logging.peak_tflops or device_peak_tflops(ctx.device, dtype)
        self._peak_flops = peak * 1e12 * ctx.world.size if peak else None
        save = config.checkpoint.save
        if save is not None:
            Path(save).mkdir(parents=True, exist_ok=True)
            (Path(save) / "config.yaml").write_text(dump(config, provenance), encoding="utf-8")
        self._sinks += build_sinks(config.logging, save, to_dict(config), start_iteration)
        self._sinks.append(Progress(total_iterations, start_iteration))

    def step(
        self,
        machine: Machine,
        iteration: int,
        consumed_samples: int,
        result: StepResult,
        learning_rate: float,
        batch_size: int,
        seconds: float,
        further: dict[str, Any],
    ) -> None:
        """A training record; call it on all ranks."""
        statistics = collect(machine)
        if not self._sinks:
            return
        seq_length = self._config.data.seq_length
        tokens_per_second = batch_size * seq_length / seconds
        mfu = None
        if self._peak_flops:
            mfu = tokens_per_second * training_flops_per_token(self._config) / self._peak_flops
        self._write(
            {
                "iteration": iteration,
                "consumed_samples": consumed_samples,
                "consumed_tokens": consumed_samples * seq_length,
                "lm_loss": result.loss,
                **{f"mtp_{k}_loss": loss for k, loss in enumerate(result.mtp_losses, 1)},
                "learning_rate": learning_rate,
                "grad_norm": result.grad_norm,
                "tokens_per_second": tokens_per_second,
                "step_seconds": seconds,
                "mfu": mfu,
                **further,
                **statistics.scalars(),
                "expert_load": statistics.expert_load(),
                "moe_layers": statistics.by_layer(),
            }
        )

    def evaluation(self, iteration: int, split: str, loss: float) -> None:
        """The loss of a split."""
        perplexity = math.exp(min(loss, 700.0))
        self._write({"iteration": iteration, "evaluation": True, f"{split}_loss": loss, f"{split}_ppl": perplexity})

    def event(self, iteration: int, name: str, text: str, **facts: Any) -> None:
        """Something that happened besides training as usual."""
        self._write({"iteration": iteration, "event": name, "text": text, **facts})

    def close(self) -> None:
        """No record comes after this."""
        for sink in self._sinks:
            sink.close()

    def _write(self, record: Record) -> None:
        for sink in self._sinks:
            sink.write(record)
