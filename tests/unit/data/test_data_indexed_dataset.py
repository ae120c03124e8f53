"""The .bin/.idx layout against bytes assembled by hand, and damaged files."""

import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_moe.data import indexed_builder, indexed_dataset
from megatron_moe.data.indexed_builder import IndexedDatasetBuilder, merge
from megatron_moe.data.indexed_dataset import IndexedDataset, token_dtype

# Three documents: one of two sequences, one empty, one of one sequence.
DOCUMENTS = [([1, 2, 3, 4, 5], [2, 3]), ([], [0]), ([65000, 7], [2])]
BIN = struct.pack("<7H", 1, 2, 3, 4, 5, 65000, 7)
IDX = (
    b"MMIDIDX\x00\x00"
    + struct.pack("<QBQQ", 1, 8, 4, 4)
    + struct.pack("<4i", 2, 3, 0, 2)
    + struct.pack("<4q", 0, 4, 10, 10)
    + struct.pack("<4q", 0, 2, 3, 4)
)


def write(prefix: Path, documents: list[tuple[list[int], list[int]]], dtype: type = np.uint16) -> Path:
    with IndexedDatasetBuilder(prefix, np.dtype(dtype)) as builder:
        for tokens, lengths in documents:
            builder.add_document(tokens, lengths)
        builder.finalize()
    return prefix


def test_bytes_are_those_of_the_layout(tmp_path: Path) -> None:
    prefix = write(tmp_path / "new" / "data", DOCUMENTS)
    assert Path(f"{prefix}.bin").read_bytes() == BIN
    assert Path(f"{prefix}.idx").read_bytes() == IDX
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["data.bin", "data.idx"]


@pytest.mark.parametrize("modes", [b"", b"\x00" * 4], ids=["text", "multimodal"])
def test_reads_a_file_assembled_by_hand(tmp_path: Path, modes: bytes) -> None:
    (tmp_path / "data.bin").write_bytes(BIN)
    (tmp_path / "data.idx").write_bytes(IDX + modes)
    data = IndexedDataset(tmp_path / "data")
    assert (data.num_documents, data.num_tokens, data.dtype) == (3, 7, np.uint16)
    assert [data.document(d).tolist() for d in range(3)] == [tokens for tokens, _ in DOCUMENTS]
    assert data.document_offsets(range(1, 3)).tolist() == [5, 5, 7]
    assert data.document_offsets(range(3, 3)).tolist() == [7]


def test_merge_equals_writing_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (indexed_builder, indexed_dataset):
        monkeypatch.setattr(module, "CHUNK", 3)  # so that chunks end inside these small files
    parts = [
        write(tmp_path / "a", DOCUMENTS[:1]),
        write(tmp_path / "none", []),
        write(tmp_path / "b", DOCUMENTS[1:] * 5),
    ]
    merge(parts, tmp_path / "merged")
    write(tmp_path / "whole", DOCUMENTS[:1] + DOCUMENTS[1:] * 5)
    for suffix in (".bin", ".idx"):
        assert Path(f"{tmp_path}/merged{suffix}").read_bytes() == Path(f"{tmp_path}/whole{suffix}").read_bytes()
    assert IndexedDataset(tmp_path / "merged").num_documents == 11
    with pytest.raises(ValueError, match="holds int32"):
        merge([tmp_path / "a", write(tmp_path / "wide", DOCUMENTS, np.int32)], tmp_path / "no")
    assert not (tmp_path / "no.idx").exists()


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    lengths = [2**31 - 1, 2**31 - 1, 4]
    pointers = [0, 2 * (2**31 - 1), 4 * (2**31 - 1)]
    total = sum(lengths)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    (tmp_path / "big.idx").write_bytes(
        header + struct.pack("<3i", *lengths) + struct.pack("<3q", *pointers) + struct.pack("<4q", 0, 1, 2, 3)
    )
    with (tmp_path / "big.bin").open("wb") as file:  # a sparse file: 8 GiB that take no space
        file.seek(pointers[2])
        file.write(struct.pack("<4H", 1, 2, 3, 4))
    data = IndexedDataset(tmp_path / "big")
    assert data.num_tokens == total > 2**32
    assert data.document(2).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        (".idx", None, r"data.idx does not exist. .*data.bin exists"),
        (".bin", None, r"data.bin does not exist. .*data.idx exists"),
        (".idx", b"", r"data.idx .* expected a header of 34 bytes, found 0 bytes"),
        (".idx", IDX[:20], r"expected a header of 34 bytes, found 20 bytes"),
        (".idx", b"PK" + IDX[2:], r"data.idx .*not a Megatron index"),
        (".idx", IDX[:9] + struct.pack("<Q", 2) + IDX[17:], r"expected version 1, found 2"),
        (".idx", IDX[:17] + b"\x07" + IDX[18:], r"dtype code 7"),
        (".idx", IDX[:-8], r"data.idx .* expected 114 bytes .* found 106 bytes"),
        (".idx", IDX[:-8] + struct.pack("<q", 3), r"documents do not cover its 4 sequences"),
        (".idx", IDX[:-24] + struct.pack("<3q", 3, 2, 4), r"not in order"),
        (".idx", IDX[:58] + struct.pack("<q", 6) + IDX[66:], r"do not match their lengths"),
        (".bin", BIN[:-2], r"data.bin .* expected 14 bytes \(7 tokens of uint16.* found 12 bytes"),
        (".bin", BIN + b"\x00\x00", r"expected 14 bytes .* found 16 bytes"),
        (".bin", b"", r"expected 14 bytes .* found 0 bytes"),
    ],
)
def test_damage_is_named(tmp_path: Path, suffix: str, content: bytes | None, message: str) -> None:
    prefix = write(tmp_path / "data", DOCUMENTS)
    path = Path(f"{prefix}{suffix}")
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        IndexedDataset(prefix)


def test_a_failed_write_leaves_the_old_pair(tmp_path: Path) -> None:
    prefix = write(tmp_path / "data", DOCUMENTS)
    for ids in ([70000], [-1]):
        with (
            pytest.raises(ValueError, match="uint16 cannot hold"),
            IndexedDatasetBuilder(prefix, np.dtype(np.uint16)) as builder,
        ):
            builder.add_document(ids)
    assert IndexedDataset(prefix).num_documents == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


def test_token_dtype_is_megatrons_choice() -> None:
    assert token_dtype(65499) == np.uint16 and token_dtype(65500) == np.int32
