"""Checkpoints in a folder: their names, and how a new one appears so that a kill at any moment is harmless.

    SAVE/iter_0000100.tmp-3f2a91c0/     1. written here, synced, measured
    SAVE/iter_0000100.replaced/         2. only if this iteration was saved before: that one steps aside
    SAVE/iter_0000100/                  3. renamed: from here on it counts
    SAVE/latest_checkpointed_iteration.txt   4. renamed over the old one

Killed before 3, the checkpoints before it are untouched; between 2 and 3, the one set aside still counts,
under its own iteration. What a kill leaves over is removed at the next save. Renaming is atomic on local file
systems, NFS and Lustre.
"""

import os
import re
import secrets
import shutil
from pathlib import Path

from megatron_moe.checkpoint.errors import CheckpointError, reading, writing

LATEST_FILE = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})(\.replaced)?")
_TEMPORARY = re.compile(r"iter_\d{7,}\.tmp-\w+")
_REPLACED = ".replaced"


def _name(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def saved_iterations(folder: str | Path) -> list[int]:
    """Iterations of the checkpoints in a folder, ascending; empty if there is no folder."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    with reading(folder):
        matches = [_NAME.fullmatch(name) for name in os.listdir(folder)]
    return sorted({int(match[1]) for match in matches if match})


def checkpoint_path(folder: str | Path, iteration: int) -> Path:
    """Folder of the checkpoint of an iteration.

    Raises:
        CheckpointError: there is none, naming those there are.
    """
    folder = Path(folder)
    for path in (folder / _name(iteration), folder / (_name(iteration) + _REPLACED)):
        if path.is_dir():
            return path
    there = ", ".join(map(str, saved_iterations(folder))) or "none"
    raise CheckpointError(f"{folder} holds no checkpoint of iteration {iteration}. Iterations there: {there}.")


def find_latest(folder: str | Path) -> int | None:
    """The iteration that ``latest_checkpointed_iteration.txt`` names, else the last one there is, else None.

    Raises:
        CheckpointError: the file names a checkpoint that is not there, or is no number.
    """
    path = Path(folder) / LATEST_FILE
    saved = saved_iterations(folder)
    if not path.exists():
        return saved[-1] if saved else None
    with reading(path):
        text = path.read_text(errors="replace").strip()
    if not text.isascii() or not text.isdigit():
        raise CheckpointError(f"{path} holds {text[:40]!r} instead of an iteration. Iterations there: {saved}.")
    if int(text) not in saved:
        raise CheckpointError(
            f"{path} names iteration {text}, which is not there. Iterations there: {saved}. Choose one with "
            f"--ckpt-step, or remove the file to take the last one."
        )
    return int(text)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, text: str) -> None:
    """Write a small file and wait until it is on disk."""
    with open(path, "w", encoding="utf-8", newline="") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def begin(folder: str | Path, iteration: int) -> Path:
    """Step 1: tidy up and make the folder to write in."""
    folder = Path(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        path = folder / f"{_name(iteration)}.tmp-{secrets.token_hex(4)}"
        path.mkdir()
    return path


def commit(written: Path, folder: str | Path, iteration: int) -> Path:
    """Steps 2 to 4: a checkpoint that is wholly written takes its place and becomes the latest."""
    folder = Path(folder)
    path, aside = folder / _name(iteration), folder / (_name(iteration) + _REPLACED)
    with writing(path):
        if path.exists():
            os.replace(path, aside)
        os.replace(written, path)
        sync_folder(folder)
        beside = folder / (LATEST_FILE + ".tmp")
        write_synced(beside, f"{iteration}\n")
        os.replace(beside, folder / LATEST_FILE)
        sync_folder(folder)
        if aside.exists():
            shutil.rmtree(aside)
    return path


def discard(written: Path) -> None:
    """Give back the space of a checkpoint that could not be finished; the next save removes what resists."""
    shutil.rmtree(written, ignore_errors=True)


def prune(folder: str | Path, iteration: int, keep_last: int, keep_every: int | None = None) -> None:
    """Remove all but the newest ``keep_last`` checkpoints up to the one just saved, and multiples of ``keep_every``.

    Later iterations are those of a run that was abandoned when an earlier one was loaded; removing them is
    the user's choice.
    """
    folder = Path(folder)
    for old in [i for i in saved_iterations(folder) if i <= iteration][:-keep_last]:
        if keep_every is not None and old % keep_every == 0:
            continue
        going = folder / f"{_name(old)}.tmp-{secrets.token_hex(4)}"
        with writing(folder):
            os.replace(checkpoint_path(folder, old), going)  # half a checkpoint must not pass for a whole one
            shutil.rmtree(going)


def _tidy(folder: Path) -> None:
    """Remove what killed saves left, and finish what they had begun."""
    for name in os.listdir(folder):
        if _TEMPORARY.fullmatch(name):
            shutil.rmtree(folder / name)
        match = _NAME.fullmatch(name)
        if match and match[2]:
            whole = folder / _name(int(match[1]))
            if whole.exists():
                shutil.rmtree(folder / name)
            else:
                os.replace(folder / name, whole)
