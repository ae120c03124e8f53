"""Checksums of the files of a checkpoint: taken while they are written, compared when they are read.

checksums.json   {"rank_00000.safetensors": {"length": 73216, "crc32": "9ab0c1d2"}, "index.json": ...}
"""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_moe.checkpoint.errors import CheckpointError, reading

CHECKSUM_FILE = "checksums.json"
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Stamp:
    """Length and checksum of a file."""

    length: int
    crc32: str

    @staticmethod
    def of(data: bytes) -> "Stamp":
        """Of bytes in memory."""
        return Stamp(len(data), f"{zlib.crc32(data):08x}")


def stamp_file(path: Path) -> Stamp:
    """Read a file through."""
    crc, length = 0, 0
    with open(path, "rb", buffering=0) as stream:
        while block := stream.read(_BLOCK):
            crc, length = zlib.crc32(block, crc), length + len(block)
    return Stamp(length, f"{crc:08x}")


def checksum_text(stamps: dict[str, Stamp]) -> str:
    """The file of checksums as JSON text."""
    return json.dumps({name: asdict(stamp) for name, stamp in sorted(stamps.items())}, indent=1)


def read_checksums(folder: Path) -> dict[str, Stamp]:
    """Checksums by file name.

    Raises:
        CheckpointError: the file is not there or damaged.
    """
    path = folder / CHECKSUM_FILE
    with reading(path):
        text = path.read_bytes()
    try:
        found = {name: Stamp(int(stamp["length"]), str(stamp["crc32"])) for name, stamp in json.loads(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}).") from error
    if any(Path(name).name != name for name in found):
        raise CheckpointError(f"{path} is damaged: it names files outside the checkpoint.")
    return found


def damage(folder: Path, share: slice = slice(None)) -> list[str]:
    """What is wrong with the files of a checkpoint, a sentence a file; empty if it is whole.

    Args:
        share: which of the files to look at, in the order of their names; ranks divide the work.
    """
    try:
        stamps = read_checksums(folder)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name, stamp in sorted(stamps.items())[share]:
        path = folder / name
        try:
            found = stamp_file(path) if path.stat().st_size == stamp.length else Stamp(path.stat().st_size, "")
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if found.length != stamp.length:
            problems.append(f"{path} is damaged: {found.length} bytes instead of {stamp.length}")
        elif found.crc32 != stamp.crc32:
            problems.append(f"{path} is damaged: checksum {found.crc32} instead of {stamp.crc32}")
    return problems
