"""``PREFIX.json`` beside a ``.bin``/``.idx`` pair: which tokenizer made it, and what it holds.

Megatron does not write it and does not mind it; data without it is read, only with fewer checks.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megatron_moe.data.tokenizer import tokenizer_fingerprint


@dataclass(frozen=True)
class Sidecar:
    """Facts about a preprocessed corpus."""

    tokenizer_type: str
    tokenizer_sha256: str
    """See :func:`megatron_moe.data.tokenizer.tokenizer_fingerprint`."""
    vocab_size: int
    eod_id: int
    append_eod: bool
    """Whether every document ends with ``eod_id``."""
    documents: int
    tokens: int
    max_token_id: int
    skipped: int
    """Documents left out because they could not be read."""
    source_sha256: str
    """Hash of the inputs' names, sizes and times and of all settings: equal means the same job."""


def sidecar_path(prefix: str | Path) -> Path:
    """``PREFIX.json``."""
    return Path(f"{prefix}.json")


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Writes ``PREFIX.json`` at once or not at all."""
    write_json(sidecar_path(prefix), asdict(sidecar))


def write_json(path: Path, content: object) -> None:
    """Writes ``content`` under another name and renames it, so that ``path`` is never half written."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def read_sidecar(prefix: str | Path) -> Sidecar | None:
    """Reads ``PREFIX.json``; None if there is none. Raises ValueError if it is not what we write."""
    path = sidecar_path(prefix)
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Sidecar(**{field.name: content[field.name] for field in fields(Sidecar)})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} is not a description that tools/preprocess_data.py wrote ({error!r}). Preprocess the "
            "data again, or remove the file to use the data without its checks."
        ) from error


def check_sidecar(prefix: str | Path, tokenizer_type: str, tokenizer_model: str | None, vocab_size: int) -> None:
    """Compares ``PREFIX.json``, if present, with the tokenizer and the vocabulary of the model.

    Raises ValueError if the data has ids that the model lacks, or was made with another tokenizer.
    """
    sidecar = read_sidecar(prefix)
    if sidecar is None:
        return
    if sidecar.max_token_id >= vocab_size:
        raise ValueError(
            f"{prefix} has token ids up to {sidecar.max_token_id}, but the model's vocabulary has "
            f"{vocab_size} entries: wrong tokenizer for the data. It was preprocessed with "
            f"{_described(sidecar)}."
        )
    if tokenizer_type != sidecar.tokenizer_type:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type} is the wrong tokenizer for the data: {prefix} was "
            f"preprocessed with {_described(sidecar)}. Give the same --tokenizer-type and --tokenizer-model."
        )
    if tokenizer_fingerprint(tokenizer_type, tokenizer_model) != sidecar.tokenizer_sha256:
        raise ValueError(
            f"--tokenizer-model {tokenizer_model} is the wrong tokenizer for the data: {prefix} was "
            f"preprocessed with another {sidecar.tokenizer_type} of {sidecar.vocab_size} entries. Give that "
            "model, or preprocess again."
        )


def _described(sidecar: Sidecar) -> str:
    return f"{sidecar.tokenizer_type} ({sidecar.vocab_size} entries)"
