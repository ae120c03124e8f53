"""Writes ``.bin``/``.idx`` pairs in constant memory, and concatenates pairs.

While a pair is written it has temporary names, and the index that makes it readable gets its name last::

    PREFIX.bin.tmp  PREFIX.idx.lengths.tmp  PREFIX.idx.documents.tmp  --finalize-->  PREFIX.bin  PREFIX.idx

The layout is described in :mod:`megatron_moe.data.indexed_dataset`.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from megatron_moe.data.indexed_dataset import CHUNK, CODE_OF_DTYPE, HEADER, MAGIC, VERSION, IndexedDataset

_MAX_SEQUENCE_LENGTH = np.iinfo(np.int32).max


class IndexedDatasetBuilder:
    """Streams documents into a new pair; use as a context manager and call :meth:`finalize` at the end.

    Leaving the ``with`` block without ``finalize`` removes what was written and leaves an older pair
    untouched.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        self.num_documents = 0
        self.num_sequences = 0
        self.num_tokens = 0
        self.max_token_id = -1
        if self.dtype not in CODE_OF_DTYPE or self.dtype.kind not in "iu":
            raise ValueError(f"{prefix}: token ids cannot be stored as {self.dtype.name}")
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._temporary = {name: Path(f"{prefix}.{name}.tmp") for name in ("bin", "idx.lengths", "idx.documents")}
        self._files: dict[str, BinaryIO] = {name: path.open("wb") for name, path in self._temporary.items()}
        self._files["idx.documents"].write(np.int64(0).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)

    def add_document(self, tokens: Sequence[int] | np.ndarray, sequence_lengths: Sequence[int] | None = None) -> None:
        """Appends one document.

        Args:
            tokens: its token ids.
            sequence_lengths: how it is cut into sequences; one sequence unless given.

        Raises ValueError for an id that the dtype cannot hold and for a sequence of more than 2^31 - 1
        tokens.
        """
        ids = np.asarray(tokens, dtype=np.int64)
        lengths = np.asarray([len(ids)] if sequence_lengths is None else sequence_lengths, dtype=np.int64)
        assert lengths.sum() == len(ids), "the sequences of a document cover its tokens"
        if len(lengths) and lengths.max() > _MAX_SEQUENCE_LENGTH:
            raise ValueError(
                f"{self.prefix}: document {self.num_documents} has {len(ids)} tokens, but a sequence of "
                f"this format holds at most {_MAX_SEQUENCE_LENGTH}. Cut the document."
            )
        if len(ids):
            limits = np.iinfo(self.dtype)
            if ids.min() < limits.min or ids.max() > limits.max:
                raise ValueError(
                    f"{self.prefix}: document {self.num_documents} has token ids {ids.min()}..{ids.max()}, "
                    f"which {self.dtype.name} cannot hold"
                )
            self.max_token_id = max(self.max_token_id, int(ids.max()))
        self._files["bin"].write(ids.astype(self.dtype.newbyteorder("<")).tobytes())
        self._files["idx.lengths"].write(lengths.astype("<i4").tobytes())
        self.num_tokens += len(ids)
        self.num_sequences += len(lengths)
        self.num_documents += 1
        self._files["idx.documents"].write(np.array([self.num_sequences], "<i8").tobytes())

    def append(self, prefix: str | Path) -> None:
        """Appends all documents of another pair of the same dtype, in constant memory."""
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise ValueError(f"{prefix} holds {other.dtype.name}, {self.prefix} holds {self.dtype.name}")
        with Path(f"{prefix}.bin").open("rb") as file:
            shutil.copyfileobj(file, self._files["bin"], CHUNK)
        for start in range(0, len(other.sequence_lengths), CHUNK):
            self._files["idx.lengths"].write(other.sequence_lengths[start : start + CHUNK].tobytes())
        for start in range(1, len(other.document_indices), CHUNK):
            borders = other.document_indices[start : start + CHUNK] + self.num_sequences
            self._files["idx.documents"].write(borders.astype("<i8").tobytes())
        for start in range(0, other.num_tokens, CHUNK):
            self.max_token_id = max(
                self.max_token_id, int(other.tokens(start, min(start + CHUNK, other.num_tokens)).max())
            )
        self.num_tokens += other.num_tokens
        self.num_sequences += len(other.sequence_lengths)
        self.num_documents += other.num_documents

    def finalize(self) -> None:
        """Writes the index and gives both files their names; a crash leaves no index or a whole pair."""
        for file in self._files.values():
            _flush_to_disk(file)
        bin_path, idx_path = Path(f"{self.prefix}.bin"), Path(f"{self.prefix}.idx")
        self._temporary["idx"] = Path(f"{self.prefix}.idx.tmp")
        with self._temporary["idx"].open("wb") as index:
            self._write_index(index)
            _flush_to_disk(index)
        # An old index beside a new .bin would be a pair that reads as something it is not.
        idx_path.unlink(missing_ok=True)
        os.replace(self._temporary["bin"], bin_path)
        os.replace(self._temporary["idx"], idx_path)

    def _write_index(self, index: BinaryIO) -> None:
        code = CODE_OF_DTYPE[self.dtype]
        index.write(HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1))
        with self._temporary["idx.lengths"].open("rb") as lengths_file:
            shutil.copyfileobj(lengths_file, index, CHUNK)
            lengths_file.seek(0)
            pointer = 0
            while chunk := lengths_file.read(4 * CHUNK):
                ends = pointer + np.cumsum(np.frombuffer(chunk, "<i4").astype(np.int64) * self.dtype.itemsize)
                index.write(np.concatenate(([pointer], ends[:-1])).astype("<i8").tobytes())
                pointer = int(ends[-1])
        with self._temporary["idx.documents"].open("rb") as documents_file:
            shutil.copyfileobj(documents_file, index, CHUNK)


def merge(prefixes: Sequence[str | Path], output_prefix: str | Path) -> None:
    """Concatenates pairs, in order, into a new pair; all must hold the same dtype."""
    if not prefixes:
        raise ValueError(f"nothing to merge into {output_prefix}")
    with IndexedDatasetBuilder(output_prefix, IndexedDataset(prefixes[0]).dtype) as builder:
        for prefix in prefixes:
            builder.append(prefix)
        builder.finalize()


def _flush_to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
