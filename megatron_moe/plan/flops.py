"""FLOPs of a rank by part of the model: forward passes are watched module by module, all else follows from them.

forward     attention | experts (router, shared experts too) | dense feed-forward | head: all the rest
backward    twice the forward pass of each
the rest    of what was counted is recomputation
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from megatron_moe.model.block import Block
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel.tokens import TokenBatch
from megatron_moe.parallel.turns import Steps
from megatron_moe.plan.operations import Counted

PARTS = ("attention", "experts", "dense", "head")


class ForwardParts:
    """What modules compute, by part, since :meth:`begin`; what recomputations compute is in it too.

    Args:
        modules: of this rank; those of the blocks are watched.
    """

    def __init__(self, modules: Iterable[nn.Module], counted: Counted) -> None:
        self.counted = counted
        self.begin()
        for block in modules:
            if isinstance(block, Block):
                self._watch("attention", block.attention)
                if block.moe is not None:
                    self._watch_turns("experts", block.moe)
                if block.feed_forward is not None:
                    self._watch("dense", block.feed_forward)

    def begin(self) -> None:
        """Start at zero."""
        self._flops: dict[str, float] = {part: 0.0 for part in PARTS}
        self._start = self._now()

    def since(self) -> dict[str, float]:
        """FLOPs by part; what no watched module computed is the head's."""
        found = dict(self._flops)
        found["head"] = self._now() - self._start - sum(found.values())
        return found

    def _now(self) -> float:
        return self.counted.work["matmul"] + self.counted.work["attention"]

    def _watch(self, part: str, module: nn.Module) -> None:
        started = [0.0]

        def before(*arguments: Any) -> None:
            started[0] = self._now()

        def after(*arguments: Any) -> None:
            self._flops[part] += self._now() - started[0]

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _watch_turns(self, part: str, layer: MoELayer) -> None:
        """A layer that may take turns with others."""
        steps = layer.steps

        def watched(x_SBD: Tensor, tokens: TokenBatch) -> Steps:
            computation = steps(x_SBD, tokens)
            while True:
                started = self._now()
                try:
                    next(computation)
                except StopIteration as end:
                    return end.value
                finally:
                    self._flops[part] += self._now() - started
                yield

        layer.steps = watched


def training_flops(forward: dict[str, float], hardware: float) -> dict[str, float]:
    """Of forward passes by part, and all that ran: the same by part for training, with recomputation apart."""
    found = {part: 3.0 * value for part, value in forward.items()}
    found["recomputation"] = hardware - sum(found.values())
    return found
