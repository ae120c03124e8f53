"""What all Triton kernels here share: block sizes and the type they compute in."""

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
