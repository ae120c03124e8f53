"""Random numbers that belong to a token, not to a rank: counter-based, so no layout can change them.

A number is a hash of (seed, iteration, layer, use, global token index, column). It does not depend on which rank
draws it, in which order, or how often (recomputation draws the same again).
"""

import hashlib

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1


def hash_key(*parts: int | str) -> int:
    """A 64-bit key of the parts, stable across processes and versions (unlike Python's ``hash``)."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _signed(value: int) -> int:
    """The same 64 bits as a two's complement integer, which is what torch.int64 holds."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _mix(x: Tensor) -> Tensor:
    """Finaliser of splitmix64 (Steele, Lea, Flood 2014) in wrapping int64 arithmetic."""

    def shift_right(v: Tensor, bits: int) -> Tensor:  # logical, not arithmetic
        return (v >> bits) & ((1 << (64 - bits)) - 1)

    x = (x ^ shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)


def token_uniform(key: int, token_ids: Tensor, num_columns: int, dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1) for each token.

    Args:
        key: from :func:`hash_key` of seed, iteration, layer and use.
        token_ids: [...] int64 global token indices (sample index * sequence length + position).
        num_columns: numbers per token.
        dtype: float32 or float64; the float64 value of the same 24 bits, so that precision does not change decisions.

    Returns:
        [..., num_columns].
    """
    golden = _signed(0x9E3779B97F4A7C15)
    columns = torch.arange(num_columns, device=token_ids.device, dtype=torch.int64)
    counter = token_ids.unsqueeze(-1) * num_columns + columns
    bits = _mix(_mix((counter + 1) * golden + _signed(key)) + golden)
    return ((bits >> 40) & 0xFFFFFF).to(dtype) * 2.0**-24
