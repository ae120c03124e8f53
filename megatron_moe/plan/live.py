"""Bytes of device storages that are alive, now and at most: a storage counts from its first tensor to its last."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within: an attribute of a class or module is another."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class LiveBytes:
    """Follows storages by weak references; a storage whose size changes (sharded weights) is followed too.

    Attributes:
        now: bytes alive.
        peak: the most that was alive since :meth:`begin`.
        sent_at_peak: what of the peak collectives had been given since :meth:`begin`, to send or to fill.
    """

    def __init__(self) -> None:
        self.now = self.peak = self.sent_at_peak = 0
        self._sent: set[int] = set()
        self._settled: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def begin(self) -> int:
        """Forget the peak; returns the bytes alive."""
        self.peak, self.sent_at_peak = self.now, 0
        self._sent.clear()
        return self.now

    def settle(self) -> None:
        """What is alive now is no buffer of a collective, whatever one does with it."""
        self._settled = set(self._sizes)

    def send(self, tensor: Tensor) -> None:
        """A collective was given the tensor."""
        key = tensor.untyped_storage()._cdata
        if key in self._sizes and key not in self._settled:
            self._sent.add(key)
            if self.now == self.peak:
                self._note_peak()

    def note(self, tensor: Tensor) -> None:
        """A tensor was made, or seen again."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._references[key] = weakref.ref(storage, partial(self._gone, key))
            self._set(key, storage.nbytes())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within: changes of a storage's size are seen. They are no operations that a mode could see."""
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)
            return resized

        with replaced(torch.UntypedStorage, "resize_", watched):
            yield

    def _gone(self, key: int, reference: Any) -> None:
        del self._references[key]
        self._set(key, None)

    def _set(self, key: int, size: int | None) -> None:
        self.now += (size or 0) - self._sizes.pop(key, 0)
        if size is not None:
            self._sizes[key] = size
        else:
            self._sent.discard(key)
        if self.now > self.peak:
            self._note_peak()

    def _note_peak(self) -> None:
        self.peak = self.now
        self.sent_at_peak = sum(self._sizes[key] for key in self._sent)
