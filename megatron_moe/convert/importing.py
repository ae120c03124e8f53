"""A Hugging Face folder becomes a checkpoint of ours.

    IN/  config.json  *.safetensors  tokenizer*   ->   OUT/  iter_0000000/  config.yaml  huggingface/ (tokenizer, ...)

Everything is checked before a tensor is read; OUT appears when it is whole.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_moe.checkpoint.streaming import write_weights
from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.config import dump
from megatron_moe.config.schema import Config
from megatron_moe.convert.configuration import carried, family_of, read_config
from megatron_moe.convert.errors import ConversionError
from megatron_moe.convert.families import FAMILIES
from megatron_moe.convert.family import Family
from megatron_moe.convert.huggingface import TOKENIZER_FILES, HuggingFaceFolder, finished_folder, read_json
from megatron_moe.convert.moving import Plan, check_copies, dtypes_of, import_pieces, plan_import, widest
from megatron_moe.convert.quantised import Dequantised

COMPANION_FOLDER = "huggingface"
RECORD = "huggingface"  # in run.json: what a way back needs
DTYPE_NAMES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

Describe = Callable[[Config], Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
"""Shapes and types of the tensors of a model of ours; injected, since the model lives above conversion."""


@dataclass(frozen=True)
class Import:
    """A conversion that has been checked and can begin."""

    folder: HuggingFaceFolder
    family: Family
    config: Config
    source: Dequantised
    ours: dict[str, Described]
    plan: Plan


def prepare_import(
    folder: str | Path,
    describe: Describe,
    *,
    predictions: str = "keep",
    dtype: str | None = None,
    ignore: Sequence[str] = (),
) -> Import:
    """Read the configuration and the headers, and plan.

    Args:
        predictions: multi-token-prediction modules: keep or drop.
        dtype: --params-dtype; default: the narrowest that loses nothing.
        ignore: keys of config.json that the user knows to change nothing.

    Raises:
        ConversionError: all that is wrong with the folder.
    """
    hf = HuggingFaceFolder(folder)
    family = family_of(hf.config, FAMILIES)
    theirs = dict(hf.config)
    if predictions == "drop":
        theirs |= {key: 0 for key in ("num_nextn_predict_layers", "num_mtp_layers") if key in _keys(family)}
    config = read_config(family, theirs, ignore)
    source = Dequantised(hf, hf.config.get("quantization_config"))
    ours = _described(config, "bfloat16", describe)
    plan = plan_import(family, source, ours, config.model.num_layers, drop_predictions=predictions == "drop")
    if dtype is None:
        dtype = str(widest(plan, source, ours)).removeprefix("torch.")
    config = replace(config, training=replace(config.training, params_dtype=dtype))
    described = _described(config, dtype, describe)
    ordered = {step.ours.name: described[step.ours.name] for step in plan.steps}
    check_tokenizer(hf, config)
    return Import(hf, family, config, source, ordered, plan)


def import_folder(made: Import, out: str | Path) -> Path:
    """Write the checkpoint; returns its folder.

    Raises:
        ConversionError: the folder is not empty, or a copy differs from its original; nothing is left of it.
    """
    out = Path(out)
    companions = made.folder.companions()
    config = with_data(made, out)
    record = {
        "family": made.family.model_type,
        "carried": carried(made.family, made.folder.config),
        "dtypes": dtypes_of(made.plan, made.source),
    }
    scalars = {"consumed_samples": 0, "optimizer_steps": 0, RECORD: record}
    text = dump(config)
    check_copies(made.plan, made.source)
    with finished_folder(out) as unfinished:
        if companions:
            (unfinished / COMPANION_FOLDER).mkdir()
            for path in companions:
                shutil.copy2(path, unfinished / COMPANION_FOLDER)
        (unfinished / "config.yaml").write_text(text, encoding="utf-8")
        pieces = import_pieces(made.plan, made.source, made.ours)
        path = write_weights(unfinished, 0, made.ours, pieces, scalars, text)
    return out / path.name


def _described(config: Config, dtype: str, describe: Describe) -> dict[str, Described]:
    training = replace(config.training, params_dtype=dtype)
    return {name: Described(*value) for name, value in describe(replace(config, training=training)).items()}


def _keys(family: Family) -> set[str]:
    return {key for part in family.parts for key in part.keys}


def with_data(made: Import, out: Path) -> Config:
    """Sequence length and tokenizer of the model, so that it can generate and be trained on."""
    data = made.config.data
    length = made.folder.config.get("max_position_embeddings")
    if isinstance(length, int):
        data = replace(data, seq_length=length)
    if any(path.name in TOKENIZER_FILES for path in made.folder.companions()):
        data = replace(data, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(out / COMPANION_FOLDER))
    return replace(made.config, data=data)


def check_tokenizer(hf: HuggingFaceFolder, config: Config) -> None:
    """Refuse a tokenizer whose ids do not fit the embedding.

    Raises:
        ConversionError: an id is beyond the vocabulary.
    """
    largest = _largest_id(hf.path)
    vocab_size = config.model.vocab_size
    if largest is not None and vocab_size is not None and largest >= vocab_size:
        raise ConversionError(
            f"the tokenizer in {hf.path} has ids up to {largest}, but config.json has vocab_size {vocab_size}: "
            "they are not of the same model."
        )


def _largest_id(path: Path) -> int | None:
    """The largest id of a tokenizer.json or tokenizer.model; None where there is neither."""
    if (path / "tokenizer.json").exists():
        tokenizer = read_json(path / "tokenizer.json")
        vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in tokenizer.get("added_tokens") or ()]
        return max(ids, default=None)
    if (path / "tokenizer.model").exists():
        import sentencepiece

        try:
            return sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model")).get_piece_size() - 1  # type: ignore[call-arg, attr-defined]
        except (RuntimeError, OSError):
            return None  # another kind of file under this name, such as tiktoken's
    return None


def record_of(scalars: Mapping[str, object]) -> dict:
    """What an import left for the way back; empty for a checkpoint of a run."""
    record = scalars.get(RECORD)
    return json.loads(json.dumps(record)) if isinstance(record, dict) else {}
