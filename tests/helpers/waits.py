"""Finds where the host waits for the device, on a machine that has none.

Every tensor is either the host's or the device's: the host's are those that were made without a device, read from the
data or fetched; what is computed of the host's alone is the host's; all others are the device's. A wait is a reading of
one of the device's, an operation whose result has a size that is data, or a copy to the device that is waited for.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import megatron_moe
from megatron_moe.plan.live import replaced

ROOT = Path(megatron_moe.__file__).parent
READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__complex__"}
SIZES_ARE_DATA = {"nonzero", "unique", "unique_consecutive", "masked_select", "bincount", "argwhere"}


def to_host(tensor: Tensor) -> Tensor:
    """Mark a tensor as the host's."""
    tensor.on_host = True  # type: ignore[attr-defined]
    return tensor


def _on_host(tensor: Tensor) -> bool:
    return getattr(tensor, "on_host", False)


class Waits(TorchFunctionMode):
    """Counts waits by (place in the package, what waits)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        host = all(map(_on_host, inputs)) if inputs else kwargs.get("device") is None
        what = self._wait(name, args, kwargs, inputs, host)
        if what is not None:
            self.found[_place(), what] += 1
        made = func(*args, **kwargs)
        moved = name == "to" and any(isinstance(x, (torch.device, str)) for x in (*args[1:], *kwargs.values()))
        if (name == "cpu" or moved) and made is args[0]:
            made = made.view_as(made)  # here both are one memory: another tensor has another place
        if name == "cpu" or (host and not moved):
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor):
                    to_host(tensor)
        return made

    def _wait(self, name: str, args: Any, kwargs: Any, inputs: list[Tensor], host: bool) -> str | None:
        if name in READS or name in SIZES_ARE_DATA:
            return None if host else name
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            return None if host or not isinstance(args[1], Tensor) else name
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            masked = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in index)
            return f"{name} by a mask" if masked and not host else None
        if name in ("tensor", "as_tensor") and kwargs.get("device") is not None:
            return f"{name} to the device"
        if name == "to" and host and inputs[0].numel() and not kwargs.get("non_blocking"):
            moved = any(isinstance(x, (torch.device, str)) for x in (*args[1:], *kwargs.values()))
            return "to the device" if moved else None
        return None


def _place() -> str:
    """``moe/gate.py Gate.forward``: the innermost function of the package that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            name = frame.f_code.co_qualname.removesuffix(".<lambda>").replace(".<locals>", "")
            return f"{path.relative_to(ROOT)} {name}"
        frame = frame.f_back
    return "elsewhere"


@contextmanager
def waits() -> Iterator[Counter[tuple[str, str]]]:
    """Within: waits are counted, those of backward passes too."""
    with replaced(torch.autograd, "has_torch_function", lambda tensors: False), Waits() as mode:
        yield mode.found
