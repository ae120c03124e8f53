"""Silent faults known from other frameworks, planted on a rank while it runs and undone afterwards.

Each is a context manager over a ``Machine`` (``megatron_moe.training.parity.Prepare``). Its docstring names where the
fault was found: M is NVIDIA/Megatron-LM, DS deepspeedai/DeepSpeed, MB databricks/megablocks; numbers are of issues, or
of pull requests (PR).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_moe.moe import capacity
from megatron_moe.moe.gate import Gate
from megatron_moe.optim import grad_norm
from megatron_moe.parallel import collectives, tokens
from megatron_moe.parallel.buckets import Bucket
from megatron_moe.parallel.context import Axis
from megatron_moe.training import step
from megatron_moe.training.build import Machine


@contextmanager
def _balance_losses_times(factor: float) -> Iterator[None]:
    right = Gate._total

    def wrong(gate: Gate, losses: dict[str, Tensor]) -> Tensor | None:
        total = right(gate, losses)
        return None if total is None else total * factor

    with patch.object(Gate, "_total", wrong):
        yield


@contextmanager
def aux_loss_times_tp(machine: Machine) -> Iterator[None]:
    """Balance losses grow with tp (M#5047)."""
    with _balance_losses_times(machine.ctx.tp.size):
        yield


@contextmanager
def aux_loss_over_cp(machine: Machine) -> Iterator[None]:
    """Balance losses shrink with cp (M#2217, M#1652)."""
    with _balance_losses_times(1 / machine.ctx.cp.size):
        yield


@contextmanager
def aux_loss_over_dp(machine: Machine) -> Iterator[None]:
    """Averaged over data-parallel ranks twice (M#3672)."""
    with _balance_losses_times(1 / machine.ctx.dp.size):
        yield


@contextmanager
def aux_loss_times_accumulation(machine: Machine) -> Iterator[None]:
    """A mean per micro-batch is added for each of them (M#5798, MB#85)."""
    training = machine.config.training
    assert training.global_batch_size is not None
    with _balance_losses_times(training.global_batch_size // training.micro_batch_size // machine.ctx.dp.size):
        yield


@contextmanager
def counts_not_reduced(machine: Machine) -> Iterator[None]:
    """Balance losses from the counts of this rank's part of a sequence (M#7452, M#3672)."""
    right = collectives.sum_

    def wrong(tensor: Tensor, axis: Axis) -> Tensor:
        return tensor if tensor.dtype == torch.int64 and axis.name in ("seq", "cp") else right(tensor, axis)

    with patch.object(collectives, "sum_", wrong):
        yield


@contextmanager
def _reduced_over(machine: Machine, which: Callable[[Bucket], bool], axis: Axis) -> Iterator[None]:
    """The gradients of some buckets are summed over another axis."""
    buckets = [b for stage in machine.stages.values() for b in stage.reducer.buckets if which(b)]
    for bucket in buckets:
        bucket.axis = axis
    yield


@contextmanager
def expert_gradients_over_dense_group(machine: Machine) -> Iterator[None]:
    """Experts are reduced like dense parameters (M#5916, M#1622)."""
    with _reduced_over(machine, lambda b: b.parameters[0].spec.expert, machine.ctx.dp_cp):
        yield


@contextmanager
def partial_gradients_not_over_tp(machine: Machine) -> Iterator[None]:
    """Router and norm weights see a tp-th of the tokens each, and nobody adds up (transformers#48205, M#1446)."""
    with _reduced_over(machine, lambda b: b.parameters[0].spec.partial_tp, machine.ctx.dp_cp):
        yield


@contextmanager
def qk_norm_not_over_tp(machine: Machine) -> Iterator[None]:
    """Norms of queries and keys, which Megatron-LM finds by a part of their name, under another name."""
    right = step.gradient_norm
    names = ("query_norm", "key_norm")

    def wrong(pieces: Any, ctx: Any) -> float:
        for piece in pieces:  # what one rank alone would have, up to its own share
            if any(name in piece.parameter.spec.name for name in names):
                piece.grad.div_(ctx.tp.size)
        return right(pieces, ctx)

    with patch.object(step, "gradient_norm", wrong):
        yield


@contextmanager
def norm_without_experts(machine: Machine) -> Iterator[None]:
    """The clipping norm leaves experts out (M#5916, DS PR#8613)."""
    right = grad_norm.squared_sums

    def wrong(pieces: Any, device: torch.device) -> Tensor:
        return right([p for p in pieces if not p.parameter.spec.expert], device)

    with patch.object(grad_norm, "squared_sums", wrong):
        yield


@contextmanager
def norm_counts_replicas(machine: Machine) -> Iterator[None]:
    """Replicated parameters are counted once per rank (DS#8475, Tutel#293)."""
    right = grad_norm.squared_sums

    def wrong(pieces: Any, device: torch.device) -> Tensor:
        return right([replace(p, replicas=1) for p in pieces], device)

    with patch.object(grad_norm, "squared_sums", wrong):
        yield


@contextmanager
def mean_of_local_means(machine: Machine) -> Iterator[None]:
    """Each rank divides by its own valid tokens, and means are averaged (M#7452, M#673)."""
    right = step.token_batches

    def wrong(batches: Any, machine: Machine, *args: Any, **kwargs: Any) -> Any:
        made = right(batches, machine, *args, **kwargs)
        own = sum(float(batch.loss_mask.sum()) for batch in batches) * machine.ctx.dp.size
        return [replace(b, step=replace(b.step, num_loss_tokens=own)) for b in made]

    with patch.object(step, "token_batches", wrong):
        yield


@contextmanager
def capacity_by_rank(machine: Machine) -> Iterator[None]:
    """Copies are dropped among the tokens that a rank happens to hold (DS#1658, M#1513, the usual capacity)."""
    right = capacity.apply_capacity

    def wrong(choice: Any, slots: int, *args: Any) -> Any:
        halves = [type(choice)(*(None if v is None else v.chunk(2, 1)[i] for v in choice)) for i in range(2)]
        done = [right(half, (slots + 1) // 2, *args) for half in halves]
        return type(choice)(*(None if a is None else torch.cat([a, b], 1) for a, b in zip(*done, strict=True)))

    with patch.object(capacity, "apply_capacity", wrong):
        yield


@contextmanager
def tied_gradient_not_summed(machine: Machine) -> Iterator[None]:
    """First and last stage update their copies of a tied embedding by their own gradients alone."""
    with patch.object(Bucket, "sum_copies", lambda bucket, ends: None):
        yield


@contextmanager
def random_numbers_by_rank(machine: Machine) -> Iterator[None]:
    """Jitter, coins and dropout depend on the rank (M#2658: random state of the wrong rank)."""
    right, rank = tokens.token_uniform, machine.ctx.rank

    def wrong(key: int, *args: Any) -> Tensor:
        return right(key + rank, *args)

    with patch.object(tokens, "token_uniform", wrong):
        yield


@contextmanager
def bias_from_local_counts(machine: Machine) -> Iterator[None]:
    """Every rank moves the selection bias by the load that it sees (M#7081: counts not of all tokens)."""
    right = collectives.sum_

    def wrong(tensor: Tensor, axis: Axis) -> Tensor:
        return tensor if tensor.dtype == torch.int64 and axis.name == "stage" else right(tensor, axis)

    with patch.object(collectives, "sum_", wrong):
        yield


@contextmanager
def all_to_all_gradient_lost(machine: Machine) -> Iterator[None]:
    """A rank without rows cuts the graph; here what the first peer sends is lost (PaddleFormers PR#3010)."""
    right = collectives._Exchange.wait

    def wrong(exchange: Any) -> Tensor:
        received = right(exchange)
        received[: exchange.receive[0]] = 0.0
        return received

    with patch.object(collectives._Exchange, "wait", wrong):
        yield
