"""safetensors files read and written piece by piece: no more than one piece of a tensor is in memory.

    [8 bytes: length of header][header: JSON {name: dtype, shape, data_offsets}][tensor][tensor]...

Ordinary reads and writes instead of memory maps, so that the memory of a process stays what it holds.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint.checksums import Stamp
from megatron_moe.checkpoint.errors import CheckpointError, reading, writing

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # as the library has it


@dataclass(frozen=True)
class Described:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file to read from.

    Raises:
        CheckpointError: it cannot be read, is not of that format, or is shorter or longer than its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path), open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = os.fstat(stream.fileno()).st_size
            if length > min(_LONGEST_HEADER, size - 8):
                raise CheckpointError(f"{path} is not a whole safetensors file: {size} bytes, a header of {length}.")
            header = stream.read(length)
        self.tensors: dict[str, Described] = {}
        self._starts: dict[str, int] = {}
        end = 0
        try:
            for name, entry in json.loads(header).items():
                if name == "__metadata__":
                    continue
                start, stop = entry["data_offsets"]
                tensor = Described(tuple(entry["shape"]), DTYPES[entry["dtype"]])
                if stop - start != tensor.num_bytes or start < 0:
                    raise ValueError(f"{name} has {stop - start} bytes, its shape asks for {tensor.num_bytes}")
                self.tensors[name], self._starts[name] = tensor, 8 + length + start
                end = max(end, stop)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: its header cannot be read ({error}).") from error
        if size != 8 + length + end:
            raise CheckpointError(
                f"{path} is damaged: {size} bytes instead of the {8 + length + end} of its header. Copy it again."
            )

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one row of it (index into dim 0)."""
        described = self.tensors[name]
        shape, start = described.shape, self._starts[name]
        if row is not None:
            shape = shape[1:]
            start += row * prod(shape) * described.dtype.itemsize
        flat = torch.empty(prod(shape), dtype=described.dtype)
        with reading(self.path), open(self.path, "rb", buffering=0) as stream:
            stream.seek(start)
            data = memory_of(flat)
            while len(data):
                count = stream.readinto(data)
                if not count:
                    raise CheckpointError(f"{self.path} is damaged: it ends inside {name}.")
                data = data[count:]
        return flat.view(shape)


class TensorFileWriter:
    """A safetensors file in the making: tensors arrive in the order announced, each in pieces along dim 0.

    Args:
        tensors: what will be written, in order; wide types first, so that each begins at a multiple of its element's
            size, which the safetensors library needs.
        metadata: texts for the header.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Described], metadata: Mapping[str, str] | None = None) -> None:
        self.path, self._order = path, list(tensors.items())
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
        position = 0
        self.starts: dict[str, int] = {}
        for name, tensor in self._order:
            end = position + tensor.num_bytes
            offsets = [position, end]
            header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
            self.starts[name] = position
            position = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.starts = {name: 8 + len(text) + start for name, start in self.starts.items()}
        self._crc, self._length, self._current, self._left = 0, 0, -1, 0
        with writing(path):
            self._stream = open(path, "wb")  # noqa: SIM115 - closed by the context manager
        self._put(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, piece: Tensor) -> None:
        """The next piece of a tensor, in the type announced."""
        while self._left == 0:
            self._current += 1
            self._left = self._order[self._current][1].num_bytes
            if name == self._order[self._current][0]:
                break
            assert self._left == 0, f"{self.path}: {name} comes before {self._order[self._current][0]}"
        expected, tensor = self._order[self._current]
        assert (name, piece.dtype) == (expected, tensor.dtype), f"{name} {piece.dtype}, not {expected} {tensor.dtype}"
        data = memory_of(piece.detach().cpu().contiguous().view(-1))
        self._left -= len(data)
        assert self._left >= 0, f"{name} is longer than announced"
        self._put(data)

    def _put(self, data: bytes | memoryview) -> None:
        with writing(self.path):
            self._stream.write(data)
        self._crc, self._length = zlib.crc32(data, self._crc), self._length + len(data)

    @property
    def stamp(self) -> Stamp:
        """Length and checksum of what was written."""
        return Stamp(self._length, f"{self._crc:08x}")

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            unwritten = self._order[self._current + 1 :]
            assert self._left == 0 and not any(t.num_bytes for _, t in unwritten), f"{self.path} lacks tensors"
            with writing(self.path):
                self._stream.flush()
                os.fsync(self._stream.fileno())
        self._stream.close()


def memory_of(flat: Tensor) -> memoryview:
    """The bytes of a flat tensor on the host."""
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def into_files(tensors: Mapping[str, Described], max_bytes: int) -> Sequence[dict[str, Described]]:
    """Tensors in their order, cut into files of at most so many bytes (or of one tensor)."""
    files: list[dict[str, Described]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.num_bytes > max_bytes:
            files.append({})
            size = 0
        files[-1][name] = tensor
        size += tensor.num_bytes
    return files
