"""Steps that must not count: a loss or gradient norm that is not finite, or a spike over recent steps.

    loss, norm of the global batch -> fault? -> stop       the run ends; weights as before the step
                                                skip       weights as before the step; the batch is passed over
                                                rollback   weights of the last checkpoint; the batch is passed over

Iterations and samples go on in every case, so a fault never repeats itself. All ranks decide together.
What it rests on (recent losses and norms) is stored in checkpoints: a run that resumes decides as one that was never
interrupted.
"""

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from megatron_moe.config.schema import Config
from megatron_moe.moe.gate import Gate
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training.agreement import largest

WINDOW, FEWEST = 64, 8  # steps whose median a spike stands out from; how many there must be
MOST_IN_A_ROW = 10


ACTIONS = ("none", "skip", "rollback", "stop")  # where ranks disagree, the last of theirs is taken


class SharedError(RuntimeError):
    """Ends the run on every rank alike, so that one of them tells it."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a step, in words, and what is to be done: stop, skip or rollback."""

    reason: str
    action: str


class FaultGuard:
    """Judges steps by their loss and gradient norm; remembers those of recent good ones."""

    def __init__(self, config: Config, ctx: ParallelContext) -> None:
        self._training, self._ctx = config.training, ctx
        self._recent: tuple[deque[float], deque[float]] = deque(maxlen=WINDOW), deque(maxlen=WINDOW)
        self.in_a_row = 0
        self.fault: Fault | None = None

    def accept(self, loss: float, grad_norm: float) -> bool:
        """Whether a step counts, the same on every rank; ``fault`` says why it does not."""
        found = self._judge(loss, grad_norm)
        (code,) = largest([ACTIONS.index(found.action) if found else 0], self._ctx.world, self._ctx.device)
        action = ACTIONS[code]
        self.fault = None
        if action != "none":
            self.fault = Fault(found.reason if found else "a fault by the numbers of another rank", action)
            self.in_a_row += 1
            return False
        self.in_a_row = 0
        for recent, value in zip(self._recent, (loss, grad_norm), strict=True):
            recent.append(value)
        return True

    def _judge(self, loss: float, grad_norm: float) -> Fault | None:
        training = self._training
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            if not training.check_for_nan_in_loss_and_grad:
                return None
            return Fault(f"loss {loss}, gradient norm {grad_norm}", training.on_nonfinite)
        factors = training.loss_spike_factor, training.grad_norm_spike_factor
        names = "loss", "gradient norm"
        for name, value, factor, recent in zip(names, (loss, grad_norm), factors, self._recent, strict=True):
            if factor is None or len(recent) < FEWEST:
                continue
            usual = median(recent)
            if value > factor * usual:
                why = f"more than {factor:g} times the median {usual:.6g} of the last {len(recent)} steps"
                return Fault(f"{name} {value:.6g}, {why}", training.on_spike)
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON can hold it."""
        return {"losses": list(self._recent[0]), "grad_norms": list(self._recent[1]), "in_a_row": self.in_a_row}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        for recent, name in zip(self._recent, ("losses", "grad_norms"), strict=True):
            recent.clear()
            recent.extend(state[name])
        self.in_a_row = state["in_a_row"]


def routers_that_are_not_finite(gates: dict[int, Gate], num_layers: int, ctx: ParallelContext) -> str:
    """Layers whose router scores were not finite in the last step, with how many, summed over ranks; call it on all."""
    counts_L = torch.zeros(num_layers, dtype=torch.int64, device=ctx.device)
    for layer, gate in gates.items():
        counts_L[layer] = sum(int(statistics.num_nonfinite) for statistics in gate.statistics.values())
    counts = collectives.sum_(counts_L, ctx.world).tolist()
    return ", ".join(f"layer {layer}: {count}" for layer, count in enumerate(counts) if count) or "none"
