"""Makes a micro-batch of tensors from samples.

A sample of S + 1 tokens becomes inputs and labels, which are shifted by one (``|`` ends a document)::

    sample        a  b  |  c  d  e
    tokens        a  b  |  c  d          position_ids   0 1 2 3 4   with reset_position_ids    0 1 2 0 1
    labels        b  |  c  d  e          document_ids   0 0 0 0 0   with reset_attention_mask  0 0 0 1 1
                                         loss_mask      1 1 1 1 1   with eod_mask_loss         1 1 0 1 1
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class CollateOptions:
    """How micro-batches are made; the three switches have Megatron's names and meanings.

    Raises ValueError if a switch is on and there is no end-of-document id.
    """

    vocab_size: int
    """Ids at or above it are refused."""
    eod_id: int | None = None
    """The end-of-document token; it belongs to the document that it ends."""
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        for switch in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, switch) and self.eod_id is None:
                raise ValueError(
                    f"--{switch.replace('_', '-')} needs to know where documents end. Give --tokenizer-type "
                    "and --tokenizer-model of the data, whose end-of-document token marks it."
                )


@dataclass(frozen=True)
class Batch:
    """One micro-batch; all tensors are ``[B, S]`` but ``sample_ids``."""

    tokens: Tensor
    """Input ids, int64."""
    labels: Tensor
    """The token after each input, int64."""
    loss_mask: Tensor
    """True where the label counts in the loss, bool."""
    position_ids: Tensor
    """Positions for the rotary embedding, int64."""
    document_ids: Tensor
    """Number of the document within its sequence, from 0, int64; attention stays among equal numbers."""
    padding_mask: Tensor
    """True where the input is padding, bool. Packed samples have none."""
    sample_ids: Tensor
    """Number of each sample within the run, int64 ``[B]``; with a position it keys random numbers."""

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on ``device``."""
        return Batch(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})


def collate(samples: Sequence[np.ndarray], sample_ids: Sequence[int], options: CollateOptions) -> Batch:
    """Stacks B samples of S + 1 tokens into a :class:`Batch`.

    Raises ValueError if a token id lies outside the vocabulary.
    """
    text = np.stack(samples).astype(np.int64, copy=False)
    _check_vocabulary(text, sample_ids, options.vocab_size)
    tokens, labels = text[:, :-1], text[:, 1:]
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    ends = np.zeros(tokens.shape, dtype=bool) if options.eod_id is None else tokens == options.eod_id
    follows_end = np.zeros_like(ends)
    follows_end[:, 1:] = ends[:, :-1]

    position_ids = positions
    if options.reset_position_ids:
        position_ids = positions - np.maximum.accumulate(np.where(follows_end, positions, 0), axis=1)
    document_ids = np.zeros_like(tokens)
    if options.reset_attention_mask:
        document_ids = np.cumsum(follows_end, axis=1, dtype=np.int64)
    loss_mask = ~ends if options.eod_mask_loss else np.ones_like(ends)

    return Batch(
        tokens=_tensor(tokens),
        labels=_tensor(labels),
        loss_mask=_tensor(loss_mask),
        position_ids=_tensor(position_ids),
        document_ids=_tensor(document_ids),
        padding_mask=torch.zeros(tokens.shape, dtype=torch.bool),
        sample_ids=torch.tensor(list(sample_ids), dtype=torch.int64),
    )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, order="C"))  # a copy: the inputs are overlapping views


def _check_vocabulary(text: np.ndarray, sample_ids: Sequence[int], vocab_size: int) -> None:
    if text.min() >= 0 and text.max() < vocab_size:
        return
    row = int(np.nonzero((text < 0) | (text >= vocab_size))[0][0])
    worst = int(text[row].max()) if text[row].max() >= vocab_size else int(text[row].min())
    raise ValueError(
        f"sample {sample_ids[row]} has token id {worst}, but the vocabulary has {vocab_size} entries "
        f"(ids 0..{vocab_size - 1}): wrong tokenizer for the data. Give the --tokenizer-type and "
        "--tokenizer-model that the data was preprocessed with."
    )
