"""A checkpoint read by one process, whatever layout wrote it: for tools, conversion and tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_moe.checkpoint.errors import CheckpointError, reading
from megatron_moe.checkpoint.folder import checkpoint_path
from megatron_moe.checkpoint.index import read_index
from megatron_moe.checkpoint.store import read_box

RUN_FILE, CONFIG_FILE = "run.json", "config.yaml"


def read_run(path: Path) -> dict[str, Any]:
    """What ``run.json`` says: iteration, time, layout that wrote it, and the scalars it was saved with.

    Raises:
        CheckpointError: it is not there or damaged.
    """
    with reading(path / RUN_FILE):
        text = (path / RUN_FILE).read_bytes()
    try:
        run = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / RUN_FILE} is damaged ({error}).") from error
    if not isinstance(run, dict) or not isinstance(run.get("scalars"), dict):
        raise CheckpointError(f"{path / RUN_FILE} is damaged: no scalars in it.")
    return run


def read_config_text(folder: str | Path, iteration: int) -> str:
    """The configuration that a checkpoint was saved with, as YAML text.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    path = checkpoint_path(folder, iteration) / CONFIG_FILE
    with reading(path):
        return path.read_text(encoding="utf-8", errors="replace")


class Checkpoint:
    """The tensors of one checkpoint by logical name, each whole."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._metadata = read_index(self.path)

    @property
    def names(self) -> Sequence[str]:
        """Logical names, sorted."""
        return sorted(self._metadata.state_dict_metadata)

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Logical shape and type of a tensor."""
        stored: Any = self._metadata.state_dict_metadata[name]
        return tuple(stored.size), stored.properties.dtype

    def read(self, name: str, row: int | None = None) -> Tensor:
        """One logical tensor, or one row of it (index into dim 0), put together from its chunks.

        Raises:
            CheckpointError: a file is missing or ends early.
        """
        shape, dtype = self.describe(name)
        whole = torch.empty(shape if row is None else (1, *shape[1:]), dtype=dtype)
        stored: Any = self._metadata.state_dict_metadata[name]
        for chunk in stored.chunks:
            where = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            skipped = (0,) * len(chunk.sizes)
            place = [slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True)]
            if row is not None:
                if not chunk.offsets[0] <= row < chunk.offsets[0] + chunk.sizes[0]:
                    continue
                skipped, place[0] = (row - chunk.offsets[0], *skipped[1:]), slice(0, 1)
            with reading(self.path / where.file), open(self.path / where.file, "rb") as stream:
                read_box(stream, where.start, chunk.sizes, dtype, skipped, whole[tuple(place)])
        return whole if row is None else whole[0]
