"""Quantised files as the tensors that they stand for: FP8 blocks (DeepSeek-V3) and MXFP4 (GPT-OSS), read as bfloat16.

X.weight F8_E4M3 [O, I] + X.weight_scale_inv F32 [O/128, I/128]   ->  X.weight BF16 [O, I]       block * scale
X_blocks U8 [E, O, I/32, 16] + X_scales U8 [E, O, I/32]            ->  X BF16 [E, I, O]       FP4 * 2^(s - 127)
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.convert.errors import ConversionError

_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1
_METHODS = ("fp8", "mxfp4")


class Source(Protocol):
    """Named tensors that can be read whole or by row."""

    @property
    def tensors(self) -> Mapping[str, Described]:
        """What there is."""
        ...

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one row of it."""
        ...


class Dequantised:
    """A source seen without its quantisation.

    Args:
        quantization: ``quantization_config`` of config.json, or None.

    Raises:
        ConversionError: a method that is not known.
    """

    def __init__(self, source: Source, quantization: Mapping[str, Any] | None) -> None:
        self._source = source
        method = None if quantization is None else quantization.get("quant_method")
        if quantization is not None and method not in _METHODS:
            raise ConversionError(f"the weights are quantised with {method!r}, which is not supported; {_METHODS} are.")
        self._block = tuple((quantization or {}).get("weight_block_size") or (128, 128))
        self.tensors = {k: v for name, tensor in source.tensors.items() for k, v in self._seen(name, tensor).items()}

    def _seen(self, name: str, tensor: Described) -> dict[str, Described]:
        there = self._source.tensors
        if name.endswith(_SCALE) and name.removesuffix(_SCALE) in there:
            return {}
        if name + _SCALE in there:
            return {name: Described(tensor.shape, torch.bfloat16)}
        stem = name.removesuffix(_BLOCKS)
        if stem != name and stem + _SCALES in there:
            experts, out, groups, half = tensor.shape
            return {stem: Described((experts, groups * half * 2, out), torch.bfloat16)}
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in there:
            return {}
        return {name: tensor}

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one row of it (index into dim 0), dequantised."""
        there = self._source.tensors
        if name in there and name + _SCALE in there:
            whole = _fp8(self._source.read(name), self._source.read(name + _SCALE), self._block)
            return whole if row is None else whole[row]
        if name not in there:
            values = mxfp4(self._source.read(name + _BLOCKS, row), self._source.read(name + _SCALES, row))
            return values.transpose(-1, -2)
        return self._source.read(name, row)


def _fp8(weight: Tensor, scale: Tensor, block: tuple[int, ...]) -> Tensor:
    rows, columns = weight.shape
    whole = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.to(torch.float32) * whole).to(torch.bfloat16)


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., groups, 16] bytes, [..., groups] exponents -> bfloat16 [..., 32 groups]; low halves of bytes first."""
    table = torch.tensor(_FP4, dtype=torch.bfloat16)
    values = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], -1).flatten(-2)
    return torch.ldexp(values, scales.to(torch.int32).unsqueeze(-1) - 127).flatten(-2)
