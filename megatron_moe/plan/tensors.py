"""Tensors of a dry run: what lives on the device has a shape and a type but no data; what lives on the host is real.

    device  "meta"    activations, weights, gradients, optimizer state     shapes alone, no memory
    host    "cpu"     tokens, splits of an all-to-all, rows per expert     numbers

The project's code keeps the two apart, as it must on a GPU. What runs are a GPU's operations (a norm is one, which
keeps less than a CPU's several), or a CPU's where the backend is gloo. Where the code waits for the device to learn a
number (a loss, a norm), the dry run answers 1. Counts of routed copies are not asked of the device: ``loads.py`` knows
them beforehand.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode

from megatron_moe.kernels import quantisation
from megatron_moe.kernels.norm import rms_norm
from megatron_moe.kernels.quantisation import BLOCK, Quantised
from megatron_moe.plan.live import replaced
from megatron_moe.plan.operations import Counted, Operations

_HOST_READS = {"tolist", "item", "__float__", "__int__", "__bool__"}


class _Attention(torch.autograd.Function):
    """Fused attention as GPUs run it: keeps its inputs, its output and one number per query and head."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q_BHQC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, flops: Callable[[int], None]
    ) -> Tensor:
        flops(1)
        batch, heads, queries, _ = q_BHQC.shape
        y_BQHC = v_BGSC.new_empty(batch, queries, heads, v_BGSC.shape[-1])
        y_BHQC, log_sums_BHQ = y_BQHC.transpose(1, 2), q_BHQC.new_empty(batch, heads, queries, dtype=torch.float32)
        ctx.save_for_backward(q_BHQC, k_BGSC, v_BGSC, y_BHQC, log_sums_BHQ)
        ctx.flops = flops  # type: ignore[attr-defined]
        return y_BHQC

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_BHQC, k_BGSC, v_BGSC, *_ = ctx.saved_tensors  # type: ignore[attr-defined]
        ctx.flops(2)  # type: ignore[attr-defined]
        return torch.empty_like(q_BHQC), torch.empty_like(k_BGSC), torch.empty_like(v_BGSC), None


class _RootMeanSquareNorm(torch.autograd.Function):
    """A norm as GPUs run it: keeps its input and one number per row."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, touched: Callable[[int], None]) -> Tensor:
        touched(2 * x.numel() * x.element_size())
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        ctx.touched = touched  # type: ignore[attr-defined]
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        ctx.touched(3 * x.numel() * x.element_size())  # type: ignore[attr-defined]
        return torch.empty_like(x), torch.empty_like(weight), None


class _Functions(TorchFunctionMode):
    """Answers what the device cannot, and brings indices from the host to it."""

    def __init__(self, counted: Counted, gpu: bool) -> None:
        super().__init__()
        self.counted, self.gpu = counted, gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is F.rms_norm:
            return self._norm(*args, **kwargs)
        if name == "__get__" or not any(isinstance(x, Tensor) and x.is_meta for x in args):
            return func(*args, **kwargs)
        first = args[0]
        if name in _HOST_READS:  # of tensors on the device
            return func(torch.ones(first.shape, dtype=first.dtype))
        if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            assert args[1].shape == first.shape  # a list of copies: how many slots are empty is not known, so none is
            return first.clone()
        return func(*_on_device(args), **{key: _on_device(value) for key, value in kwargs.items()})

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        """Counted causal: a query meets half of its own queries' keys, and all keys before them."""
        num_queries, num_keys = query.shape[-2], key.shape[-2]
        pairs = num_queries * (num_keys - num_queries / 2)
        forward = 2.0 * query.shape[0] * query.shape[1] * (query.shape[-1] + value.shape[-1]) * pairs
        return _Attention.apply(query, key, value, lambda times: self._note("attention", times * forward))  # type: ignore[return-value]

    def _norm(self, x: Tensor, normalized_shape: Any, weight: Tensor, eps: float) -> Any:
        if not self.gpu:
            return rms_norm(x, weight, eps)
        return _RootMeanSquareNorm.apply(x, weight, partial(self._note, "touched"))

    def _note(self, kind: str, amount: float) -> None:
        self.counted.work[kind] += amount


def _on_device(value: Any) -> Any:
    """Tensors in arguments, on the device; one that is used again is brought there once."""
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)([_on_device(v) for v in value])
    if not isinstance(value, Tensor) or value.is_meta or value.dim() == 0:
        return value
    if not hasattr(value, "on_device"):
        value.on_device = value.to("meta")  # type: ignore[attr-defined]
    return value.on_device  # type: ignore[attr-defined]


def _quantisation(counted: Counted, tile: tuple[int, int]) -> Callable[[Tensor, torch.dtype], Quantised]:
    """FP8 numbers as GPUs make them, in one pass, with a scale for each tile."""

    def quantise(x: Tensor, form: torch.dtype) -> Quantised:
        sizes = [math.ceil(size / part) for size, part in zip(x.shape[-2:], tile, strict=True)]
        made = Quantised(x.new_empty(x.shape, dtype=form), x.new_empty(*x.shape[:-2], *sizes, dtype=torch.float32))
        counted.work["touched"] += sum(t.numel() * t.element_size() for t in (x, *made))
        return made

    return quantise


@contextmanager
def dry_device(gpu: bool) -> Iterator[Counted]:
    """Within: the project's code runs on the meta device, and is counted; ``gpu``: as it runs on a GPU, not a CPU."""
    counted = Counted()
    # torch cannot make a mask object while a mode watches; nobody looks at one here.
    no_masks = replaced(CausalBias, "__new__", lambda cls, variant, queries, keys: torch.empty(0))
    # A backward pass recomputes: it must not be taken for one function, inside which other functions are not seen.
    see_backward = replaced(torch.autograd, "has_torch_function", lambda tensors: False)
    with ExitStack() as stack:
        if gpu:
            for name, tile in (("quantise_rows", (1, BLOCK)), ("quantise_blocks", (BLOCK, BLOCK))):
                stack.enter_context(replaced(quantisation, name, _quantisation(counted, tile)))
        for each in (counted.live.watching(), no_masks, see_backward, _Functions(counted, gpu), Operations(counted)):
            stack.enter_context(each)
        yield counted
