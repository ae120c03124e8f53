"""Checkpoints in the format of torch.distributed.checkpoint, as Megatron's ``torch_dist`` has them, read safely.

    iter_0000100/  .metadata            pickle: of each tensor its shape and chunks, of each chunk its file and place
                   __0_0.distcp ...     one torch.save after the other: chunks of tensors, and objects
                   common.pt            objects, of versions up to 0.14; now an object among the others

A pickle can run any code. These are read with a list of the few classes that such a file needs; whatever else it names
becomes an inert object. One chunk is in memory at a time.
"""

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.convert.errors import ConversionError

METADATA, LATEST, COMMON = ".metadata", "latest_checkpointed_iteration.txt", "common.pt"
_COMMON_OBJECT = "common_state/shard_0_1"
_NEEDED = {
    "torch": {"Size"} | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class Inert:
    """What stands for an object of a class that is not needed: it keeps its state and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.state: Any = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, value: Any) -> None:
        """As of a list."""

    def extend(self, values: Any) -> None:
        """As of a list."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """As of a dictionary."""

    def __hash__(self) -> int:
        return id(self)


class _Unpickler(pickle.Unpickler):
    """Knows the classes of :data:`_NEEDED` alone."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module, name) if name in _NEEDED.get(module, ()) else Inert

    def persistent_load(self, pid: Any) -> Any:
        return Inert()  # the memory of a tensor among objects


class TorchDistFolder:
    """Tensors and arguments of a checkpoint on disk.

    Args:
        path: of one checkpoint, or of a run of Megatron: its latest.

    Raises:
        ConversionError: it is not of this format, or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = _latest(Path(path))
        file = self.path / METADATA
        if not file.exists():
            raise ConversionError(f"{self.path} has no {METADATA}: it is no checkpoint of --ckpt-format torch_dist.")
        try:
            with open(file, "rb") as stream:
                metadata = _Unpickler(stream).load()
            self._stored: dict[str, Any] = metadata.state_dict_metadata
            self._places: Mapping[MetadataIndex, Any] = metadata.storage_data
            self.tensors = {
                name: Described(tuple(stored.size), stored.properties.dtype)
                for name, stored in self._stored.items()
                if isinstance(stored, TensorStorageMetadata)
            }
            missing = {p.relative_path for p in self._places.values() if not self._file(p.relative_path).is_file()}
        except Exception as error:  # a damaged pickle can raise anything
            raise ConversionError(f"{file} is damaged ({type(error).__name__}: {error}).") from error
        if missing:
            raise ConversionError(f"{self.path} lacks {', '.join(sorted(missing))}, which {METADATA} names.")

    def read(self, name: str, index: tuple[int, ...] = ()) -> Tensor:
        """A tensor, or its part at an index into the first dimensions, put together from its chunks.

        Raises:
            ConversionError: the chunks are damaged, or leave a part of the tensor out.
        """
        described = self.tensors[name]
        fixed = len(index)
        part, num_read = torch.empty(described.shape[fixed:], dtype=described.dtype), 0
        for chunk in self._stored[name].chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if all(o <= i < o + n for i, o, n in zip(index, offsets, sizes, strict=False)):
                values = self._chunk(name, offsets, sizes)[tuple(i - o for i, o in zip(index, offsets, strict=False))]
                place = tuple(slice(o, o + n) for o, n in zip(offsets[fixed:], sizes[fixed:], strict=True))
                part[place] = values
                num_read += values.numel()
        if num_read < part.numel():
            raise ConversionError(f"{self.path}: {METADATA} lacks {part.numel() - num_read:,} numbers of {name}.")
        return part

    def arguments(self) -> dict[str, Any]:
        """Megatron's arguments by name; empty where the checkpoint has none."""
        if _COMMON_OBJECT in self._stored:
            (common,) = _objects(self._bytes(MetadataIndex(_COMMON_OBJECT)), self.path)
        elif (self.path / COMMON).exists():
            common = _objects((self.path / COMMON).read_bytes(), self.path / COMMON)
        else:
            return {}
        found = common.get("args") if isinstance(common, dict) else None
        state = found.state if isinstance(found, Inert) else found
        return dict(state) if isinstance(state, dict) else {}

    def _chunk(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        data = self._bytes(MetadataIndex(name, torch.Size(offsets)))
        try:
            values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # of what is damaged, torch.load can raise anything
            raise ConversionError(f"{self.path}: a chunk of {name} is damaged ({error}).") from error
        if not isinstance(values, Tensor) or (tuple(values.shape), values.dtype) != (sizes, self.tensors[name].dtype):
            raise ConversionError(f"{self.path}: a chunk of {name} is not what {METADATA} says.")
        return values

    def _bytes(self, index: MetadataIndex) -> bytes:
        place = self._places[index]
        if getattr(place, "transform_descriptors", None):
            raise ConversionError(f"{self.path}: {index.fqn} is compressed, which is not read here.")
        with open(self._file(place.relative_path), "rb") as stream:
            stream.seek(place.offset)
            data = stream.read(place.length)
        if len(data) != place.length:
            raise ConversionError(f"{self.path / place.relative_path} is damaged: it ends inside {index.fqn}.")
        return data

    def _file(self, name: str) -> Path:
        if Path(name).name != name:
            raise ValueError(f"it names the file {name!r}")  # of another folder
        return self.path / name


def _objects(data: bytes, where: Path) -> Any:
    """What torch.save wrote, without its tensors."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
            return _Unpickler(io.BytesIO(archive.read(name))).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise ConversionError(f"{where}: the common objects are damaged ({type(error).__name__}: {error}).") from error


def _latest(path: Path) -> Path:
    if (path / METADATA).exists() or not (path / LATEST).exists():
        return path
    iteration = (path / LATEST).read_text(encoding="utf-8").strip()
    return path / (f"iter_{int(iteration):07d}" if iteration.isdigit() else iteration)
