"""A Hugging Face folder to read from, and one in the making: tensors, index, config.json, and what travels along.

model.safetensors                                    or
model-00001-of-00003.safetensors ... + model.safetensors.index.json
config.json  generation_config.json  tokenizer*  chat_template*  ...
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_moe.checkpoint import CheckpointError
from megatron_moe.checkpoint.tensor_files import Described, TensorFile, TensorFileWriter, into_files
from megatron_moe.convert.errors import ConversionError, listed

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model",
)  # fmt: skip
COMPANIONS = (*TOKENIZER_FILES, "chat_template.jinja", "chat_template.json", "generation_config.json")
"""Files that belong to a model beside its weights; also all code (``*.py``) of a model that brings its own."""
SHARD_BYTES = 5 << 30


class HuggingFaceFolder:
    """Configuration and tensors of a model on disk.

    Raises:
        ConversionError: no config.json; files and index that disagree; a file that is cut off.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = read_json(self.path / CONFIG)
        self._files = {name: _opened(self.path / name) for name in self._file_names()}
        self.tensors: dict[str, Described] = {}
        self._where: dict[str, TensorFile] = {}
        for file in self._files.values():
            twice = sorted(file.tensors.keys() & self.tensors.keys())
            if twice:
                raise ConversionError(listed(f"{file.path} holds again what another file holds", twice))
            self.tensors |= file.tensors
            self._where |= dict.fromkeys(file.tensors, file)
        self._check_index()

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one row of it (index into dim 0)."""
        try:
            return self._where[name].read(name, row)
        except CheckpointError as error:
            raise ConversionError(str(error)) from error

    def companions(self) -> list[Path]:
        """Tokenizer, generation settings, chat template, code."""
        return companions_of(self.path)

    def _file_names(self) -> list[str]:
        if (self.path / INDEX).exists():
            return sorted(set(self._index().values()))
        if (self.path / SINGLE).exists():
            return [SINGLE]
        others = sorted(p.name for p in self.path.glob("*.safetensors"))
        if others:
            raise ConversionError(
                f"{self.path} holds {', '.join(others[:3])}{', ...' if others[3:] else ''} but no {INDEX}: nothing "
                "says whether files are missing. Copy the index as well."
            )
        bins = sorted(self.path.glob("*.bin"))
        advice = (
            " Convert its .bin files with transformers: save_pretrained(..., safe_serialization=True)." if bins else ""
        )
        raise ConversionError(f"{self.path} holds no safetensors files.{advice}")

    def _index(self) -> dict[str, str]:
        index = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(f, str) and Path(f).name == f for f in index.values()):
            raise ConversionError(f"{self.path / INDEX} is damaged: it has no weight_map of names to files.")
        return index

    def _check_index(self) -> None:
        if not (self.path / INDEX).exists():
            return
        index = self._index()
        wrong = sorted(n for n, f in index.items() if n not in self._files[f].tensors)
        extra = sorted(self.tensors.keys() - index.keys())
        problems = [
            listed(f"named in {INDEX} but not in its file", wrong),
            listed(f"in the files but not in {INDEX}", extra),
        ]
        if any(problems):
            raise ConversionError(f"{self.path}: " + "; ".join(filter(None, problems)))


def _opened(path: Path) -> TensorFile:
    try:
        return TensorFile(path)
    except CheckpointError as error:
        hint = "" if path.exists() else f" {INDEX} names it: copy the missing file."
        raise ConversionError(f"cannot read {path}: no such file.{hint}" if hint else str(error)) from error


def companions_of(path: Path) -> list[Path]:
    """The files of a folder that belong to a model beside its weights."""
    return [p for p in sorted(path.iterdir()) if p.is_file() and (p.name in COMPANIONS or p.suffix == ".py")]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConversionError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConversionError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{path} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ConversionError(f"{path} is not a JSON object.")
    return value


@contextmanager
def finished_folder(path: str | Path) -> Iterator[Path]:
    """A folder that appears under its name only when it is whole.

    Raises:
        ConversionError: the name is taken by a folder that holds something.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConversionError(f"{path} is there and not empty: remove it, or give another folder.")
    made = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        made.mkdir(parents=True)
        yield made
        if path.exists():
            path.rmdir()
        os.replace(made, path)
    except OSError as error:
        raise ConversionError(f"cannot write {path}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def write_tensors(
    folder: Path, tensors: Mapping[str, Described], pieces: Iterator[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors as transformers does: one file, or shards with an index of what was written.

    Args:
        tensors: what will come, in order, wide types first.
        pieces: (name, piece along dim 0) in the same order.
    """
    shards = into_files(tensors, shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]  # fmt: skip
    weight_map: dict[str, str] = {}
    for file, content in zip(names, shards, strict=True):
        with TensorFileWriter(folder / file, content, {"format": "pt"}) as writer:
            for name, tensor in content.items():
                left = tensor.num_bytes
                while left > 0:
                    written, piece = next(pieces)
                    assert written == name, f"{written} comes in the place of {name}"
                    writer.write(name, piece)
                    left -= piece.numel() * piece.element_size()
                weight_map[name] = file
    if len(shards) > 1:
        numel = sum(t.num_bytes // t.dtype.itemsize for t in tensors.values())
        size = sum(t.num_bytes for t in tensors.values())
        index = {
            "metadata": {"total_parameters": numel, "total_size": size},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
