"""What all Triton kernels here share: block sizes, the type they compute in, and the launch."""

from typing import Any

import torch
import triton.language as tl

LARGEST_BLOCK = 2048
"""Numbers that one program holds at a time."""


def power_of_two(size: int, largest: int) -> int:
    """The smallest power of two that holds ``size``, at most ``largest``: lengths of Triton's ranges are such."""
    return min(1 << max(size - 1, 0).bit_length(), largest)


def wide(dtype: torch.dtype) -> tl.dtype:
    """float32, or float64 for float64: the type of sums and exponentials."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel over a grid of programs; over none where there is nothing to do."""
    if all(grid):
        kernel[grid](*arguments, **constants)
