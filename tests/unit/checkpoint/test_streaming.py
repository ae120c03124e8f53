"""A checkpoint from a stream of pieces: whole tensors and rows, over several files; all or nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_moe.checkpoint import Checkpoint, CheckpointError, saved_iterations
from megatron_moe.checkpoint.checksums import damage
from megatron_moe.checkpoint.streaming import Piece, write_weights
from megatron_moe.checkpoint.tensor_files import Described, TensorFile, TensorFileWriter

VALUES = {
    "bias": torch.randn(3, dtype=torch.float32),
    "experts": torch.randn(4, 2, 3).bfloat16(),
    "scalar": torch.tensor(2.5).bfloat16(),
    "odd": torch.randn(5).bfloat16(),
}
TENSORS = {name: Described(tuple(value.shape), value.dtype) for name, value in VALUES.items()}


def pieces() -> Iterator[tuple[Piece, Tensor]]:
    for name, value in VALUES.items():
        if name == "experts":
            yield from ((Piece(name, row), value[row]) for row in range(4))
        else:
            yield Piece(name), value


@pytest.mark.parametrize("file_bytes", [1, 40, 1 << 30])
def test_what_is_written_is_read(tmp_path: Path, file_bytes: int):
    path = write_weights(tmp_path, 0, TENSORS, pieces(), {"consumed_samples": 0}, "", file_bytes)
    assert damage(path) == [] and saved_iterations(tmp_path) == [0]
    assert len(list(path.glob("*.safetensors"))) == {1: 4, 40: 3, 1 << 30: 1}[file_bytes]
    checkpoint = Checkpoint(path)
    for name, value in VALUES.items():
        assert torch.equal(checkpoint.read(f"model.{name}"), value)
        for row in range(value.shape[0] if value.dim() else 0):
            assert torch.equal(checkpoint.read(f"model.{name}", row), value[row])


def test_nothing_is_left_of_half_a_stream(tmp_path: Path):
    def broken() -> Iterator[tuple[Piece, Tensor]]:
        yield next(pieces())
        raise OSError("the source is gone")

    with pytest.raises(OSError, match="gone"):
        write_weights(tmp_path, 0, TENSORS, broken(), {}, "")
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_named(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    with TensorFileWriter(path, {"w": Described((4, 3), torch.float32)}) as writer:
        for row in torch.arange(12.0).view(4, 3):
            writer.write("w", row)
    assert torch.equal(TensorFile(path).read("w", 2), torch.tensor([6.0, 7.0, 8.0]))
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"x", b"\0" * 8 + whole[8:], whole.replace(b'"F32"', b'"F99"'), b""):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"a\.safetensors"):
            TensorFile(path)
