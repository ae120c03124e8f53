"""Builds the training, validation and test data that a configuration describes."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_moe.config.schema import DataConfig
from megatron_moe.data.blend import BlendedDataset, SampleSource, parse_data_path
from megatron_moe.data.gpt_dataset import GPTDataset
from megatron_moe.data.indexed_dataset import IndexedDataset
from megatron_moe.data.mock_dataset import MockDataset
from megatron_moe.data.sidecar import check_sidecar
from megatron_moe.data.splits import SPLIT_NAMES, document_ranges, parse_split

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Datasets:
    """The data of a run; validation and test may be missing."""

    train: SampleSource
    valid: SampleSource | None
    test: SampleSource | None


def build_datasets(config: DataConfig, *, seed: int, vocab_size: int) -> Datasets:
    """The three splits, each a blend if several datasets are given.

    A validation or test split that gets no data, or less than one sample, is None, and a warning says why.

    Args:
        config: paths, split, sequence length and tokenizer.
        seed: seed of the data order.
        vocab_size: entries of the model's vocabulary, before padding.

    Raises ValueError for missing or damaged files, for data of another tokenizer, and for a training split
    without a sample.
    """
    if config.mock_data:
        train, valid, test = (MockDataset(vocab_size, config.seq_length, seed, f"mock/{name}") for name in SPLIT_NAMES)
        return Datasets(train, valid, test)
    separate = (config.train_data_path, config.valid_data_path, config.test_data_path)
    if bool(config.data_path) == any(separate) or (any(separate) and not config.train_data_path):
        raise ValueError(
            "Which data? Give either --data-path (cut by --split), or --train-data-path with, if wanted, "
            "--valid-data-path and --test-data-path, or --mock-data."
        )
    fractions = parse_split(config.split)

    @functools.cache  # the splits of one corpus share its memory map
    def opened(prefix: str) -> IndexedDataset:
        check_sidecar(prefix, config.tokenizer_type, config.tokenizer_model, vocab_size)
        return IndexedDataset(prefix)

    def build(index: int) -> SampleSource | None:
        split, own_paths = SPLIT_NAMES[index], separate[index]
        if config.data_path:
            pairs = parse_data_path(config.data_path)
        else:
            pairs = parse_data_path(own_paths, f"--{split}-data-path") if own_paths else ()
        if config.data_path and fractions[index] == 0 and split != "train":
            return None
        parts = []
        for weight, prefix in pairs:
            indexed = opened(prefix)
            documents = range(indexed.num_documents)
            if config.data_path:
                documents = document_ranges(fractions, indexed.num_documents)[index]
            dataset = _dataset_or_warning(indexed, documents, config.seq_length, seed, split)
            if dataset is not None:
                parts.append((weight, dataset))
        return _blend(parts, split)

    train = build(0)
    assert train is not None, "a training split without a sample has raised"
    return Datasets(train, build(1), build(2))


def _dataset_or_warning(
    indexed: IndexedDataset, documents: range, seq_length: int, seed: int, split: str
) -> GPTDataset | None:
    # The last part of the prefix, not all of it, so that moving the data does not change the order.
    name = f"{split}/{indexed.prefix.rpartition('/')[2]}"
    try:
        return GPTDataset(indexed, documents, seq_length, seed, name)
    except ValueError as error:
        if split == "train":
            raise
        _logger.warning("No %s data from %s: %s", split, indexed.prefix, error)
        return None


def _blend(parts: Sequence[tuple[float, GPTDataset]], name: str) -> SampleSource | None:
    if len(parts) <= 1:
        return parts[0][1] if parts else None
    return BlendedDataset([dataset for _, dataset in parts], [weight for weight, _ in parts], name)
