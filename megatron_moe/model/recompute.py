"""What is not kept for the backward pass but computed again: whole layers, or the modules that are named.

    full        a layer keeps its input only
    core_attn   scores, softmax and weighted values (not the projections) keep query, key and value
    mlp, moe    the feed-forward keeps the layer's residual stream; its norm, dispatch and shared expert go along
    shared_experts   the shared expert keeps its input
    norm        whoever saves a norm's output saves a note to compute it again from the residual stream

No random state is kept: random numbers are counter-based. Routing decisions are replayed (``moe/replay.py``).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron_moe.config.schema import TrainingConfig
from megatron_moe.moe.replay import record_and_replay


def recomputed_modules(config: TrainingConfig) -> frozenset[str]:
    """The names that --recompute-granularity and --recompute-modules stand for; outer ones hide those inside them."""
    if config.recompute_granularity == "full":
        return frozenset({"full"})
    if config.recompute_granularity is None:
        return frozenset()
    modules = frozenset(config.recompute_modules)
    return modules - {"shared_experts"} if "moe" in modules else modules


def recomputed(function: Callable[..., Tensor], *inputs: object) -> Tensor:
    """``function(*inputs)``, of which only the inputs are kept. It may itself be a module with parameters."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=record_and_replay)  # type: ignore[return-value]


class _Note(NamedTuple):
    """In place of a saved tensor: a view of the output that is computed again."""

    output: "_ForgottenOutput"
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _ForgottenOutput:
    """A function's output as its users' backward passes see it: computed again at first need, for all of them."""

    def __init__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> None:
        self._function, self._x = function, x
        self._num_notes = self._num_read = 0
        self._again: Tensor | None = None

    def note(self, saved: Tensor) -> _Note:
        self._num_notes += 1
        return _Note(self, saved.size(), saved.stride(), saved.storage_offset())

    def read(self, note: _Note) -> Tensor:
        if self._again is None:
            with torch.no_grad():
                self._again = self._function(self._x)
        view = self._again.as_strided(note.size, note.stride, note.offset)
        self._num_read += 1
        if self._num_read == self._num_notes:
            self._num_read, self._again = 0, None
        return view


def without_keeping(norm: Callable[[Tensor], Tensor], use: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``use(norm(x))``, where no backward pass inside ``use`` keeps the norm's output: it is computed again from ``x``.

    Args:
        norm: cheap, and keeps its input for its own backward pass.
        use: whatever it saves of the norm's output, views included, is forgotten; all else is kept.
    """
    if not torch.is_grad_enabled():
        return use(norm(x))
    y, forgotten = norm(x), _ForgottenOutput(norm, x.detach())
    dtype, storage = y.dtype, StorageWeakRef(y.untyped_storage())  # hooks live on: they must not hold y itself

    def pack(saved: Tensor) -> Tensor | _Note:
        same = saved.dtype == dtype and StorageWeakRef(saved.untyped_storage()) == storage
        return forgotten.note(saved) if same else saved

    def unpack(kept: Any) -> Tensor:
        return kept.output.read(kept) if isinstance(kept, _Note) else kept

    with saved_tensors_hooks(pack, unpack):
        return use(y)
