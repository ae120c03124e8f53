"""The three splits from a configuration, and data that does not fit the tokenizer."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_moe.config.schema import DataConfig
from megatron_moe.data.blend import BlendedDataset
from megatron_moe.data.build import build_datasets
from megatron_moe.data.gpt_dataset import GPTDataset
from megatron_moe.data.preprocess import preprocess
from megatron_moe.data.preprocess_parts import Job
from megatron_moe.data.sidecar import read_sidecar, write_sidecar


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """100 documents of 11 bytes and an end of document."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n:02d}"}) + "\n" for n in range(100)))
    preprocess(Job((str(path),), str(tmp_path / "data"), "ByteTokenizer", None, append_eod=True))
    return str(tmp_path / "data")


def config(*data_path: str, **changes: object) -> DataConfig:
    return replace(DataConfig(data_path=data_path, split="80,20", seq_length=11), **changes)  # pyright: ignore[reportArgumentType]


def test_splits_hold_their_own_documents(prefix: str, tmp_path: Path) -> None:
    built = build_datasets(config(prefix), seed=1, vocab_size=257)
    assert isinstance(built.train, GPTDataset) and isinstance(built.valid, GPTDataset)
    assert (built.train.num_tokens, built.valid.num_tokens, built.test) == (80 * 12, 20 * 12, None)

    for suffix in (".bin", ".idx"):  # moved elsewhere, without a sidecar: the same order
        (tmp_path / "moved").mkdir(exist_ok=True)
        (tmp_path / "moved" / f"data{suffix}").write_bytes(Path(prefix + suffix).read_bytes())
    moved = build_datasets(config(str(tmp_path / "moved" / "data")), seed=1, vocab_size=257)
    assert [moved.train[i].tolist() for i in range(100)] == [built.train[i].tolist() for i in range(100)]


def test_blends_and_separate_paths(prefix: str, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"other{suffix}").write_bytes(Path(prefix + suffix).read_bytes())
    other = str(tmp_path / "other")
    built = build_datasets(config("1", prefix, "3", other), seed=1, vocab_size=257)
    assert isinstance(built.train, BlendedDataset) and isinstance(built.valid, BlendedDataset)
    assert built.train.locate(10**6) == (1, 750000)

    separate = config(train_data_path=(prefix,), test_data_path=("1", other, "1", prefix))
    built = build_datasets(separate, seed=1, vocab_size=257)
    assert isinstance(built.train, GPTDataset) and built.train.num_tokens == 1200
    assert built.valid is None and isinstance(built.test, BlendedDataset)


def test_an_empty_validation_split_is_named(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        built = build_datasets(config(prefix, split="999,1,0"), seed=1, vocab_size=257)
    assert built.valid is None and built.test is None
    assert [record.getMessage() for record in caplog.records] == [
        f"No valid data from {prefix}: valid/data: 0 tokens in 0 of the 100 documents of {prefix} do "
        "not fill one sample of 12 tokens. Use more data, a larger --split weight for it, or a shorter "
        "--seq-length."
    ]
    with pytest.raises(ValueError, match="train/data: 0 tokens in 0 of the 100 documents"):
        build_datasets(config(prefix, split="0,1"), seed=1, vocab_size=257)


def test_mock_data_needs_no_files() -> None:
    built = build_datasets(config(mock_data=True), seed=1, vocab_size=100)
    assert built.valid is not None and built.train[0].tolist() != built.valid[0].tolist()


def test_the_wrong_tokenizer_is_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ids up to 256, .* 256 entries: wrong tokenizer .* ByteTokenizer"):
        build_datasets(config(prefix), seed=1, vocab_size=256)
    model = tmp_path / "a.model"
    model.write_bytes(b"one model")
    wrong_type = config(prefix, tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(model))
    with pytest.raises(ValueError, match=r"--tokenizer-type SentencePieceTokenizer is the wrong tokenizer"):
        build_datasets(wrong_type, seed=1, vocab_size=300)
    sidecar = read_sidecar(prefix)
    assert sidecar is not None
    write_sidecar(prefix, replace(sidecar, tokenizer_type="SentencePieceTokenizer", tokenizer_sha256="another"))
    with pytest.raises(ValueError, match=r"a.model is the wrong tokenizer .* another SentencePieceTokenizer"):
        build_datasets(wrong_type, seed=1, vocab_size=300)
    Path(prefix + ".json").write_text("{}")
    with pytest.raises(ValueError, match=r"data.json is not a description"):
        build_datasets(config(prefix), seed=1, vocab_size=300)


@pytest.mark.parametrize(
    ("paths", "changes"),
    [((), {}), (("p",), {"train_data_path": ("q",)}), ((), {"valid_data_path": ("q",)})],
)
def test_which_data_must_be_clear(paths: tuple[str, ...], changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Which data"):
        build_datasets(config(*paths, **changes), seed=1, vocab_size=300)


def test_missing_data_is_named() -> None:
    with pytest.raises(ValueError, match=r"nowhere/data.idx does not exist"):
        build_datasets(config("nowhere/data"), seed=1, vocab_size=300)
