"""What a checkpoint holds: logical tensors, and the boxes of them that this rank holds and writes.

    Piece: elements [start, stop) of the flattened local piece          (parallel/buckets.py)
      -> boxes of the local piece                                       (boxes.py)
      -> minus padding, plus the place of the piece in the logical tensor
      = boxes of the logical tensor, each a view into this rank's memory

Names: ``model.<parameter>``, ``model.<buffer>``, ``optimizer.<state>.<parameter>``. Every rank loads all that it holds;
exactly one of the replicas of an element writes it; several replicas share the writing of a large piece, a part each.
"""

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megatron_moe.checkpoint.boxes import boxes, clip
from megatron_moe.parallel.buckets import Piece
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import GROUP_AXES, MeshSizes, coordinates

PART_NUMEL = 1 << 20  # a piece of more elements is written by several of its replicas
MODEL = "model."


@dataclass(frozen=True)
class Box:
    """Part of a logical tensor and the view [sizes] of this rank's memory that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class Entry:
    """One logical tensor: what this rank holds of it (to load), and which part is this rank's to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    held: tuple[Box, ...]
    written: tuple[Box, ...]


def entries_of(
    pieces: Iterable[Piece],
    optimizer_state: Callable[[Piece], dict[str, Tensor]],
    buffers: dict[str, Tensor],
    ctx: ParallelContext,
) -> list[Entry]:
    """The entries of a model and its optimizer on this rank.

    Args:
        pieces: all that this rank's optimizer owns. With sharded optimizer state the weights outside of it
            are not part of the entries: gather them after loading (``GradientReducer.gather_weights``).
        optimizer_state: flat tensors [stop - start] of a piece by name. One that is the weight itself (a
            master weight of the model's own type) is not stored a second time.
        buffers: tensors by logical name that all ranks of the pipeline stage hold alike.
    """
    found: list[Entry] = []
    for piece in pieces:
        tensors = {MODEL: piece.weight}
        for state, tensor in optimizer_state(piece).items():
            if tensor.data_ptr() != piece.weight.data_ptr():
                tensors[f"optimizer.{state}."] = tensor
        found += [_entry(prefix, tensor, piece, ctx) for prefix, tensor in tensors.items()]
    for name, buffer in buffers.items():
        box = Box((0,) * buffer.dim(), tuple(buffer.shape), buffer)
        writer = ctx.stage.ranks[_salt(name) % ctx.stage.size]
        written = (box,) if ctx.rank == writer else ()
        found.append(Entry(MODEL + name, tuple(buffer.shape), buffer.dtype, (box,), written))
    names = [entry.name for entry in found]
    assert len(set(names)) == len(names), "two entries of one name on a rank"
    return found


def _entry(prefix: str, flat: Tensor, piece: Piece, ctx: ParallelContext) -> Entry:
    """A tensor that is laid out as its parameter's piece."""
    spec = piece.parameter.spec
    name = prefix + spec.name
    held = _boxes_of(flat, piece.start, piece.start, piece.stop, piece, ctx)
    written: tuple[Box, ...] = ()
    if not spec.copy:
        index, count = _replica(piece, ctx)
        start, stop = share(piece.start, piece.stop, index, count, _salt(name), PART_NUMEL)
        written = _boxes_of(flat, piece.start, start, stop, piece, ctx)
    return Entry(name, spec.shape, flat.dtype, held, written)


def _boxes_of(flat: Tensor, base: int, start: int, stop: int, piece: Piece, ctx: ParallelContext) -> tuple[Box, ...]:
    """Elements [start, stop) of a local piece as boxes of the logical tensor; element ``base`` is ``flat[0]``."""
    spec = piece.parameter.spec
    origin = [s.start for s in spec.storage_slices(ctx)]
    limits = tuple(s.stop - s.start for s in spec.logical_slices(ctx))
    found, position = [], start - base
    for offsets, sizes in boxes(start, stop, spec.local_shape(ctx)):
        numel = torch.Size(sizes).numel()
        view = flat[position : position + numel].view(sizes)
        position += numel
        kept = clip((offsets, sizes), limits)
        if kept is not None:
            place = tuple(o + place for o, place in zip(offsets, origin, strict=True))
            found.append(Box(place, kept[1], view[tuple(slice(0, size) for size in kept[1])]))
    return tuple(found)


def share(start: int, stop: int, index: int, count: int, salt: int, part_numel: int) -> tuple[int, int]:
    """The range of [start, stop) that replica ``index`` of ``count`` writes; empty if it has none.

    The range is cut into equal parts of about ``part_numel`` elements, at most one a replica; the salt says
    which replica has the first, so that small tensors spread too.
    """
    num_parts = max(1, min(count, -(-(stop - start) // part_numel)))
    part = (index - salt) % count
    if part >= num_parts:
        return start, start
    length = stop - start
    return start + length * part // num_parts, start + length * (part + 1) // num_parts


def _salt(name: str) -> int:
    return zlib.crc32(name.encode())


def _replica(piece: Piece, ctx: ParallelContext) -> tuple[int, int]:
    """(index, count) of this rank among those whose optimizer owns the same elements."""
    spec = piece.parameter.spec
    axes = [axis for axis, _ in spec.shards]
    if piece.replicas != spec.num_replicas(ctx):  # the optimizer's state is cut over the ranks of the sum, too
        axes.append(spec.sum_axis)
    ranks = _same_place(ctx.sizes, ctx.stage.ranks, ctx.rank, tuple(axes))
    assert len(ranks) == piece.replicas, f"{spec.name}: {len(ranks)} ranks hold what {piece.replicas} should"
    return ranks.index(ctx.rank), len(ranks)


@cache
def _same_place(sizes: MeshSizes, ranks: tuple[int, ...], rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    """Those of the ranks that have this rank's place on all of the axes."""

    def place(other: int) -> list[int]:
        found = []
        for axis in axes:
            view, parts = GROUP_AXES[axis]
            position = coordinates(other, sizes.view(view))
            found += [position[part] for part in parts]
        return found

    return tuple(other for other in ranks if place(other) == place(rank))
