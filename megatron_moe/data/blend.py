"""Weighted blends of datasets: which dataset gives sample i of the run, and which of its samples.

Dataset d with weight w_d (weights sum to 1) wants its k-th sample drawn at time (k + 1/2) / w_d; the blend
is all draws sorted by time. Weights 1/2 and 1/4 and 1/4::

    d = 0    .  1     3     5     7          times 1, 3, 5, 7
    d = 1    .     2           6             times 2, 6
    d = 2    .     2           6       ->    blend  0 1 2 0 0 1 2 0 ...

This is a close relative of Megatron's greedy rule: at every step the dataset that lags most behind its share
is drawn, where the lag is measured as w_d / (drawn_d + 1/2) (the method of Webster and Sainte-Lague for
sharing out seats) instead of as a difference. It has a closed form: sample i follows from (weights, i)
alone, without replaying the samples before it. After n samples dataset d has given n * w_d of them, to
within (1 + D * w_d) / 2 for D datasets.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

_CHUNK = 4096


class SampleSource(Protocol):
    """Something that gives sample i for every i >= 0, as a pure function of i."""

    name: str

    def __getitem__(self, sample_id: int) -> np.ndarray: ...


def parse_data_path(values: Sequence[str], flag: str = "--data-path") -> tuple[tuple[float, str], ...]:
    """Reads ``("prefix",)`` or ``("w1", "p1", "w2", "p2", ...)`` into (weight, prefix) pairs.

    Raises ValueError, naming the flag and the position, for anything else.
    """
    usage = f"Give one prefix ({flag} P) or pairs of weight and prefix ({flag} W1 P1 W2 P2 ...)."
    if len(values) == 1:
        return ((1.0, values[0]),)
    if len(values) == 0 or len(values) % 2 == 1:
        raise ValueError(f"{flag} has {len(values)} values. {usage}")
    pairs = []
    for position in range(0, len(values), 2):
        try:
            weight = float(values[position])
        except ValueError:
            weight = math.nan
        if not (0 < weight < math.inf):
            raise ValueError(f"{flag}: value {position + 1}, {values[position]!r}, should be a weight > 0. {usage}")
        pairs.append((weight, values[position + 1]))
    prefixes = [prefix for _, prefix in pairs]
    for prefix in prefixes:
        if prefixes.count(prefix) > 1:
            raise ValueError(f"{flag} names {prefix} twice. Give it once, with the sum of its weights.")
    return tuple(pairs)


def blend_indices(weights: np.ndarray, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples ``start .. start + count - 1`` of the blend: (dataset_ids, sample_ids), int64 ``[count]``.

    Args:
        weights: positive, summing to 1, float64 ``[D]``.
    """
    # At time t about t samples are drawn, give or take D/2. The margin of 2D keeps both ends of the wanted
    # stretch well inside the window of candidates, so that rounding at the window's edge does not matter.
    margin = 2 * len(weights) + 2
    first_draws = np.maximum(np.floor((start - margin) * weights + 0.5), 0).astype(np.int64)
    last_draws = np.floor((start + count + margin) * weights + 0.5).astype(np.int64)
    counts = last_draws - first_draws
    dataset_ids = np.repeat(np.arange(len(weights)), counts)
    within = np.arange(len(dataset_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
    sample_ids = first_draws[dataset_ids] + within
    times = (sample_ids + 0.5) / weights[dataset_ids]
    order = np.lexsort((dataset_ids, times))
    wanted = order[start - int(first_draws.sum()) :][:count]
    assert len(wanted) == count
    return dataset_ids[wanted], sample_ids[wanted]


class BlendedDataset:
    """A weighted blend of datasets; sample i is a pure function of (weights, i) and the datasets.

    Args:
        sources: the datasets.
        weights: one positive number each; only their proportions matter.
        name: for messages.
    """

    def __init__(self, sources: Sequence[SampleSource], weights: Sequence[float], name: str) -> None:
        assert len(sources) == len(weights) > 0 and all(weight > 0 for weight in weights)
        self.name = name
        self._sources = tuple(sources)
        self._weights = np.asarray(weights, dtype=np.float64) / math.fsum(weights)
        self._chunk: tuple[int, np.ndarray, np.ndarray] | None = None

    def __getitem__(self, sample_id: int) -> np.ndarray:
        """Tokens of sample ``sample_id`` (0, 1, 2, ... without end), int64 ``[seq_length + 1]``."""
        dataset_id, index = self.locate(sample_id)
        return self._sources[dataset_id][index]

    def locate(self, sample_id: int) -> tuple[int, int]:
        """(dataset_id, index in that dataset) of sample ``sample_id`` of the blend."""
        chunk_id, position = divmod(sample_id, _CHUNK)
        chunk = self._chunk  # one read: another thread may replace it at any time
        if chunk is None or chunk[0] != chunk_id:
            chunk = (chunk_id, *blend_indices(self._weights, chunk_id * _CHUNK, _CHUNK))
            self._chunk = chunk
        return int(chunk[1][position]), int(chunk[2][position])
