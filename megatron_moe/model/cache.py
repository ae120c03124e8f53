"""What attention remembers of the tokens before, so that generation computes each token once.

grouped-query attention   keys and values             [S, B, G / tp, C] twice: 2 G C / tp numbers a token and layer
latent attention          latents and rotated keys    [S, B, L + R]: L + R numbers a token and layer, on every rank

DeepSeek-V2: 576 numbers for 128 heads, which would have 128 x (192 + 128) = 40,960 keys and values; all 60 layers in
bfloat16 take 69 kB a token. Those of heads are never written out while text grows (``latent_attention.py``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from megatron_moe.model.core_attention import CoreAttention


class AttentionCache:
    """Tensors of a layer that grow along their first dim, in storage that doubles."""

    def __init__(self) -> None:
        self.length = 0
        self._stored: list[Tensor] = []

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Add rows [S_new, ...] of each; returns all rows [S, ...]."""
        start, self.length = self.length, self.length + new[0].shape[0]
        if not self._stored or self.length > self._stored[0].shape[0]:
            old = self._stored or [tensor[:0] for tensor in new]
            size = max(self.length, 2 * old[0].shape[0])
            self._stored = [tensor.new_empty(size, *tensor.shape[1:]) for tensor in new]
            for kept, before in zip(self._stored, old, strict=True):
                kept[:start] = before[:start]
        for kept, tensor in zip(self._stored, new, strict=True):
            kept[start : self.length] = tensor
        return tuple(kept[: self.length] for kept in self._stored)


@contextmanager
def caching(model: nn.Module) -> Iterator[None]:
    """Inside, each call of the model goes on from the tokens of the calls before."""
    with _caches(model, AttentionCache):
        yield


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Inside, a call knows nothing of others; afterwards the caches are as before."""
    with _caches(model, lambda: None):
        yield


@contextmanager
def _caches(model: nn.Module, make: Callable[[], AttentionCache | None]) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, CoreAttention)]
    before = [layer.cache for layer in layers]
    try:
        for layer in layers:
            layer.cache = make()
        yield
    finally:
        for layer, cache in zip(layers, before, strict=True):
            layer.cache = cache
