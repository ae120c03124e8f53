"""Random tokens with something to learn, for trying a model or a layout without data."""

import numpy as np

from megatron_moe.data.shuffle import hash64, key64, permutation

_RESTART_ONE_IN = 16
_MAX_PERIOD = 4096


class MockDataset:
    """Samples from a fixed cycle through the vocabulary that restarts at a random place now and then.

    After token x comes its successor on the cycle, except that one position in 16 jumps anywhere, so a
    model that learns the successors reaches about ``log(P)/16 + 0.23`` nats a token, where P is the cycle's
    length. The cycle depends on (seed, vocab_size); sample i on (seed, name, i). The cycle visits at most
    4096 ids.
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, name: str) -> None:
        self.name = name
        self._cycle = permutation(vocab_size, seed, "mock cycle")[:_MAX_PERIOD]
        self._seq_length = seq_length
        self._seed = seed

    def __getitem__(self, sample_id: int) -> np.ndarray:
        """Tokens of sample ``sample_id`` (0, 1, 2, ... without end), int64 ``[seq_length + 1]``."""
        positions = np.arange(self._seq_length + 1)
        noise = hash64(positions, key64(self._seed, self.name, sample_id))
        restarts = noise % np.uint64(_RESTART_ONE_IN) == 0
        restarts[0] = True
        since = np.maximum.accumulate(np.where(restarts, positions, 0))
        places = (noise >> np.uint64(8)) % np.uint64(len(self._cycle))
        return self._cycle[(places[since].astype(np.int64) + positions - since) % len(self._cycle)]
