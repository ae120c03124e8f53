"""Tokenizers behind one small interface: bytes, sentencepiece, and local Hugging Face tokenizers.

A tokenizer here has no beginning-of-text habit and adds nothing by itself: ``encode`` returns the tokens of
the text, and whoever packs documents appends ``eod_id`` (end of document).
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

EOD_PIECE = "<|endoftext|>"
# Names under which well-known tokenizers hide their end of document, tried in this order when none is
# declared.
_COMMON_EOD_PIECES = (EOD_PIECE, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>")
# What defines a Hugging Face tokenizer inside a folder that may also hold gigabytes of weights.
_HF_TOKENIZER_FILES = (
    "added_tokens.json", "merges.txt", "special_tokens_map.json", "spiece.model", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip


class Tokenizer(Protocol):
    """What the data pipeline and text generation need from a tokenizer."""

    name: str
    """The name under which it is chosen, for example ``SentencePieceTokenizer``."""
    vocab_size: int
    """Ids are ``0 .. vocab_size - 1``."""
    eod_id: int
    """The id that ends a document."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255 and end of document as 256."""

    name = "ByteTokenizer"
    vocab_size = 257
    eod_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class SentencePieceTokenizer:
    """A sentencepiece model file; end of document is ``<|endoftext|>`` if the model has it, else its eos."""

    name = "SentencePieceTokenizer"

    def __init__(self, model_file: Path) -> None:
        import sentencepiece

        try:
            # The class gets its constructor and its methods at run time, so a type checker cannot see them.
            self._model = cast(Any, sentencepiece).SentencePieceProcessor(model_file=str(model_file))
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"--tokenizer-model {model_file} is not a sentencepiece model. Give the .model file that "
                f"tools/train_tokenizer.py or sentencepiece wrote. ({_first_line(error)})"
            ) from error
        self.vocab_size: int = self._model.get_piece_size()
        eod_id = self._model.piece_to_id(EOD_PIECE)
        self.eod_id: int = eod_id if eod_id != self._model.unk_id() else self._model.eos_id()
        if self.eod_id < 0:
            raise ValueError(
                f"--tokenizer-model {model_file} has neither a piece {EOD_PIECE} nor an end-of-sentence "
                "piece, so documents could not be told apart. Train it with tools/train_tokenizer.py or "
                "with an eos_id."
            )
        byte_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in "\u2581".encode()]
        has_bytes = all(self._model.is_byte(i) for i in byte_ids)
        adds_prefix = self._model.id_to_piece(self._model.encode("a")[0]).startswith("\u2581")
        self._underscore_ids = byte_ids if has_bytes and not adds_prefix else None

    def encode(self, text: str) -> list[int]:
        # sentencepiece writes a space as U+2581, so a U+2581 of the text would come back as a space. A model
        # with byte pieces can spell it out, which makes every text come back as it was.
        if self._underscore_ids is None or "\u2581" not in text:
            return self._model.encode(text)
        first, *others = text.split("\u2581")
        ids = list(self._model.encode(first))
        for part in others:
            ids += self._underscore_ids
            ids += self._model.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])


class HuggingFaceTokenizer:
    """A local Hugging Face tokenizer: a folder that ``transformers`` can load, or a ``tokenizer.json``."""

    name = "HuggingFaceTokenizer"

    def __init__(self, path: Path) -> None:
        self._encode, self._decode, vocabulary, declared = (
            _load_hf_folder(path) if path.is_dir() else _load_hf_file(path)
        )
        if not vocabulary:
            raise ValueError(f"--tokenizer-model {path} has an empty vocabulary.")
        self.vocab_size = max(vocabulary.values()) + 1
        candidates = [declared] if declared is not None else list(_COMMON_EOD_PIECES)
        eod_id = next((vocabulary[piece] for piece in candidates if piece in vocabulary), None)
        if eod_id is None:
            raise ValueError(
                f"--tokenizer-model {path} has no end-of-document token (looked for "
                f"{', '.join(candidates)}). Set `eos_token` in its tokenizer_config.json and give the folder."
            )
        self.eod_id: int = eod_id

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode([int(i) for i in ids])


_HFParts = tuple[Callable[[str], list[int]], Callable[[list[int]], str], dict[str, int], str | None]


def _load_hf_folder(path: Path) -> _HFParts:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"--tokenizer-model {path} is a folder, which needs the package transformers: pip install "
            "'megatron-moe[hf]', or give the folder's tokenizer.json."
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"--tokenizer-model {path} is not a folder with a Hugging Face tokenizer. ({_first_line(error)})"
        ) from error

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def decode(ids: list[int]) -> str:
        return cast(str, tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    return encode, decode, tokenizer.get_vocab(), cast(str | None, tokenizer.eos_token)


def _load_hf_file(path: Path) -> _HFParts:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise ValueError(
            f"--tokenizer-model {path} is not a tokenizer.json. Give that file, or the folder of the "
            f"tokenizer. ({_first_line(error)})"
        ) from error

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    return encode, decode, tokenizer.get_vocab(with_added_tokens=True), None


TOKENIZERS: dict[str, Callable[[Path], Tokenizer] | None] = {
    "ByteTokenizer": None,
    "SentencePieceTokenizer": SentencePieceTokenizer,
    "HuggingFaceTokenizer": HuggingFaceTokenizer,
}
"""Name -> constructor from the path of ``--tokenizer-model``; None where no model is needed."""


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | None) -> Tokenizer:
    """The tokenizer called ``tokenizer_type`` with the model at ``tokenizer_model``.

    Raises ValueError for an unknown name, a missing or unreadable model, and a model without an end of
    document.
    """
    constructor = _constructor(tokenizer_type)
    if constructor is None:
        return ByteTokenizer()
    return constructor(_existing_model(tokenizer_type, tokenizer_model))


def tokenizer_fingerprint(tokenizer_type: str, tokenizer_model: str | None) -> str:
    """SHA-256 (hex) of what defines the tokenizer, without loading it: equal means the same token ids.

    A model file is hashed as a whole; of a folder, the tokenizer's files are hashed with their names.
    """
    digest = hashlib.sha256(tokenizer_type.encode())
    if _constructor(tokenizer_type) is not None:
        path = _existing_model(tokenizer_type, tokenizer_model)
        if path.is_dir():
            for file in (path / name for name in _HF_TOKENIZER_FILES if (path / name).is_file()):
                digest.update(b"\0" + file.name.encode() + b"\0" + file.read_bytes())
        else:
            digest.update(b"\0" + path.read_bytes())
    return digest.hexdigest()


def _constructor(tokenizer_type: str) -> Callable[[Path], Tokenizer] | None:
    if tokenizer_type not in TOKENIZERS:
        raise ValueError(f"--tokenizer-type {tokenizer_type} does not exist. Choose from {', '.join(TOKENIZERS)}.")
    return TOKENIZERS[tokenizer_type]


def _existing_model(tokenizer_type: str, tokenizer_model: str | None) -> Path:
    if not tokenizer_model:
        raise ValueError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model with the path of its model.")
    path = Path(tokenizer_model)
    if not path.exists():
        raise ValueError(f"--tokenizer-model {tokenizer_model} does not exist.")
    return path


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
