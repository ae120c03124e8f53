"""Activations in host memory (--cpu-offloading-num-layers): what a layer saves leaves the device until it is needed.

    forward    layer 0   layer 1   layer 2            backward   layer 2   layer 1   layer 0
                  \\         \\                                        /         /
    copies         to host  to host                            layer 1   layer 0     each begun one layer ahead

On CUDA the copies run on a stream of their own beside the computation, to and from pinned memory. Parameters stay, and
so does what is small or on the host anyway. On a CPU the copies are real and gain nothing.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class Mover:
    """Copies numbers between a device and the host, on a stream of its own where the device has streams.

    Args:
        min_numel: elements of the smallest tensor that is worth a copy.
    """

    def __init__(self, device: torch.device, min_numel: int) -> None:
        self.device, self.min_numel = device, min_numel
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, whole_X: Tensor) -> Tensor | None:
        """[X] on the device -> a copy on the host, which is complete for whoever uses this mover's stream."""
        if self.device.type == "meta":  # a dry run: there is no content
            return None
        if self.stream is None:
            return whole_X.clone()
        host_X = torch.empty_like(whole_X, device="cpu", pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host_X.copy_(whole_X, non_blocking=True)
        whole_X.record_stream(self.stream)
        return host_X

    def to_device(
        self, host_X: Tensor | None, numel: int, dtype: torch.dtype
    ) -> tuple[Tensor, torch.cuda.Event | None]:
        """The copy -> the device, and when it is there (None: it is)."""
        if host_X is None:
            return torch.empty(numel, dtype=dtype, device=self.device), None
        if self.stream is None:
            return host_X.clone(), None
        with torch.cuda.stream(self.stream):
            device_X, arrival = host_X.to(self.device, non_blocking=True), torch.cuda.Event()
            arrival.record(self.stream)
        return device_X, arrival


class _Moved:
    """A storage of the device that several saved tensors may see: on the host, and for a while back again."""

    def __init__(self, saved: Tensor, mover: Mover) -> None:
        self._mover, self._dtype = mover, saved.dtype
        self._numel = saved.untyped_storage().nbytes() // saved.element_size()
        self._host_X = mover.to_host(saved.detach().as_strided((self._numel,), (1,), 0))
        self._back_X: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None
        self.num_notes = self._num_read = 0

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self._back_X is None:
            self._back_X, self._arrival = self._mover.to_device(self._host_X, self._numel, self._dtype)

    def read(self, note: "_Note") -> Tensor:
        """A saved tensor on the device again; after the last one the storage belongs to its readers."""
        self.fetch()
        assert self._back_X is not None
        if self._arrival is not None:
            current = torch.cuda.current_stream(self._mover.device)
            current.wait_event(self._arrival)
            self._back_X.record_stream(current)
        view = self._back_X.as_strided(note.size, note.stride, note.offset)
        self._num_read += 1
        if self._num_read == self.num_notes:
            self._num_read, self._back_X, self._arrival = 0, None, None
        return view


class _Note(NamedTuple):
    """In place of a saved tensor: where it is in what was moved."""

    moved: _Moved
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class OffloadedPass:
    """One pass of one micro-batch through one layer; it dies with the autograd graph.

    Args:
        layer: whose parameters stay where they are.
        below: the pass through the layer before, whose tensors the backward pass needs next; None if they stay.
    """

    def __init__(self, layer: nn.Module, mover: Mover, below: "OffloadedPass | None") -> None:
        self._layer, self._mover, self._below = layer, mover, below
        # Only notes keep what was moved, so that the host's memory goes when the graph does.
        self._moved: weakref.WeakValueDictionary[tuple[int, int, torch.dtype], _Moved] = weakref.WeakValueDictionary()
        self._seen: list[StorageWeakRef] = []
        self._in_backward = False

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``function(x)``, whose saved tensors are moved."""
        if not torch.is_grad_enabled():
            return function(x)
        self._stays = {p.untyped_storage()._cdata for p in self._layer.parameters()}
        with saved_tensors_hooks(self._pack, self._unpack):
            y = function(x)
        self._seen.clear()
        return y

    def fetch(self) -> None:
        """Begin to bring everything back, last saved first."""
        for moved in reversed(list(self._moved.values())):
            moved.fetch()

    def _pack(self, saved: Tensor) -> Tensor | _Note:
        storage = saved.untyped_storage()
        small = storage.nbytes() < self._mover.min_numel * saved.element_size()
        if small or saved.device.type != self._mover.device.type or storage._cdata in self._stays:
            return saved
        key = storage._cdata, saved._version, saved.dtype
        moved = self._moved.get(key)
        if moved is None:
            # While the reference is held, no other storage gets the same address.
            self._seen.append(StorageWeakRef(storage))
            moved = self._moved[key] = _Moved(saved, self._mover)
        moved.num_notes += 1
        return _Note(moved, saved.size(), saved.stride(), saved.storage_offset())

    def _unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Note):
            return kept
        if not self._in_backward:
            self._in_backward = True
            self.fetch()
            if self._below is not None:
                self._below.fetch()
        return kept.moved.read(kept)
