"""Compares a run's validation loss with the loss of knowing only how common each token is.

    python tools/unigram_entropy.py data/quickstart/tokens --run runs/quickstart

Prints the unigram entropy of the validation split in nats per token and, with --run, the last validation
loss of the run. Exit status 1 when the loss is not below the entropy.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from megatron_moe.config.schema import DataConfig
from megatron_moe.data.indexed_dataset import IndexedDataset
from megatron_moe.data.splits import SPLIT_NAMES, document_ranges, parse_split
from megatron_moe.training.records import read_records


def unigram_entropy(counts_V: np.ndarray) -> float:
    """Entropy in nats of the distribution that token counts make: the best loss of any unigram model."""
    total = counts_V.sum()
    if total == 0:
        raise ValueError("No tokens to count: the split is empty. Give it a larger weight in --split.")
    shares = counts_V[counts_V > 0] / total
    return float(-(shares * np.log(shares)).sum())


def count_tokens(prefix: str, split: str, part: str) -> np.ndarray:
    """How often each token occurs in one part of a dataset's split, shape (V,) up to the largest id seen."""
    dataset = IndexedDataset(prefix)
    documents = document_ranges(parse_split(split), dataset.num_documents)[SPLIT_NAMES.index(part)]
    counts = np.zeros(0, dtype=np.int64)
    for document in documents:
        found = np.bincount(dataset.document(document))
        if len(found) > len(counts):
            counts = np.pad(counts, (0, len(found) - len(counts)))
        counts[: len(found)] += found
    return counts


def last_valid_loss(run_dir: Path) -> float:
    """The validation loss of the run's last evaluation, in nats per token."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: --run takes the --save folder of a run.")
    losses = [record["valid_loss"] for record in read_records(path) if "valid_loss" in record]
    if not losses:
        raise ValueError(f"{path} holds no evaluation. Train with --eval-interval.")
    return losses[-1]


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Unigram entropy of a validation split, and a run's loss beside it.")
    parser.add_argument("data_path", help="prefix of the .bin/.idx pair")
    parser.add_argument("--split", default=DataConfig().split, help="as in training (default: %(default)s)")
    parser.add_argument("--part", default="valid", choices=SPLIT_NAMES, help="part of the split (default: valid)")
    parser.add_argument("--run", type=Path, help="--save folder of a run, whose last validation loss must be lower")
    args = parser.parse_args(argv)
    try:
        entropy = unigram_entropy(count_tokens(args.data_path, args.split, args.part))
        print(f"unigram entropy {entropy:.4f} nats per token")
        if args.run is None:
            return 0
        loss = last_valid_loss(args.run)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"validation loss {loss:.4f} nats per token")
    if not loss < entropy:
        print("error: the validation loss is not below the unigram entropy", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
