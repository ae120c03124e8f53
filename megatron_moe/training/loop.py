"""The training loop, top to bottom: resume, step, report, evaluate, save, leave.

State is the weights, the optimizer and one number, the consumed samples; all else follows from the configuration.
"""

import math
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_moe.config import dump, to_dict
from megatron_moe.config.schema import Config
from megatron_moe.data.batch import Batch, CollateOptions
from megatron_moe.data.blend import SampleSource
from megatron_moe.data.build import Datasets, build_datasets
from megatron_moe.data.loader import StepLoader
from megatron_moe.data.tokenizer import build_tokenizer
from megatron_moe.model.flops import training_flops_per_token
from megatron_moe.optim.learning_rate import LearningRate
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training import checkpointing
from megatron_moe.training.batch_size import batch_size_at, run_length
from megatron_moe.training.build import Machine, build_machine
from megatron_moe.training.launch import is_main_rank, together
from megatron_moe.training.profiling import recorded_schedule
from megatron_moe.training.progress import Progress
from megatron_moe.training.records import Record
from megatron_moe.training.signals import StopRequest
from megatron_moe.training.sinks import Sink, build_sinks
from megatron_moe.training.statistics import collect
from megatron_moe.training.step import StepResult, evaluate_batch, train_step
from megatron_moe.training.utilization import device_peak_tflops


@dataclass
class Position:
    """How far the run is."""

    iteration: int = 0
    consumed_samples: int = 0


class Run:
    """One training run on this rank: built, resumed if there is something to resume, and driven to its end."""

    def __init__(self, config: Config, ctx: ParallelContext, provenance: dict[str, str]) -> None:
        self.config, self.ctx, self.provenance = config, ctx, provenance
        training = config.training
        self.total_iterations, total_samples = run_length(training)
        assert training.global_batch_size is not None
        self.learning_rate = LearningRate.of(config.optim, total_samples, training.global_batch_size)
        self.datasets: Datasets = together(self._open_data)
        self.machine: Machine = together(lambda: build_machine(config, ctx))
        self.position = Position()
        together(self._resume)
        self.sinks: list[Sink] = together(self._open_sinks)
        self._saved_at = self.position.iteration

    def train(self) -> str:
        """Step until the end or a request to stop; returns why it ended."""
        training, position = self.config.training, self.position
        if position.iteration >= self.total_iterations:
            return f"nothing is left to do: iteration {position.iteration} of {self.total_iterations}"
        stop, reason = StopRequest(training, self.ctx), None
        steps = self._loader(self.datasets.train, self.ctx).steps(position.consumed_samples)
        try:
            while position.iteration < self.total_iterations and reason is None:
                self._one_iteration(steps)
                reason = stop.reason()
                if reason is None and training.exit_interval and position.iteration % training.exit_interval == 0:
                    reason = f"--exit-interval {training.exit_interval}"
                self._evaluate_if_due()
                self._save_if_due(leaving=reason is not None)
            if reason is None:
                self._final_test()
        finally:
            steps.close()
            stop.close()
            for sink in self.sinks:
                sink.close()
        done = f"iteration {position.iteration} of {self.total_iterations}"
        return f"done: {done}" if reason is None else f"stopped at {done}: {reason}; the same command resumes"

    def _one_iteration(self, steps: Generator[tuple[Batch, ...], None, None]) -> None:
        start = time.perf_counter()
        batches = next(steps)
        batch_size = batch_size_at(self.config.training, self.position.consumed_samples)
        learning_rate = self.learning_rate.at(self.position.consumed_samples + batch_size)
        iteration = self.position.iteration + 1
        with self._profiled(iteration):
            result = train_step(self.machine, batches, iteration, learning_rate)
        self.position.iteration += 1
        self.position.consumed_samples += batch_size
        if self.position.iteration % self.config.logging.log_interval == 0:
            self._report(result, learning_rate, batch_size, time.perf_counter() - start)

    def _profiled(self, iteration: int) -> AbstractContextManager[None]:
        if iteration != self.config.logging.profile_schedule:
            return nullcontext()
        path = Path(self.config.checkpoint.save or ".") / "schedule.jsonl"
        return recorded_schedule(self.machine.runtime, self.ctx, path)

    def _report(self, result: StepResult, learning_rate: float, batch_size: int, seconds: float) -> None:
        statistics = collect(self.machine)
        if not self.sinks:
            return
        seq_length = self.config.data.seq_length
        tokens_per_second = batch_size * seq_length / seconds
        mfu = None
        if self._peak_flops:
            mfu = tokens_per_second * training_flops_per_token(self.config) / self._peak_flops
        record: Record = {
            "iteration": self.position.iteration,
            "consumed_samples": self.position.consumed_samples,
            "consumed_tokens": self.position.consumed_samples * seq_length,
            "lm_loss": result.loss,
            "learning_rate": learning_rate,
            "grad_norm": result.grad_norm,
            "tokens_per_second": tokens_per_second,
            "step_seconds": seconds,
            "mfu": mfu,
            **statistics.scalars(),
            "expert_load": statistics.expert_load(),
        }
        self._write(record)

    def _evaluate_if_due(self) -> None:
        interval, iteration = self.config.training.eval_interval, self.position.iteration
        due = interval > 0 and (iteration % interval == 0 or iteration == self.total_iterations)
        if due and self.datasets.valid is not None:
            loss = self._mean_loss(self.datasets.valid)
            self._write(_evaluation(iteration, "valid", loss))

    def _final_test(self) -> None:
        if self.datasets.test is not None and self.config.training.eval_interval > 0:
            self._write(_evaluation(self.position.iteration, "test", self._mean_loss(self.datasets.test)))

    def _mean_loss(self, source: SampleSource) -> float:
        """Mean loss per token over the first --eval-iters global batches of a split: the same ones every time."""
        steps = self._loader(source, self.ctx, ramped=False).steps(0)
        total, count = 0.0, 0.0
        try:
            for _ in range(self.config.training.eval_iters):
                loss, tokens = evaluate_batch(self.machine, next(steps), self.position.iteration)
                total, count = total + loss, count + tokens
        finally:
            steps.close()
        return total / max(count, 1.0)

    def _save_if_due(self, leaving: bool) -> None:
        interval, iteration = self.config.checkpoint.save_interval, self.position.iteration
        due = leaving or iteration == self.total_iterations or bool(interval and iteration % interval == 0)
        if due and self.config.checkpoint.save is not None and self._saved_at != iteration:
            text = dump(self.config, self.provenance)
            checkpointing.save(self.machine, iteration, self.position.consumed_samples, text)
            self._saved_at = iteration

    def _resume(self) -> None:
        loaded = checkpointing.load(self.machine)
        if loaded is not None:
            self.position = Position(*loaded)

    def _open_data(self) -> Datasets:
        vocab_size = self.config.model.vocab_size
        assert vocab_size is not None
        return build_datasets(self.config.data, seed=self.config.training.seed, vocab_size=vocab_size)

    def _loader(self, source: SampleSource, ctx: ParallelContext, *, ramped: bool = True) -> StepLoader:
        training, data = self.config.training, self.config.data
        full = training.global_batch_size
        assert full is not None and self.config.model.vocab_size is not None
        tokenizer = build_tokenizer(data.tokenizer_type, data.tokenizer_model)
        options = CollateOptions(
            vocab_size=self.config.model.vocab_size,
            eod_id=tokenizer.eod_id,
            reset_position_ids=data.reset_position_ids,
            reset_attention_mask=data.reset_attention_mask,
            eod_mask_loss=data.eod_mask_loss,
        )
        return StepLoader(
            source,
            options,
            batch_size_at=(lambda consumed: batch_size_at(training, consumed)) if ramped else (lambda _: full),
            micro_batch_size=training.micro_batch_size,
            dp_rank=ctx.dp.rank,
            dp_size=ctx.dp.size,
            num_workers=data.num_workers,
        )

    def _open_sinks(self) -> list[Sink]:
        if not is_main_rank():
            return []
        dtype = getattr(torch, self.config.training.params_dtype)
        peak = self.config.logging.peak_tflops or device_peak_tflops(self.ctx.device, dtype)
        self._peak_flops = peak * 1e12 * self.ctx.world.size if peak else None
        save = self.config.checkpoint.save
        if save is not None:
            Path(save).mkdir(parents=True, exist_ok=True)
            (Path(save) / "config.yaml").write_text(dump(self.config, self.provenance), encoding="utf-8")
        sinks = build_sinks(self.config.logging, save, to_dict(self.config), self.position.iteration)
        return [*sinks, Progress(self.total_iterations, self.position.iteration)]

    def _write(self, record: Record) -> None:
        for sink in self.sinks:
            sink.write(record)


def _evaluation(iteration: int, split: str, loss: float) -> Record:
    perplexity = math.exp(min(loss, 700.0))
    return {"iteration": iteration, "evaluation": True, f"{split}_loss": loss, f"{split}_ppl": perplexity}
