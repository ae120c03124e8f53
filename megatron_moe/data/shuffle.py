"""Random orders that are pure functions of a key, defined here to the last bit.

NumPy may change the streams of its generators between releases (NEP 19), and a run resumed after an upgrade
would silently see other samples. The order of an epoch is therefore the order of a 64-bit hash that this file
spells out: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
"""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def key64(*parts: object) -> np.uint64:
    """The 64-bit key of a tuple of names and numbers; equal tuples have equal keys on every machine."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return np.uint64(int.from_bytes(digest[:8], "little"))


def hash64(counters: np.ndarray, key: np.uint64) -> np.ndarray:
    """SplitMix64 output number ``counters`` of the stream ``key``: uint64, the shape of ``counters``."""
    with np.errstate(over="ignore"):
        mixed = (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    return mixed ^ (mixed >> np.uint64(31))


def permutation(length: int, *key: object) -> np.ndarray:
    """A permutation of ``0 .. length - 1`` (int64) that depends on ``length`` and ``key`` alone."""
    return np.argsort(hash64(np.arange(length), key64(*key)), kind="stable").astype(np.int64, copy=False)
