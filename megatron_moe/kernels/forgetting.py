"""What is cheap to compute again is not kept: whoever saves an output of a function saves a note in its place.

forward pass     y = function(x), z = use(y)      what use saves of y, views included: a note
backward pass    the first note that is read:     y = function(x) once more, for all of them
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


class _Note(NamedTuple):
    """In place of a saved tensor: a view of one of the outputs that are computed again."""

    outputs: "_ForgottenOutputs"
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _ForgottenOutputs:
    """A function's outputs as its users' backward passes see it: computed again at first need, for all of them."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> None:
        self._function, self._inputs = function, inputs
        self._num_notes = self._num_read = 0
        self._again: tuple[Tensor, ...] | None = None

    def note(self, index: int, saved: Tensor) -> _Note:
        self._num_notes += 1
        return _Note(self, index, saved.size(), saved.stride(), saved.storage_offset())

    def read(self, note: _Note) -> Tensor:
        if self._again is None:
            with torch.no_grad():
                self._again = self._function(*self._inputs)
        view = self._again[note.index].as_strided(note.size, note.stride, note.offset)
        self._num_read += 1
        if self._num_read == self._num_notes:
            self._num_read, self._again = 0, None
        return view


def without_keeping(function: Callable[..., tuple[Tensor, ...]], use: Callable[..., T], *inputs: Tensor) -> T:
    """``use(*function(*inputs))``, where no backward pass inside ``use`` keeps an output of the function.

    Args:
        function: cheap, and its inputs are kept anyway. Computed again when the first of its outputs is needed.
        use: whatever it saves of those outputs, views included, is forgotten; all else is kept.
    """
    if not torch.is_grad_enabled():
        return use(*function(*inputs))
    outputs, forgotten = function(*inputs), _ForgottenOutputs(function, tuple(x.detach() for x in inputs))
    # Hooks live on: they must not hold the outputs themselves.
    known = [(y.dtype, StorageWeakRef(y.untyped_storage())) for y in outputs]

    def pack(saved: Tensor) -> Tensor | _Note:
        this = saved.dtype, StorageWeakRef(saved.untyped_storage())
        return forgotten.note(known.index(this), saved) if this in known else saved

    def unpack(kept: Any) -> Tensor:
        return kept.outputs.read(kept) if isinstance(kept, _Note) else kept

    with saved_tensors_hooks(pack, unpack):
        return use(*outputs)
