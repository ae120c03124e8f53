"""benchmarks/balance_from_collapse.py on a few random bytes: the collapse is one, and the table tells when it ends."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.balance_from_collapse import Outcome, main
from megatron_moe.data.indexed_builder import IndexedDatasetBuilder


def test_collapse_stays_without_balancing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "tokens", np.dtype(np.uint16)) as builder:
        for _ in range(20):
            builder.add_document(generator.integers(0, 256, 1000, dtype=np.uint16))
        builder.finalize()
    picture = tmp_path / "pictures" / "balance.png"
    flags = ["--data-path", str(tmp_path / "tokens"), "--tokenizer-type", "ByteTokenizer", "--steps", "10"]
    assert main([*flags, "--methods", "none", "expert_choice", "--output", str(picture)]) == 0
    none, chosen = capsys.readouterr().out.splitlines()[2:]
    assert none.startswith("| none | 8.00 | never | 8.00 | 8.00 |")
    assert chosen.startswith("| expert_choice | 1.00 | 10 | 1.00 | 1.00 |")
    assert picture.is_file()


def test_balance_is_that_of_the_last_steps() -> None:
    """Two experts that take turns are balanced over ten steps, and never in one."""
    turns = torch.tensor([[10.0, 0.0], [0.0, 10.0]]).repeat(10, 1).unsqueeze(1)
    outcome = Outcome(torch.cat([torch.tensor([[[10.0, 0.0]]] * 10), turns]), [0.0] * 30)
    assert outcome.imbalance(1) == [2.0] * 30
    assert outcome.imbalance(10)[9:] == pytest.approx([2.0, 2.0, 1.8, 1.8, 1.6, 1.6, 1.4, 1.4, 1.2, 1.2, *[1.0] * 11])
    assert outcome.steps_until_balanced() == 18
