"""Executes one rank's list of a schedule: the only file that sends activations.

    RECV_F  post a receive for a stage's input          F   stage(input) -> output
    SEND_F  send its output                             B   output.backward(gradient) -> gradient of the input
    RECV_B  post a receive for the output's gradient    I   the same, weight gradients left in the stage's queue
    SEND_B  send the gradient of its input              W   the oldest of those
    REDUCE_GRAD   sum the stage's weight gradients over their replicas

Sends and receives are posted when reached and waited for when their data are needed. Neighbouring stages on one rank
(V placement) hand tensors over. A whole model in one process is the schedule with one rank and one stage.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.gradients import GradientReducer
from megatron_moe.parallel.tokens import TokenBatch
from megatron_moe.parallel.weight_gradients import WeightGradientQueue
from megatron_moe.pipeline.actions import Action, Kind, Schedule, Step


@dataclass(frozen=True)
class Stage:
    """A part of the model on this rank: ``module(x or None, tokens)`` gives activations, or the loss at the last."""

    module: nn.Module
    reducer: GradientReducer
    queue: WeightGradientQueue | None = None


@dataclass(frozen=True)
class Recorded:
    """An action of a real run, in seconds since the start of its step."""

    action: str
    start: float
    end: float


@dataclass
class _InFlight:
    """Tensors of one step that wait for their next action, by (stage, micro-batch)."""

    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    output_grads: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    input_grads: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    receives: dict[tuple[Kind, int, int], tuple[Tensor, dist.Work]] = field(default_factory=dict)
    sends: dict[tuple[Kind, int, int], tuple[Tensor, dist.Work]] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)


def forward_only(schedule: Schedule) -> Schedule:
    """The forward part of a schedule with communication, for evaluation: a part of a deadlock-free order is one too."""
    kinds = (Kind.F, Kind.SEND_F, Kind.RECV_F)

    def forward_part(steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(action for step in steps for action in step.parts if action.kind in kinds)

    return replace(schedule, ranks=tuple(forward_part(steps) for steps in schedule.ranks))


class Runtime:
    """Runs schedules over the stages of this rank.

    Args:
        stages: this rank's stages by number.
        activation_shape: [S', B, D] of what goes between stages; the same for all of them.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        ctx: ParallelContext,
        activation_shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.stages, self.ctx = stages, ctx
        self.activation_shape, self.dtype = activation_shape, dtype
        self.current: str = "idle"  # what a report of a hang prints
        self.num_done = 0  # actions since the start of the run: whether anything moves
        self.recorded: list[Recorded] | None = None
        self._do: dict[Kind, Callable[[Action, TokenBatch | None, Schedule, _InFlight], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._backward,
            Kind.W: self._weight,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: self._receive,
            Kind.RECV_B: self._receive,
            Kind.REDUCE_GRAD: self._reduce,
        }

    def run(self, schedule: Schedule, batches: Sequence[TokenBatch]) -> Tensor:
        """Execute this rank's list.

        Args:
            schedule: with communication inserted.
            batches: the micro-batches, the same samples on every rank of the pipeline.

        Returns:
            [] float64: sum of the losses of the micro-batches; zero where the last stage is not here.
        """
        flight = _InFlight()
        begin = time.perf_counter()
        for action in schedule.actions(self.ctx.pp.rank):
            self.current, start = str(action), time.perf_counter()
            tokens = batches[action.microbatch] if action.microbatch >= 0 else None
            self._do[action.kind](action, tokens, schedule, flight)
            self.num_done += 1
            if self.recorded is not None:
                self.recorded.append(Recorded(self.current, start - begin, time.perf_counter() - begin))
        for key in list(flight.sends):
            self._has_left(key, flight)
        self.current = "idle"
        zero = torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        return torch.stack([zero, *(loss.double() for loss in flight.losses)]).sum()

    def _forward(self, action: Action, tokens: TokenBatch | None, schedule: Schedule, flight: _InFlight) -> None:
        key, last = (action.stage, action.microbatch), action.stage == schedule.num_stages - 1
        x = None
        if action.stage > 0:
            x = self._arrived(Kind.RECV_F, key, flight.inputs, flight)
            x = x.requires_grad_(torch.is_grad_enabled())
            flight.inputs[key] = x
        y = self.stages[action.stage].module(x, tokens)
        flight.outputs[key] = y
        if last:
            flight.losses.append(y.detach())
        elif schedule.rank_of(action.stage + 1) == self.ctx.pp.rank:
            flight.inputs[action.stage + 1, action.microbatch] = y.detach()

    def _backward(self, action: Action, tokens: TokenBatch | None, schedule: Schedule, flight: _InFlight) -> None:
        key, last = (action.stage, action.microbatch), action.stage == schedule.num_stages - 1
        grad = None if last else self._arrived(Kind.RECV_B, key, flight.output_grads, flight)
        self._has_left((Kind.SEND_F, *key), flight)  # the gradient has come back, so there is nothing to wait for
        stage = self.stages[action.stage]
        stage.reducer.begin_pass()
        deferring = nullcontext()
        if action.kind is Kind.I:
            assert stage.queue is not None, "a schedule that splits backward passes needs stages with a queue"
            deferring = stage.queue.defer()
        with deferring:
            torch.autograd.backward(flight.outputs.pop(key), grad)
        flight.output_grads.pop(key, None)
        if action.stage > 0:
            x_grad = flight.inputs.pop(key).grad
            assert x_grad is not None
            if schedule.rank_of(action.stage - 1) == self.ctx.pp.rank:
                flight.output_grads[action.stage - 1, action.microbatch] = x_grad
            else:
                flight.input_grads[key] = x_grad

    def _weight(self, action: Action, tokens: TokenBatch | None, schedule: Schedule, flight: _InFlight) -> None:
        stage = self.stages[action.stage]
        assert stage.queue is not None
        stage.reducer.begin_pass()
        stage.queue.drain_one()

    def _send(self, action: Action, tokens: TokenBatch | None, schedule: Schedule, flight: _InFlight) -> None:
        key = (action.stage, action.microbatch)
        if action.kind is Kind.SEND_F:
            tensor = flight.outputs[key].detach()
            if not torch.is_grad_enabled():
                del flight.outputs[key]
        else:
            tensor = flight.input_grads.pop(key)
        if action.kind is Kind.SEND_B or not torch.is_grad_enabled():
            # One in flight is enough; to wait for it is safe, for the order cannot deadlock even if every send blocks.
            for earlier in [k for k in flight.sends if k[:2] == (action.kind, action.stage)]:
                self._has_left(earlier, flight)
        tensor = tensor.contiguous()
        pp, peer = self.ctx.pp, schedule.rank_of(action.partner.stage)
        pp.traffic.add(pp.name, "send", tensor.numel() * tensor.element_size())
        work = dist.isend(tensor, pp.ranks[peer], group=pp.group)
        assert work is not None
        flight.sends[action.kind, *key] = (tensor, work)

    def _receive(self, action: Action, tokens: TokenBatch | None, schedule: Schedule, flight: _InFlight) -> None:
        buffer = torch.empty(self.activation_shape, dtype=self.dtype, device=self.ctx.device)
        pp, peer = self.ctx.pp, schedule.rank_of(action.partner.stage)
        work = dist.irecv(buffer, pp.ranks[peer], group=pp.group)
        assert work is not None
        flight.receives[action.kind, action.stage, action.microbatch] = (buffer, work)

    def _reduce(self, action: Action, tokens: TokenBatch | None, schedule: Schedule, flight: _InFlight) -> None:
        self.stages[action.stage].reducer.reduce()

    def _has_left(self, key: tuple[Kind, int, int], flight: _InFlight) -> None:
        """Let a sent tensor go, once it is on its way."""
        sent = flight.sends.pop(key, None)
        if sent is not None:
            with self.ctx.traffic.waiting():
                sent[1].wait()

    def _arrived(
        self, kind: Kind, key: tuple[int, int], handed_over: dict[tuple[int, int], Tensor], flight: _InFlight
    ) -> Tensor:
        """What another rank sent, once it is here, or what a neighbouring stage on this rank handed over."""
        posted = flight.receives.pop((kind, *key), None)
        if posted is None:
            return handed_over.pop(key)
        buffer, work = posted
        with self.ctx.traffic.waiting():
            work.wait()
        return buffer
