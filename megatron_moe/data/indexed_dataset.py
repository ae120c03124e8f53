"""Reads Megatron's ``.bin``/``.idx`` pairs through memory maps.

    PREFIX.bin   token ids of all sequences back to back, no header
    PREFIX.idx   little endian, nothing aligned:
                 offset        size   content
                 0             9      "MMIDIDX\\0\\0"
                 9             8      u64 version = 1
                 17            1      u8  code of the ids' dtype
                 18            8      u64 S, number of sequences
                 26            8      u64 N + 1, number of documents + 1
                 34            4S     i32 tokens in each sequence
                 34 + 4S       8S     i64 byte offset of each sequence in .bin
                 34 + 12S      8N+8   i64 first sequence of each document, and S at the end
                 (end)         S      i8  modes of multimodal data; ignored here

A document is one or more sequences. Files are the same, byte for byte, as those of ``IndexedDataset`` in
Megatron Core (``megatron/core/datasets/indexed_dataset.py``). Everything counted here is 64 bits wide.
"""

import mmap
import struct
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_OF_CODE: dict[int, type[np.number]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
CODE_OF_DTYPE = {np.dtype(dtype): code for code, dtype in DTYPE_OF_CODE.items()}
# Indices are checked and copied in pieces of this many entries, so that memory does not grow with the corpus.
CHUNK = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """Megatron's choice of the ids' dtype: uint16 below 65,500 entries, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDataset:
    """The token ids of a corpus, read from ``PREFIX.bin`` and ``PREFIX.idx`` on demand.

    Attributes:
        prefix: the path without its suffix.
        dtype: dtype of the stored ids.
        sequence_lengths: tokens in each sequence, int32 ``[S]``.
        sequence_pointers: byte offset of each sequence, int64 ``[S]``.
        document_indices: first sequence of each document and S at the end, int64 ``[N + 1]``.

    Raises ValueError, naming the file and what was expected and found, if either file is missing,
    truncated, or disagrees with the other.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        idx_path, bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path, other in ((idx_path, bin_path), (bin_path, idx_path)):
            if not path.is_file():
                hint = (
                    f"{other} exists: preprocessing did not finish, or one file of the pair was not copied."
                    if other.is_file()
                    else "A data path is given without its suffix, and names a pair of files PREFIX.bin, PREFIX.idx."
                )
                raise ValueError(f"{path} does not exist. {hint}")
        self._read_index(idx_path)
        self._map_tokens(bin_path)

    def _read_index(self, path: Path) -> None:
        index_bytes = _map_bytes(path)
        if len(index_bytes) < HEADER.size:
            raise _corrupt(path, f"expected a header of {HEADER.size} bytes, found {len(index_bytes)} bytes")
        magic, version, code, num_sequences, num_borders = HEADER.unpack_from(index_bytes)
        if magic != MAGIC:
            raise _corrupt(path, f"expected it to begin with {MAGIC!r}, found {magic!r}: not a Megatron index")
        if version != VERSION:
            raise _corrupt(path, f"expected version {VERSION}, found {version}")
        if code not in DTYPE_OF_CODE or not np.issubdtype(DTYPE_OF_CODE[code], np.integer):
            raise _corrupt(path, f"its dtype code {code} is not that of an integer type (1-5 or 8)")
        size = HEADER.size + 12 * num_sequences + 8 * num_borders
        if len(index_bytes) not in (size, size + num_sequences):
            raise _corrupt(
                path,
                f"expected {size} bytes for its {num_sequences} sequences and {num_borders} document "
                f"borders, found {len(index_bytes)} bytes",
            )
        self.dtype = np.dtype(DTYPE_OF_CODE[code])
        # frombuffer, because a typed view of a memory map would have to be aligned and offset 34 is not.
        self.sequence_lengths = np.frombuffer(index_bytes, "<i4", num_sequences, HEADER.size)
        self.sequence_pointers = np.frombuffer(index_bytes, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
        self.document_indices = np.frombuffer(index_bytes, "<i8", num_borders, HEADER.size + 12 * num_sequences)
        self._check_index(path)

    def _check_index(self, path: Path) -> None:
        """Sequences must follow each other in the .bin, and documents must cover the sequences in order."""
        borders, num_sequences = self.document_indices, len(self.sequence_lengths)
        if len(borders) == 0 or borders[0] != 0 or borders[-1] != num_sequences:
            raise _corrupt(path, f"its documents do not cover its {num_sequences} sequences")
        for start in range(0, len(borders) - 1, CHUNK):
            if np.any(np.diff(borders[start : start + CHUNK + 1]) < 0):
                raise _corrupt(path, "the first sequences of its documents are not in order")
        expected = 0
        for start in range(0, num_sequences, CHUNK):
            lengths = self.sequence_lengths[start : start + CHUNK].astype(np.int64)
            ends = expected + np.cumsum(lengths * self.dtype.itemsize)
            pointers = self.sequence_pointers[start : start + CHUNK]
            if np.any(lengths < 0) or pointers[0] != expected or np.any(pointers[1:] != ends[:-1]):
                raise _corrupt(path, f"the offsets of its sequences from {start} on do not match their lengths")
            expected = int(ends[-1])
        self.num_tokens = expected // self.dtype.itemsize

    def _map_tokens(self, path: Path) -> None:
        token_bytes = _map_bytes(path)
        expected = self.num_tokens * self.dtype.itemsize
        if len(token_bytes) != expected:
            raise _corrupt(
                path,
                f"expected {expected} bytes ({self.num_tokens} tokens of {self.dtype.name}, says "
                f"{self.prefix}.idx), found {len(token_bytes)} bytes",
            )
        self._tokens = np.frombuffer(token_bytes, self.dtype.newbyteorder("<"))

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    def document_offsets(self, documents: range) -> np.ndarray:
        """First token of each document of a consecutive range, and the last one's end: int64 ``[n + 1]``."""
        borders = self.document_indices[documents.start : documents.stop + 1]
        offsets = np.full(len(borders), self.num_tokens, dtype=np.int64)
        inside = borders < len(self.sequence_pointers)
        offsets[inside] = self.sequence_pointers[borders[inside]] // self.dtype.itemsize
        return offsets

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``start .. stop - 1`` of the corpus, a view in the stored dtype."""
        return self._tokens[start:stop]

    def document(self, document_id: int) -> np.ndarray:
        """The tokens of one document, all its sequences together, a view in the stored dtype."""
        start, stop = self.document_offsets(range(document_id, document_id + 1))
        return self.tokens(int(start), int(stop))


def _map_bytes(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        # The system refuses to map an empty file.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""


def _corrupt(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} is damaged or incomplete: {what}. Preprocess the data or copy the pair again.")
