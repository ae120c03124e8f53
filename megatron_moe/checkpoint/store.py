"""Bytes on disk: one safetensors file a rank, written in one pass and read box by box.

    rank_00003.safetensors   [8 bytes: length of header][header: JSON][chunk][chunk]...

The header follows from the plan alone, so chunks stream from the device through a buffer of bounded size. Any
safetensors reader opens the files; a chunk is named ``<logical name>@<offsets>``. Nothing in them can be
executed.
"""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megatron_moe.checkpoint.checksums import CHECKSUM_FILE, Stamp, checksum_text
from megatron_moe.checkpoint.errors import CheckpointError, reading, writing
from megatron_moe.checkpoint.folder import sync_folder, write_synced
from megatron_moe.checkpoint.index import CODES, INDEX_FILE, Location, data_file, index_text

BUFFER_BYTES = 1 << 26


@dataclass(frozen=True)
class _Written:
    """What a rank tells the coordinator of each chunk."""

    location: Location
    stamp: Stamp  # of the whole file


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class CheckpointWriter(StorageWriter):
    """Writes the chunks of this rank; the coordinator adds the index, the other texts, and all checksums.

    Args:
        path: folder of the checkpoint in the making; it exists.
        texts: further files by name.
    """

    def __init__(self, path: Path, rank: int, texts: dict[str, str]) -> None:
        self.path, self.rank, self.texts = path, rank, texts

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stream all items into this rank's file, and sync it."""
        if not plan.items:
            return _done([])
        # Wide types first, so that every chunk begins at a multiple of its element's size.
        items = sorted(plan.items, key=lambda item: -_dtype(item).itemsize)
        header, starts = _header(items)
        path, crc = self.path / data_file(self.rank), 0
        with writing(path), open(path, "wb") as stream:
            for data in (header, *(block for item in items for block in _blocks(planner.resolve_data(item)))):
                stream.write(data)
                crc = zlib.crc32(data, crc)
            stream.flush()
            os.fsync(stream.fileno())
            stamp = Stamp(stream.tell(), f"{crc:08x}")
        return _done(
            [
                WriteResult(item.index, _num_bytes(item), _Written(Location(path.name, start), stamp))
                for item, start in zip(items, starts, strict=True)
            ]
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: write all that is not tensors, look at the length of every file, sync the folder."""
        written = {result.index: result.storage_data for rank in results for result in rank}
        stamps = {w.location.file: w.stamp for w in written.values()}
        texts = {**self.texts, INDEX_FILE: index_text(metadata, {i: w.location for i, w in written.items()})}
        for name, text in texts.items():
            stamps[name] = Stamp.of(text.encode())
        for name, text in {**texts, CHECKSUM_FILE: checksum_text(stamps)}.items():
            with writing(self.path / name):
                write_synced(self.path / name, text)
        for name, stamp in stamps.items():
            with writing(self.path / name):
                found = os.stat(self.path / name).st_size
            if found != stamp.length:
                raise CheckpointError(f"{self.path / name} has {found} bytes after {stamp.length} were written.")
        with writing(self.path):
            sync_folder(self.path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As they are."""
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Writers are made by hand, never by name."""
        return False


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _num_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return prod(item.tensor_data.chunk.sizes) * _dtype(item).itemsize


def _header(items: list[WriteItem]) -> tuple[bytes, list[int]]:
    """The header of a safetensors file, and where each chunk will begin in the file."""
    described, starts, position = {}, [], 0
    for item in items:
        assert item.tensor_data is not None and item.index.offset is not None
        name = f"{item.index.fqn}@{','.join(map(str, item.index.offset))}"
        end = position + _num_bytes(item)
        described[name] = {
            "dtype": CODES[_dtype(item)],
            "shape": list(item.tensor_data.chunk.sizes),
            "data_offsets": [position, end],
        }
        starts.append(position)
        position = end
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts]


def _blocks(tensor: Any) -> Iterator[memoryview]:
    """The bytes of a tensor, at most a buffer's worth at a time in host memory."""
    flat = tensor.reshape(-1)
    for block in flat.split(BUFFER_BYTES // flat.element_size()):
        yield _bytes_of(block.cpu().contiguous())


def _bytes_of(flat: Tensor) -> memoryview:
    """The memory of a flat tensor."""
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


class CheckpointReader(StorageReader):
    """Reads parts of chunks into the memory that a planner names."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path, self.metadata = path, metadata
        self.sizes: dict[MetadataIndex, tuple[torch.Size, torch.dtype]] = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), f"{name}: the index holds tensors alone"
            for chunk in tensor.chunks:
                self.sizes[MetadataIndex(name, chunk.offsets)] = chunk.sizes, tensor.properties.dtype

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items, file by file in the order of their bytes."""
        locations: dict[MetadataIndex, Location] = self.metadata.storage_data
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(locations[item.storage_index].file, []).append(item)
        for file, items in by_file.items():
            with reading(self.path / file), open(self.path / file, "rb") as stream:
                for item in sorted(items, key=lambda item: locations[item.storage_index].start):
                    start = locations[item.storage_index].start
                    sizes, dtype = self.sizes[item.storage_index]
                    target = planner.resolve_tensor(item)
                    read_box(stream, start, sizes, dtype, item.storage_offsets, target)
                    planner.commit_tensor(item, target)
        return _done(None)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read before."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Readers are made by hand, never by name."""
        return False


def read_box(
    stream: IO[bytes],
    start: int,
    sizes: tuple[int, ...],
    dtype: torch.dtype,
    offsets: tuple[int, ...],
    target: Tensor,
) -> None:
    """Read the box [offsets, offsets + target.shape) of a chunk into ``target``.

    Args:
        start: where the chunk, of shape ``sizes`` and type ``dtype``, begins in the stream.

    Raises:
        CheckpointError: the file ends before.
    """
    if not sizes:
        sizes, offsets, target = (1,), (0,), target.view(1)
    row_bytes = prod(sizes[1:]) * dtype.itemsize
    step = max(1, BUFFER_BYTES // row_bytes)
    inner = tuple(slice(o, o + n) for o, n in zip(offsets[1:], target.shape[1:], strict=True))
    for first in range(0, target.shape[0], step):
        part = target[first : first + step]
        rows = torch.empty((part.shape[0], *sizes[1:]), dtype=dtype)
        stream.seek(start + (offsets[0] + first) * row_bytes)
        data = _bytes_of(rows.view(-1))
        if stream.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise CheckpointError(f"{stream.name} is damaged: it ends before its index says.")
        part.copy_(rows[(slice(None), *inner)])
