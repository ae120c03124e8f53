"""A range of a flattened tensor as boxes: how a ZeRO range that cuts through rows fits into a logical tensor.

shape (3, 4), elements [2, 9):     . . a a      (0, 2) + (1, 2)   tail of a row
                                   b b b b      (1, 0) + (1, 4)   whole rows
                                   c . . .      (2, 0) + (1, 1)   head of a row
"""

from math import prod

Region = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> list[Region]:
    """Elements [start, stop) of a row-major tensor as disjoint boxes (offsets, sizes), in order.

    Each box is contiguous in the flattened tensor; there are at most 2 * dims - 1 of them.
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:  # inside one row
        return _in_row(end_whole, start, stop, shape)
    found: list[Region] = []
    if start < first_whole * row:
        found += _in_row(first_whole - 1, start, first_whole * row, shape)
    if first_whole < end_whole:
        zeros = (0,) * (len(shape) - 1)
        found.append(((first_whole, *zeros), (end_whole - first_whole, *shape[1:])))
    if end_whole * row < stop:
        found += _in_row(end_whole, end_whole * row, stop, shape)
    return found


def _in_row(index: int, start: int, stop: int, shape: tuple[int, ...]) -> list[Region]:
    """Boxes of elements [start, stop) that all lie in row ``index``."""
    base = index * prod(shape[1:])
    return [((index, *o), (1, *s)) for o, s in boxes(start - base, stop - base, shape[1:])]


def clip(region: Region, limits: tuple[int, ...]) -> Region | None:
    """The part of a box below the limits, or None: what is left of it without padding."""
    offsets, sizes = region
    kept = tuple(min(o + s, limit) - o for o, s, limit in zip(offsets, sizes, limits, strict=True))
    return (offsets, kept) if all(size > 0 for size in kept) else None
