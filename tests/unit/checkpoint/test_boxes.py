"""Ranges as boxes, and who of the replicas writes what."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe.checkpoint.boxes import boxes, clip
from megatron_moe.checkpoint.entries import share

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_are_the_range(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    flat = np.arange(numel).reshape(shape)
    found = boxes(start, stop, shape)
    values = [flat[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].ravel() for box in found]
    assert np.concatenate([np.arange(0), *values]).tolist() == list(range(start, stop))
    assert len(found) <= max(2 * len(shape) - 1, 1)


@given(shapes, st.data())
def test_clipping_drops_the_padding(shape: tuple[int, ...], data: st.DataObject) -> None:
    limits = tuple(data.draw(st.integers(0, size)) for size in shape)
    kept = np.zeros(shape, dtype=int)
    for box in boxes(0, math.prod(shape), shape):
        region = clip(box, limits)
        if region is not None:
            kept[tuple(slice(o, o + s) for o, s in zip(*region, strict=True))] += 1
    expected = np.zeros(shape, dtype=int)
    expected[tuple(slice(0, limit) for limit in limits)] = 1
    assert np.array_equal(kept, expected)


@given(st.integers(0, 50), st.integers(1, 200), st.integers(1, 9), st.integers(0, 1000), st.integers(1, 60))
def test_replicas_share_a_range(start: int, length: int, count: int, salt: int, part: int) -> None:
    ranges = [share(start, start + length, index, count, salt, part) for index in range(count)]
    written = sorted(element for a, b in ranges for element in range(a, b))
    assert written == list(range(start, start + length))
    largest = max(b - a for a, b in ranges)
    assert largest <= max(part, -(-length // count))
