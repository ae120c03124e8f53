"""Round trips of every tokenizer, and what happens with a wrong model."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_fingerprint
from tools.train_tokenizer import main as train_tokenizer

TEXT = "def f(x):\n\tif x:\n        return '▁ é ☃ 😀'\r\n \n\x00 <|endoftext|>  end "


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The model of each kind of tokenizer, made from this file's own text."""
    folder = tmp_path_factory.mktemp("models")
    source = Path(__file__).read_text(encoding="utf-8")
    (folder / "input.jsonl").write_text(json.dumps({"text": source}) + "\n")
    arguments = ["--input", str(folder / "input.jsonl"), "--vocab-size", "400"]
    assert train_tokenizer([*arguments, "--model-prefix", str(folder / "sp")]) == 0

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["</s>", "<end>"], show_progress=False
    )
    bpe.train_from_iterator([source], trainer)
    (folder / "hf").mkdir()
    bpe.save(str(folder / "hf" / "tokenizer.json"))
    declared = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(declared))
    return {
        "ByteTokenizer": None,
        "SentencePieceTokenizer": str(folder / "sp.model"),
        "HuggingFaceTokenizer": str(folder / "hf" / "tokenizer.json"),
        "folder": str(folder / "hf"),
    }


def build(models: dict[str, str | None], key: str) -> Tokenizer:
    return build_tokenizer("HuggingFaceTokenizer" if key == "folder" else key, models[key])


@pytest.mark.parametrize(
    ("key", "eod_id"),
    [("ByteTokenizer", 256), ("SentencePieceTokenizer", 1), ("HuggingFaceTokenizer", 0), ("folder", 1)],
)
def test_round_trip_and_end_of_document(models: dict[str, str | None], key: str, eod_id: int) -> None:
    tokenizer = build(models, key)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.eod_id == eod_id and eod_id not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.encode("") == []


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_every_text_comes_back_from_sentencepiece_and_bytes(models: dict[str, str | None], text: str) -> None:
    for key in ("ByteTokenizer", "SentencePieceTokenizer"):
        tokenizer = build(models, key)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_is_deterministic(models: dict[str, str | None], tmp_path: Path) -> None:
    first = Path(str(models["SentencePieceTokenizer"]))
    source = str(first.parent / "input.jsonl")
    arguments = ["--input", source, "--vocab-size", "400", "--model-prefix", str(tmp_path / "again")]
    assert train_tokenizer(arguments) == 0
    ours, again = (build_tokenizer("SentencePieceTokenizer", str(m)) for m in (first, tmp_path / "again.model"))
    assert ours.encode(TEXT) == again.encode(TEXT)


def test_fingerprint_changes_with_the_model_only(models: dict[str, str | None], tmp_path: Path) -> None:
    model = Path(str(models["SentencePieceTokenizer"]))
    copy = tmp_path / "other_name.model"
    copy.write_bytes(model.read_bytes())
    fingerprint = tokenizer_fingerprint("SentencePieceTokenizer", str(model))
    assert tokenizer_fingerprint("SentencePieceTokenizer", str(copy)) == fingerprint
    copy.write_bytes(model.read_bytes() + b"x")
    assert tokenizer_fingerprint("SentencePieceTokenizer", str(copy)) != fingerprint


def test_wrong_models_are_explained(models: dict[str, str | None], tmp_path: Path) -> None:
    no_end = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    no_end.save(str(tmp_path / "no_end.json"))
    (tmp_path / "empty").mkdir()
    cases = [
        ("WordTokenizer", None, "Choose from ByteTokenizer, SentencePieceTokenizer, HuggingFaceTokenizer"),
        ("SentencePieceTokenizer", None, "needs --tokenizer-model"),
        ("SentencePieceTokenizer", str(tmp_path / "none.model"), "none.model does not exist"),
        ("SentencePieceTokenizer", __file__, "is not a sentencepiece model"),
        ("HuggingFaceTokenizer", __file__, "is not a tokenizer.json"),
        ("HuggingFaceTokenizer", str(tmp_path / "empty"), "is not a folder with a Hugging Face tokenizer"),
        ("HuggingFaceTokenizer", str(tmp_path / "no_end.json"), "no end-of-document token"),
    ]
    for kind, model, message in cases:
        with pytest.raises(ValueError, match=message):
            build_tokenizer(kind, model)


def test_tokenizer_training_reports_bad_input(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny.txt").write_text("ab\n")
    (tmp_path / "empty.txt").write_text("")
    for file, size, message in (
        ("tiny.txt", "100000", "cannot make 100000 pieces"),
        ("empty.txt", "300", "holds no text"),
        ("missing.txt", "300", "does not exist"),
    ):
        arguments = [
            "--input",
            str(tmp_path / file),
            "--model-prefix",
            str(tmp_path / "m"),
            "--vocab-size",
            size,
        ]
        assert train_tokenizer(arguments) == 1
        assert message in capfd.readouterr().err
