"""Reads documents from files: plain text, JSON lines, and whatever ``datasets`` reads locally.

The work is cut into numbered parts that depend on the files alone, never on how many processes share it::

    a.jsonl (bytes 0..4M) (4M..8M) ...   b.txt c.txt d.txt     e.parquet
         0            1                        k                 k+1

Text and JSON lines are read here and not through ``datasets``, which can neither name the line of a malformed
record nor go on after it, and does not say which file holds an undecodable byte.
"""

import functools
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_GZIP_JSON_SUFFIXES = tuple(suffix + ".gz" for suffix in _JSON_SUFFIXES)
_LOADER_OF_SUFFIX = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
_COUNT_CHUNK = 1 << 20


@dataclass(frozen=True)
class Problem:
    """A document that cannot be read: where it is and what is wrong with it."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(frozen=True)
class Part:
    """A numbered piece of the input: a byte range of one file, or several whole files."""

    number: int
    files: tuple[str, ...]
    start: int = 0
    stop: int | None = None
    """Lines that begin in ``start .. stop - 1`` belong to the part; None for whole files."""


@dataclass(frozen=True)
class ReadOptions:
    """How documents are found in files."""

    json_key: str = "text"
    """Key or column that holds the text."""
    sample_by: str = "document"
    """Plain text: a whole file is one ``document``, or every ``line`` is."""


def check_inputs(files: Sequence[str]) -> list[dict[str, object]]:
    """Names, sizes and times of the input files, which identify them on a restart.

    Raises ValueError for a missing, repeated, or empty list of files.
    """
    facts = []
    for file in files:
        path = Path(file)
        if not path.is_file():
            raise ValueError(f"--input {file} {'is a folder; give its files' if path.is_dir() else 'does not exist'}.")
        if list(files).count(file) > 1:
            raise ValueError(f"--input names {file} twice.")
        stat = path.stat()
        facts.append({"file": file, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns})
    if not facts:
        raise ValueError("--input names no file.")
    return facts


def cut_into_parts(files: Sequence[str], options: ReadOptions, part_bytes: int) -> list[Part]:
    """Cuts the input into parts of about ``part_bytes`` bytes where the kind of file allows it."""
    parts: list[Part] = []
    group: list[str] = []
    group_bytes = 0

    def close_group() -> None:
        nonlocal group, group_bytes
        if group:
            parts.append(Part(len(parts), tuple(group)))
        group, group_bytes = [], 0

    for file in files:
        size = Path(file).stat().st_size
        kind = _kind(file)
        by_lines = kind == "json" or (kind == "text" and options.sample_by == "line")
        if by_lines and size > part_bytes:
            close_group()
            for start in range(0, size, part_bytes):
                parts.append(Part(len(parts), (file,), start, min(start + part_bytes, size)))
            continue
        if group_bytes + size > part_bytes:
            close_group()
        group.append(file)
        group_bytes += size
    close_group()
    return parts


def read_part(part: Part, options: ReadOptions) -> Iterator[str | Problem]:
    """The documents of a part in order; a :class:`Problem` in the place of each one that cannot be read.

    Raises ValueError for what concerns a file as a whole (not a parquet file, no such column).
    """
    for file in part.files:
        kind = _kind(file)
        if kind in ("json", "json.gz"):
            yield from _read_json_lines(file, part, options.json_key)
        elif kind == "text":
            yield from _read_text(file, part, options.sample_by)
        else:
            yield from _read_with_datasets(file, kind, options.json_key)


def _kind(file: str) -> str:
    name = Path(file).name.lower()
    if name.endswith(_JSON_SUFFIXES):
        return "json"
    if name.endswith(_GZIP_JSON_SUFFIXES):
        return "json.gz"
    return _LOADER_OF_SUFFIX.get(Path(name).suffix, "text")


def _read_json_lines(file: str, part: Part, key: str) -> Iterator[str | Problem]:
    lines = _Lines(file, part)
    for line in lines:
        if line.strip():
            yield _text_of_line(line, key, lines)


def _text_of_line(line: bytes, key: str, lines: "_Lines") -> str | Problem:
    text = _decoded(line, lines.position)
    if isinstance(text, Problem):
        return Problem(lines.place(), text.reason)
    try:
        record = json.loads(text.rstrip("\r\n"))
    except (ValueError, RecursionError) as error:
        return Problem(lines.place(), f"not JSON: {error}")
    value = _text_of_value(record, key)
    return value if isinstance(value, str) else Problem(lines.place(), value.reason)


def _text_of_value(record: object, key: str) -> str | Problem:
    if not isinstance(record, dict):
        return Problem("", f"expected an object with the key {key!r}, found {type(record).__name__}")
    if key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        return Problem("", f"no key {key!r} among {keys} (see --json-key)")
    text = record[key]
    if not isinstance(text, str):
        return Problem("", f"the value of {key!r} is not text but {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return Problem("", f"half of a surrogate pair (\\u{ord(text[error.start]):04x}) in {key!r}")
    return text


def _read_text(file: str, part: Part, sample_by: str) -> Iterator[str | Problem]:
    if sample_by == "document":
        text = _decoded(Path(file).read_bytes(), 0)
        yield text if isinstance(text, str) else Problem(file, text.reason)
        return
    lines = _Lines(file, part)
    for line in lines:
        text = _decoded(line.rstrip(b"\r\n"), lines.position)
        yield text if isinstance(text, str) else Problem(lines.place(), text.reason)


def _decoded(data: bytes, position: int) -> str | Problem:
    """The text of bytes that begin at ``position`` of their file."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        return Problem("", f"byte {position + error.start} (0x{byte:02x}) is not UTF-8: {error.reason}")


class _Lines:
    """The lines that begin inside a part; knows where the current one is."""

    def __init__(self, file: str, part: Part) -> None:
        self._file = file
        self._start = part.start
        self._stop = part.stop
        self._index = -1
        self.position = 0
        """Where the current line begins in the file, in bytes."""

    def __iter__(self) -> Iterator[bytes]:
        with _open(self._file) as stream:
            if self._start > 0:
                # The line that the border cuts belongs to the part before. If the border cuts none, this
                # reads the one byte that ends that part's last line.
                stream.seek(self._start - 1)
                self._start += len(stream.readline()) - 1
            position = self._start
            while (self._stop is None or position < self._stop) and (line := stream.readline()):
                self.position = position
                self._index += 1
                yield line
                position += len(line)

    def place(self) -> str:
        """File and number of the current line, from 1."""
        return f"{self._file}, line {_count_newlines(self._file, self._start) + self._index + 1}"


@functools.lru_cache(maxsize=1)
def _count_newlines(file: str, stop: int) -> int:
    """Newlines in the first ``stop`` bytes; read only for the line number of a problem, once a part."""
    count = 0
    with _open(file) as stream:
        while stop > 0 and (chunk := stream.read(min(stop, _COUNT_CHUNK))):
            count += chunk.count(b"\n")
            stop -= len(chunk)
    return count


def _open(file: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(file, "rb")) if file.lower().endswith(".gz") else Path(file).open("rb")


def _read_with_datasets(file: str, loader: str, key: str) -> Iterator[str | Problem]:
    import datasets

    try:
        rows = datasets.load_dataset(loader, data_files=[file], split="train", streaming=True)
        for row_number, row in enumerate(cast(Any, rows)):
            value = _text_of_value(row, key)
            yield value if isinstance(value, str) else Problem(f"{file}, row {row_number}", value.reason)
    except Exception as error:  # each of its readers has exceptions of its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{file} cannot be read as {loader}: {reason}") from error
