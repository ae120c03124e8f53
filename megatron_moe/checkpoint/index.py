"""The index of a checkpoint: where each box of each logical tensor lies. JSON, checked on reading; no pickle.

    {"format": "megatron-moe checkpoint", "version": 1,
     "tensors": {"model.layers.0.attention.output.weight": {"dtype": "F32", "shape": [32, 32], "chunks": [
         {"offsets": [0, 0], "sizes": [32, 16], "file": "rank_00000.safetensors", "start": 1408}, ...]}}}

``dtype`` is the code of the safetensors format, in which the data files are written.
"""

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_moe.checkpoint.errors import CheckpointError, reading

INDEX_FILE = "index.json"
FORMAT = {"format": "megatron-moe checkpoint", "version": 1}
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_DATA_FILE = re.compile(r"rank_\d{5,}\.safetensors")  # a name, never a path: an index cannot point elsewhere


@dataclass(frozen=True)
class Location:
    """Where the bytes of a chunk begin."""

    file: str
    start: int


def data_file(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def index_text(metadata: Metadata, locations: dict[MetadataIndex, Location]) -> str:
    """The index as JSON text."""
    tensors = {}
    for name, tensor in sorted(metadata.state_dict_metadata.items()):
        assert isinstance(tensor, TensorStorageMetadata), f"{name} is not a tensor"
        chunks = []
        for chunk in tensor.chunks:
            where = locations[MetadataIndex(name, chunk.offsets)]
            region = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
            chunks.append({**region, "file": where.file, "start": where.start})
        tensors[name] = {
            "dtype": CODES[tensor.properties.dtype],
            "shape": list(tensor.size),
            "chunks": chunks,
        }
    return json.dumps({**FORMAT, "tensors": tensors})


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint; ``storage_data`` has a :class:`Location` for each chunk.

    Raises:
        CheckpointError: it is not there, not ours, or says what cannot be.
    """
    path = folder / INDEX_FILE
    with reading(path):
        text = path.read_bytes()
    try:
        index = json.loads(text)
        if not isinstance(index, dict) or {key: index.get(key) for key in FORMAT} != FORMAT:
            raise CheckpointError(f"{path} is not the index of a checkpoint that this version can read ({FORMAT}).")
        return _metadata(index["tensors"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}); load another iteration."
        ) from error


def _metadata(tensors: dict[str, Any]) -> Metadata:
    known: dict[str, Any] = {}
    locations: dict[MetadataIndex, Location] = {}
    for name, tensor in tensors.items():
        shape, chunks = _integers(tensor["shape"]), []
        for chunk in tensor["chunks"]:
            offsets, sizes = _integers(chunk["offsets"]), _integers(chunk["sizes"])
            inside = all(o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))
            (start,) = _integers([chunk["start"]])
            if not inside or not _DATA_FILE.fullmatch(chunk["file"]):
                raise ValueError(f"a chunk of {name} lies at {chunk}")
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            locations[MetadataIndex(name, offsets)] = Location(chunk["file"], start)
        if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
            raise ValueError(f"the chunks of {name} do not fill it")
        properties = TensorProperties(dtype=DTYPES[tensor["dtype"]])
        known[name] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    return Metadata(known, storage_data=locations)


def _integers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(v) is int and v >= 0 for v in values):
        raise ValueError(f"{values!r} is not a list of sizes")
    return tuple(values)
