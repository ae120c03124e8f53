"""Checks by hand that .bin/.idx pairs pass between this project and the package megatron-core, both ways.

Not collected by pytest, because megatron-core is no dependency. In a virtual environment of its own, from the
repository root (megatron-core asks for a newer Python than it needs here)::

    python -m venv .venv-megatron && source .venv-megatron/bin/activate
    pip install torch==2.13.0 numpy packaging triton
    pip download --no-deps --ignore-requires-python -d .venv-megatron/dl megatron-core==0.19.2
    pip install --no-deps --ignore-requires-python .venv-megatron/dl/megatron_core-*.whl
    PYTHONPATH=. python tests/interop/megatron_core_indexed_dataset.py
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets import indexed_dataset as theirs  # pyright: ignore[reportMissingImports]

from megatron_moe.data.indexed_builder import IndexedDatasetBuilder
from megatron_moe.data.indexed_dataset import IndexedDataset


def main() -> int:
    """Writes random documents with both builders, compares the files, reads each with the other."""
    generator = np.random.default_rng(0)
    for dtype in (np.uint16, np.int32, np.uint8, np.int64):
        documents = []  # (tokens, sequence lengths), some documents of several sequences, some empty
        for _ in range(200):
            lengths = generator.integers(0, 50, size=generator.integers(1, 4)).tolist()
            documents.append((generator.integers(0, 200, size=sum(lengths)), lengths))
        with tempfile.TemporaryDirectory() as folder:
            their_prefix, our_prefix = f"{folder}/theirs", f"{folder}/ours"
            their_builder = theirs.IndexedDatasetBuilder(f"{their_prefix}.bin", dtype=dtype)
            for tokens, lengths in documents:
                their_builder.add_document(torch.from_numpy(tokens), lengths)
            their_builder.finalize(f"{their_prefix}.idx")
            with IndexedDatasetBuilder(our_prefix, np.dtype(dtype)) as our_builder:
                for tokens, lengths in documents:
                    our_builder.add_document(tokens, lengths)
                our_builder.finalize()

            for suffix in (".bin", ".idx"):
                assert Path(their_prefix + suffix).read_bytes() == Path(our_prefix + suffix).read_bytes(), suffix
            read_by_us = IndexedDataset(their_prefix)
            assert read_by_us.num_documents == len(documents)
            for document_id, (tokens, _) in enumerate(documents):
                np.testing.assert_array_equal(read_by_us.document(document_id), tokens)
            read_by_them = theirs.IndexedDataset(our_prefix)
            sequence_id = 0
            for tokens, lengths in documents:
                for piece in np.split(tokens, np.cumsum(lengths)[:-1]):
                    np.testing.assert_array_equal(read_by_them[sequence_id], piece)
                    sequence_id += 1
            assert len(read_by_them) == sequence_id
            print(f"{np.dtype(dtype).name}: files equal byte for byte; each read by the other")
    return 0


if __name__ == "__main__":
    sys.exit(main())
