"""The training loop, top to bottom: resume, step, report, evaluate, save, leave.

State is the weights, the optimizer and how far the run is; all else follows from the configuration.
"""

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from megatron_moe.config import dump
from megatron_moe.config.schema import Config
from megatron_moe.data.batch import Batch, CollateOptions
from megatron_moe.data.blend import SampleSource
from megatron_moe.data.build import Datasets, build_datasets
from megatron_moe.data.loader import StepLoader
from megatron_moe.data.tokenizer import build_tokenizer
from megatron_moe.optim.learning_rate import LearningRate
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training import checkpointing
from megatron_moe.training.batch_size import batch_size_at, run_length
from megatron_moe.training.build import Machine, build_machine
from megatron_moe.training.checkpointing import Saver
from megatron_moe.training.faults import MOST_IN_A_ROW, FaultGuard, SharedError, routers_that_are_not_finite
from megatron_moe.training.launch import together
from megatron_moe.training.profiling import recorded_schedule
from megatron_moe.training.replicas import check_replicas
from megatron_moe.training.reporting import Reporter
from megatron_moe.training.signals import StepEdge
from megatron_moe.training.step import evaluate_batch, train_step
from megatron_moe.training.stragglers import StragglerClock


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
        self.guard = FaultGuard(config, ctx)
        self.position = Position()
        self.saver: Saver = together(self._resume)
        start = self.position.iteration
        self.reporter = together(lambda: Reporter(config, ctx, provenance, self.total_iterations, start))
        self.stragglers = StragglerClock(ctx, wanted=config.logging.log_straggler)

    def train(self) -> str:
        """Step until the end or a request to stop; returns why it ended.

        Raises:
            SharedError, CheckpointError: on every rank alike.
        """
        training, position = self.config.training, self.position
        if position.iteration >= self.total_iterations:
            return f"nothing is left to do: iteration {position.iteration} of {self.total_iterations}"
        edge, reason = StepEdge(self.config, self.ctx, self.saver), None
        steps = self._loader(self.datasets.train, self.ctx).steps(position.consumed_samples)
        try:
            while position.iteration < self.total_iterations and reason is None:
                self._one_iteration(steps)
                agreed = edge.agree()
                reason = agreed.stop
                if reason is None and training.exit_interval and position.iteration % training.exit_interval == 0:
                    reason = f"--exit-interval {training.exit_interval}"
                self._evaluate_if_due()
                self._save_if_due(now=agreed.save or reason is not None)
            self.saver.wait()
            if reason is None:
                self._final_test()
        except SharedError:
            self.saver.wait()  # all ranks are here: what was saved before is still good
            raise
        finally:
            steps.close()
            edge.close()
            self.reporter.close()
        done = f"iteration {position.iteration} of {self.total_iterations}"
        return f"done: {done}" if reason is None else f"stopped at {done}: {reason}; the same command resumes"

    def _one_iteration(self, steps: Generator[tuple[Batch, ...], None, None]) -> None:
        start, position, config = time.perf_counter(), self.position, self.config
        batches = next(steps)
        batch_size = batch_size_at(config.training, position.consumed_samples)
        learning_rate = self.learning_rate.at(position.consumed_samples + batch_size)
        with self._profiled(position.iteration + 1):
            result = train_step(self.machine, batches, position.iteration + 1, learning_rate, self.guard.accept)
        position.iteration += 1
        position.consumed_samples += batch_size
        if not result.applied:
            self._mend(range(position.consumed_samples - batch_size, position.consumed_samples))
        seconds = time.perf_counter() - start
        self.stragglers.step(seconds)
        if result.applied and position.iteration % config.logging.log_interval == 0:
            further = self.stragglers.report()
            stall = self.saver.take_stall_seconds()
            if stall is not None:
                further["save_stall_seconds"] = stall
            progress = position.iteration, position.consumed_samples
            self.reporter.step(self.machine, *progress, result, learning_rate, batch_size, seconds, further)
        interval = config.training.check_weight_hash_across_dp_replicas_interval
        if interval is not None and position.iteration % interval == 0:
            check_replicas(self.machine, position.iteration)

    def _mend(self, samples: range) -> None:
        """A step was refused: skip its batch, roll back, or end the run.

        Raises:
            SharedError: the run ends.
        """
        fault, iteration, guard = self.guard.fault, self.position.iteration, self.guard
        assert fault is not None
        num_layers = self.config.model.num_layers + (self.config.model.mtp_num_layers or 0)
        routers = routers_that_are_not_finite(self.machine.gates, num_layers, self.ctx)
        what = f"{fault.reason}; samples {samples[0]}..{samples[-1]}; router scores that are not finite: {routers}"
        facts = {"samples": [samples[0], samples[-1]], "reason": fault.reason}
        saved_at, folder = self.saver.saved_at, self.config.checkpoint.save
        if fault.action == "stop" or guard.in_a_row > MOST_IN_A_ROW:
            self.reporter.event(iteration, "stop", what, **facts)
            raise SharedError(
                f"iteration {iteration}: {what}. The weights were not touched. Lower --lr, look at the samples "
                "(tools/show_samples.py), or go on past such batches with --on-nonfinite or --on-spike."
                + f" {guard.in_a_row} steps in a row were refused."
                * (guard.in_a_row > 1)
            )
        if fault.action == "skip":
            self.reporter.event(iteration, "skip", f"skipped the batch: {what}", **facts)
            return
        if saved_at is None or folder is None:
            raise SharedError(f"iteration {iteration}: {what}. There is no checkpoint yet to roll back to.")
        self.saver.wait()
        checkpointing.restore(self.machine, folder, saved_at, verify=True)
        facts["restored_iteration"] = saved_at
        self.reporter.event(iteration, "rollback", f"weights of iteration {saved_at} again: {what}", **facts)

    def _profiled(self, iteration: int) -> AbstractContextManager[None]:
        if iteration != self.config.logging.profile_schedule:
            return nullcontext()
        path = Path(self.config.checkpoint.save or ".") / "schedule.jsonl"
        return recorded_schedule(self.machine.runtime, self.ctx, path)

    def _evaluate_if_due(self) -> None:
        interval, iteration = self.config.training.eval_interval, self.position.iteration
        due = interval > 0 and (iteration % interval == 0 or iteration == self.total_iterations)
        if due and self.datasets.valid is not None:
            self.reporter.evaluation(iteration, "valid", self._mean_loss(self.datasets.valid))

    def _final_test(self) -> None:
        if self.datasets.test is not None and self.config.training.eval_interval > 0:
            self.reporter.evaluation(self.position.iteration, "test", self._mean_loss(self.datasets.test))

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

    def _save_if_due(self, now: bool) -> None:
        interval, iteration = self.config.checkpoint.save_interval, self.position.iteration
        due = now or iteration == self.total_iterations or bool(interval and iteration % interval == 0)
        if due and self.config.checkpoint.save is not None and self.saver.saved_at != iteration:
            scalars = {"consumed_samples": self.position.consumed_samples, "faults": self.guard.state()}
            self.saver.save(iteration, scalars, dump(self.config, self.provenance))

    def _resume(self) -> Saver:
        loaded = checkpointing.load(self.machine)
        if loaded is None:
            return Saver(self.machine, None)
        self.position = Position(loaded.iteration, int(loaded.scalars["consumed_samples"]))
        if "faults" in loaded.scalars:
            self.guard.load_state(loaded.scalars["faults"])
        return Saver(self.machine, loaded.iteration if loaded.folder == self.config.checkpoint.save else None)

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
