"""Tensors of a dry run: what lives on the device has a shape and a type but no data; what lives on the host is real.

    device  "meta"    activations, weights, gradients, optimizer state     shapes alone, no memory
    host    "cpu"     tokens, splits of an all-to-all, rows per expert     numbers

The project's code keeps the two apart, as it must on a GPU. Where it waits for the device to learn a number (a loss,
a norm), the dry run answers 1. Counts of routed copies are not asked of the device: ``loads.py`` knows them beforehand.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from megatron_moe.plan.live import LiveBytes, replaced

WORK = ("matmul", "attention", "touched")
_HOST_READS = {"tolist", "item", "__float__", "__int__", "__bool__"}


@dataclass
class Counted:
    """What ran.

    Attributes:
        work: FLOPs of matrix products and of attention, and bytes that all other operations read and wrote.
        live: bytes of what they made, alive now and at most.
    """

    work: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORK, 0.0))
    live: LiveBytes = field(default_factory=LiveBytes)


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


class _Functions(TorchFunctionMode):
    """Answers what the device cannot, and brings indices from the host to it."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if not any(isinstance(x, Tensor) and x.is_meta for x in args):
            return func(*args, **kwargs)
        first = args[0]
        if name in _HOST_READS:  # of tensors on the device
            return func(torch.ones(first.shape, dtype=first.dtype))
        if name == "__getitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            assert args[1].shape == first.shape  # a list of copies: how many slots are empty is not known, so none is
            return first.clone()
        args, kwargs = tree_map_only(Tensor, _on_device, (args, kwargs))
        return func(*args, **kwargs)

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

        def note(times: int) -> None:
            self.counted.work["attention"] += times * forward

        return _Attention.apply(query, key, value, note)  # type: ignore[return-value]


def _on_device(tensor: Tensor) -> Tensor:
    """The tensor on the device; one that is used again is brought there once."""
    if tensor.is_meta or tensor.dim() == 0:
        return tensor
    if not hasattr(tensor, "on_device"):
        tensor.on_device = tensor.to("meta")  # type: ignore[attr-defined]
    return tensor.on_device  # type: ignore[attr-defined]


class _Operations(TorchDispatchMode):
    """Sees every operation, those of backward passes included."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self.counted.live.note(tensor)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.counted.work["matmul"] += formula(*args, **kwargs, out_val=made)
        elif not (func.is_view or func.namespace == "c10d"):
            seen = [t for t in tree_leaves((args, kwargs, made)) if isinstance(t, Tensor) and t.is_meta]
            self.counted.work["touched"] += sum(t.numel() * t.element_size() for t in seen)
        return made


@contextmanager
def dry_device() -> Iterator[Counted]:
    """Within: the project's code runs on the meta device, and is counted."""
    counted = Counted()
    # torch cannot make a mask object while a mode watches; nobody looks at one here.
    no_masks = replaced(CausalBias, "__new__", lambda cls, variant, queries, keys: torch.empty(0))
    # A backward pass recomputes: it must not be taken for one function, inside which other functions are not seen.
    see_backward = replaced(torch.autograd, "has_torch_function", lambda tensors: False)
    with counted.live.watching(), no_masks, see_backward, _Functions(counted), _Operations(counted):
        yield counted
