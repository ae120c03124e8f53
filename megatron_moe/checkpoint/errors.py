"""What can go wrong with a checkpoint, told so that the user can mend it."""

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike


class CheckpointError(ValueError):
    """A checkpoint could not be saved, found, read or fitted to the model; raised on every rank alike."""


@contextmanager
def writing(path: str | PathLike[str]) -> Iterator[None]:
    """Turn an error of the file system into a message that names the path and the way out."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}. Nothing that was saved before is lost. Free some "
            f"space, mend the permissions, or give another folder in --save."
        ) from error


@contextmanager
def reading(path: str | PathLike[str]) -> Iterator[None]:
    """The same for reading."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror or error}. Every rank must see the folder under this path and "
            f"be allowed to read it; --ckpt-step loads another iteration."
        ) from error
