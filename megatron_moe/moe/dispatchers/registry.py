"""The dispatchers that exist, by the name that ``--moe-token-dispatcher-type`` takes."""

from collections.abc import Callable

from megatron_moe.moe.dispatchers.allgather import AllGatherDispatcher
from megatron_moe.moe.dispatchers.alltoall import AllToAllDispatcher
from megatron_moe.moe.dispatchers.base import Dispatcher
from megatron_moe.moe.dispatchers.deduplicated import DeduplicatingDispatcher
from megatron_moe.moe.dispatchers.local import LocalDispatcher
from megatron_moe.parallel.context import ParallelContext

DISPATCHERS: dict[str, Callable[[int, ParallelContext], Dispatcher]] = {
    "alltoall": AllToAllDispatcher,
    "allgather": AllGatherDispatcher,
}


def build_dispatcher(name: str, num_experts: int, ctx: ParallelContext, *, deduplicate: bool = False) -> Dispatcher:
    """The dispatcher of a name; where every expert is on every rank there is nothing to choose."""
    if ctx.ep.size == 1 and ctx.etp.size == 1:
        return LocalDispatcher(num_experts)
    return DeduplicatingDispatcher(num_experts, ctx) if deduplicate else DISPATCHERS[name](num_experts, ctx)
