"""A checkpoint written by one process from a stream of pieces, such as a conversion makes them.

    [("layers.0.moe.experts.fc1", row 0), tensor], [(..., row 1), tensor], ...  ->  files, index, commit

No more than one piece is in memory. A tensor comes whole or row by row (dim 0); each piece becomes a chunk.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_moe.checkpoint import folder as folders
from megatron_moe.checkpoint.checksums import CHECKSUM_FILE, Stamp, checksum_text
from megatron_moe.checkpoint.entries import MODEL
from megatron_moe.checkpoint.errors import writing
from megatron_moe.checkpoint.index import INDEX_FILE, Location, data_file, index_text
from megatron_moe.checkpoint.offline import CONFIG_FILE, RUN_FILE
from megatron_moe.checkpoint.tensor_files import Described, TensorFileWriter, into_files
from megatron_moe.parallel.layout import MeshSizes

FILE_BYTES = 4 << 30


class Piece(NamedTuple):
    """A tensor, or one row of it (index into dim 0)."""

    name: str
    row: int | None = None


def write_weights(
    folder: str | Path,
    iteration: int,
    tensors: Mapping[str, Described],
    pieces: Iterable[tuple[Piece, Tensor]],
    scalars: dict[str, Any],
    config_text: str,
    file_bytes: int = FILE_BYTES,
) -> Path:
    """Write a checkpoint of weights alone, to be loaded with --finetune under any layout.

    Args:
        tensors: the model's weights and buffers by logical name.
        pieces: all of them in the same order, the rows of a tensor one after the other. Wide types first: then every
            tensor begins at a multiple of its element's size, as readers expect.
        scalars: further state as JSON can hold it.
        config_text: the configuration as YAML.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: it cannot be written; nothing of it is left.
    """
    written = folders.begin(folder, iteration)
    try:
        metadata, stamps = _write_pieces(written, tensors, pieces, file_bytes)
        run = {
            "iteration": iteration,
            "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "world_size": 1,
            "layout": asdict(MeshSizes()),
            "scalars": scalars,
        }
        texts = {
            RUN_FILE: json.dumps(run, indent=1),
            CONFIG_FILE: config_text,
            INDEX_FILE: index_text(metadata, metadata.storage_data),
        }
        stamps |= {name: Stamp.of(text.encode()) for name, text in texts.items()}
        for name, text in {**texts, CHECKSUM_FILE: checksum_text(stamps)}.items():
            with writing(written / name):
                folders.write_synced(written / name, text)
        with writing(written):
            folders.sync_folder(written)
        return folders.commit(written, folder, iteration)
    except BaseException:
        folders.discard(written)
        raise


def _write_pieces(
    path: Path, tensors: Mapping[str, Described], pieces: Iterable[tuple[Piece, Tensor]], file_bytes: int
) -> tuple[Metadata, dict[str, Stamp]]:
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in tensors}
    locations: dict[MetadataIndex, Location] = {}
    stamps: dict[str, Stamp] = {}
    stream = iter(pieces)
    for number, content in enumerate(into_files({MODEL + name: t for name, t in tensors.items()}, file_bytes)):
        file = data_file(number)
        with TensorFileWriter(path / file, content) as writer:
            for full_name, tensor in content.items():
                name, position = full_name.removeprefix(MODEL), writer.starts[full_name]
                end = position + tensor.num_bytes
                while position < end:
                    piece, values = next(stream)
                    assert piece.name == name, f"{piece.name} comes in the place of {name}"
                    sizes = tensor.shape if piece.row is None else (1, *tensor.shape[1:])
                    offsets = (piece.row or 0, *(0 for _ in tensor.shape[1:])) if tensor.shape else ()
                    writer.write(full_name, values)
                    chunks[name].append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                    locations[MetadataIndex(full_name, offsets)] = Location(file, position)
                    position += values.numel() * values.element_size()
        stamps[file] = writer.stamp
    known: dict[str, Any] = {
        MODEL + name: TensorStorageMetadata(TensorProperties(dtype=t.dtype), torch.Size(t.shape), chunks[name])
        for name, t in tensors.items()
    }
    return Metadata(known, storage_data=locations), stamps
