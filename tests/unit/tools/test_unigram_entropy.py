"""unigram_entropy counts the tokens of one split and compares a run with them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_moe.data.indexed_builder import IndexedDatasetBuilder
from tools.unigram_entropy import main, unigram_entropy


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Ten documents; only the ninth, the validation split of 8,1,1, has more than one token id."""
    prefix = tmp_path / "tokens"
    with IndexedDatasetBuilder(prefix, np.dtype(np.uint16)) as builder:
        for document in range(10):
            builder.add_document([0, 1, 2, 3] if document == 8 else [7, 7])
        builder.finalize()
    return prefix


def write_evaluations(run: Path, losses: list[float]) -> None:
    run.mkdir(exist_ok=True)
    records = [{"iteration": i, "evaluation": True, "valid_loss": loss} for i, loss in enumerate(losses)]
    records += [{"iteration": len(losses), "evaluation": True, "test_loss": 9.0}] * bool(losses)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_entropy_of_uniform_and_skewed_counts() -> None:
    assert unigram_entropy(np.array([5, 0, 5, 5, 5])) == pytest.approx(math.log(4))
    assert unigram_entropy(np.array([3, 1])) == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))


@pytest.mark.parametrize(("losses", "status"), [([2.0, 1.3], 0), ([1.3, 2.0], 1), ([float("nan")], 1), ([], 1)])
def test_last_validation_loss_decides(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], losses: list[float], status: int
) -> None:
    write_evaluations(tmp_path / "run", losses)
    assert main([str(prefix), "--split", "8,1,1", "--run", str(tmp_path / "run")]) == status
    assert f"unigram entropy {math.log(4):.4f} nats" in capsys.readouterr().out


def test_empty_split_is_an_error(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(prefix), "--split", "1,0,0"]) == 1
    assert "the split is empty" in capsys.readouterr().err
