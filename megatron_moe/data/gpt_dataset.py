"""Packs documents into training samples, epoch after epoch, without end.

One epoch, with sequences of 4 tokens (samples overlap by one token: a label first, an input next)::

    documents in the order of this epoch   | d7 d7 d7 | d2 d2 d2 d2 d2 | d5 | d0 d0 d0 d0 ...
    samples, before their own shuffle        [ 0  0  0    0  (0]
                                                         [1    1  1  1    (1]
                                                                         [2 ...

Epoch ``e`` has its own order of documents and its own order of samples, both keyed by (seed, name, e)
alone. It is cut from its own stream of tokens, and the tail that does not fill a sample is dropped. So
sample i of the dataset never depends on how long the run is, on how many ranks read it, or on how they
batch it: extending a run changes no earlier sample, and within an epoch no token is predicted twice.
(Megatron shuffles all epochs of a run together, so that its order changes with the length of the run.)
"""

import threading
from dataclasses import dataclass

import numpy as np

from megatron_moe.data.indexed_dataset import IndexedDataset
from megatron_moe.data.shuffle import permutation


@dataclass(frozen=True)
class _Epoch:
    """The order of one epoch over n documents and m samples."""

    document_order: np.ndarray
    """Documents (counted within the split) in the order of this epoch, int64 ``[n]``."""
    starts: np.ndarray
    """Where in the epoch's stream each of them begins, and the end of the last, int64 ``[n + 1]``."""
    sample_order: np.ndarray
    """Which stretch of the stream is the k-th sample of this epoch, int64 ``[m]``."""


class GPTDataset:
    """Samples of ``seq_length + 1`` tokens from a range of documents, in an order set by (seed, name).

    Memory is 16 bytes a document and 8 bytes a sample for each of the (at most two) epochs in use, computed
    when an epoch is first read.

    Args:
        indexed: the corpus.
        documents: the consecutive documents of this split.
        seq_length: inputs per sample, S.
        seed: seed of all shuffles.
        name: keys the shuffles together with the seed, and names the dataset in messages.

    Raises ValueError if the documents do not have ``seq_length + 1`` tokens.
    """

    def __init__(self, indexed: IndexedDataset, documents: range, seq_length: int, seed: int, name: str) -> None:
        self.name = name
        self._indexed = indexed
        self._seq_length = seq_length
        self._seed = seed
        self._offsets = indexed.document_offsets(documents)
        self.num_tokens = int(self._offsets[-1] - self._offsets[0])
        self.samples_per_epoch = max(0, (self.num_tokens - 1) // seq_length)
        if self.samples_per_epoch == 0:
            raise ValueError(
                f"{name}: {self.num_tokens} tokens in {len(documents)} of the {indexed.num_documents} "
                f"documents of {indexed.prefix} do not fill one sample of {seq_length + 1} tokens. Use more "
                f"data, a larger --split weight for it, or a shorter --seq-length."
            )
        self._epochs: dict[int, _Epoch] = {}
        self._lock = threading.Lock()

    def __getitem__(self, sample_id: int) -> np.ndarray:
        """Tokens of sample ``sample_id`` (0, 1, 2, ... without end), int64 ``[seq_length + 1]``."""
        epoch_id, index = divmod(sample_id, self.samples_per_epoch)
        epoch = self._epoch(epoch_id)
        first = int(epoch.sample_order[index]) * self._seq_length
        # side="right" passes over empty documents, which begin where the next one does.
        position = int(np.searchsorted(epoch.starts, first, side="right")) - 1
        skip, missing, pieces = first - int(epoch.starts[position]), self._seq_length + 1, []
        while missing > 0:
            document = int(epoch.document_order[position])
            start = int(self._offsets[document]) + skip
            piece = self._indexed.tokens(start, min(start + missing, int(self._offsets[document + 1])))
            pieces.append(piece)
            missing -= len(piece)
            position, skip = position + 1, 0
        return np.concatenate(pieces).astype(np.int64)

    def _epoch(self, epoch_id: int) -> _Epoch:
        with self._lock:  # several reader threads may reach a new epoch at once
            if epoch_id not in self._epochs:
                document_order = permutation(len(self._offsets) - 1, self._seed, self.name, epoch_id, "documents")
                starts = np.zeros(len(self._offsets), dtype=np.int64)
                np.cumsum(np.diff(self._offsets)[document_order], out=starts[1:])
                sample_order = permutation(self.samples_per_epoch, self._seed, self.name, epoch_id, "samples")
                # Two epochs, because readers that run ahead alternate between both sides of a border.
                while len(self._epochs) >= 2:
                    del self._epochs[next(iter(self._epochs))]
                self._epochs[epoch_id] = _Epoch(document_order, starts, sample_order)
            return self._epochs[epoch_id]
