"""What operations on tensors without data cost, and a memory of those met before: shapes come back in every layer.

operation + shapes, strides, types --not met--> run it on the meta device, note cost and what it made
                                   --met------> empty tensors like those that it made, the same cost
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron_moe.plan.live import LiveBytes

WORK = ("matmul", "fp8", "attention", "touched")

# Bytes that an operation reads or writes, where these are not all of its arguments and results.
_NO_BYTES = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view"}
_FILLS = {"zeros", "new_zeros", "zeros_like", "ones", "ones_like", "full", "new_full", "zero_", "fill_", "arange"}
_PICKS = {"index_select", "gather", "embedding", "index"}  # of their first argument no more than is returned
_IN_PLACE = {"add_", "sub_", "mul_", "div_", "zero_", "fill_", "copy_"}  # return their first argument


@dataclass
class Counted:
    """What ran.

    Attributes:
        work: FLOPs of matrix products, of those among them in FP8, of attention, and bytes that all other operations
            read and wrote.
        live: bytes of what they made, alive now and at most.
    """

    work: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORK, 0.0))
    live: LiveBytes = field(default_factory=LiveBytes)


class _Made(NamedTuple):
    """One result of an operation."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def again(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


class _Met(NamedTuple):
    """An operation's cost, and how to make its results again; None if it must run every time."""

    matmul: float
    touched: int
    made: tuple[_Made, ...] | None
    container: type | None


class Operations(TorchDispatchMode):
    """Sees every operation, those of backward passes included."""

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted
        self._met: dict[Any, _Met] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor):
                    self.counted.live.send(tensor)
        if func.is_view or func.namespace == "c10d":
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # in a backward pass looks at tensors would be seen as functions
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        key = (func, _described(args), _described(tuple(kwargs.items())))
        met = self._met.get(key)
        if met is not None and met.made is not None:
            made: Any = [each.again() for each in met.made]
            for tensor in made:
                self.counted.live.note(tensor)
            made = made[0] if met.container is None else met.container(made)
        else:
            made = args[0] if met is not None and _name(func) in _IN_PLACE else func(*args, **kwargs)
            tensors = [t for t in tree_leaves(made) if isinstance(t, Tensor)]
            for tensor in tensors:
                if tensor.is_meta:
                    self.counted.live.note(tensor)
            if met is None:
                met = _meet(func, args, kwargs, made, tensors)
                if all(t.is_meta for t in tensors):
                    self._met[key] = met
        self.counted.work["matmul"] += met.matmul
        self.counted.work["fp8"] += met.matmul if func is _SCALED.default else 0.0
        self.counted.work["touched"] += met.touched
        return made


@cache
def _name(func: Any) -> str:
    return func.overloadpacket.__name__


def _described(value: Any) -> Any:
    """All of an argument that the shape of a result can depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return tuple([_described(v) for v in value])
    return value.__class__, value


def _meet(func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Any, tensors: list[Tensor]) -> _Met:
    """Look at an operation that has just run for the first time on such arguments."""
    seen = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    formula = _FORMULAS.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
    matmul = formula(*args, **kwargs, out_val=made) if formula is not None else 0.0
    touched = 0 if formula is not None else _touched(_name(func), seen, tensors)
    storages = [t.untyped_storage() for t in tensors]
    theirs = {t.untyped_storage()._cdata for t in seen}
    fresh = len({s._cdata for s in storages} - theirs) == len(tensors) > 0
    container = None if isinstance(made, Tensor) else type(made)
    simple = fresh and (container is None or (container in (list, tuple) and len(made) == len(tensors)))
    specs = [_Made(t.shape, t.stride(), t.dtype) for t in tensors] if simple else []
    if not specs or any(
        s.again().untyped_storage().nbytes() != t.nbytes() for s, t in zip(specs, storages, strict=True)
    ):
        return _Met(matmul, touched, None, None)
    return _Met(matmul, touched, tuple(specs), container)


def _touched(name: str, seen: list[Tensor], made: list[Tensor]) -> int:
    """Bytes that an operation reads and writes on the device."""
    if name in _NO_BYTES:
        return 0
    if name in _FILLS:
        return _bytes(made)
    if name in _PICKS:
        return 2 * _bytes(made) + _bytes(seen[1:])
    return _bytes(made) + _bytes(seen[1:] if name == "copy_" else seen)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t.is_meta)


def _grouped_flops(rows: Tensor, matrices: Tensor, *others: Any, **named: Any) -> float:
    """[R, I] x [L, I, O], or [O, R] x [R, I] for the gradient of the matrices: every row meets one matrix."""
    return 2.0 * rows.shape[0] * rows.shape[1] * matrices.shape[-1]


def _scaled_flops(rows: Tensor, matrix: Tensor, *others: Any, **named: Any) -> float:
    """[M, K] x [K, N] in FP8."""
    return 2.0 * rows.shape[0] * rows.shape[1] * matrix.shape[1]


_SCALED = torch.ops.aten._scaled_mm_v2
_FORMULAS: dict[Any, Callable[..., float]] = {torch.ops.aten._grouped_mm: _grouped_flops, _SCALED: _scaled_flops}
