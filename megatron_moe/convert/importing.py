"""A Hugging Face folder, or a checkpoint of Megatron-Core, becomes a checkpoint of ours.

    IN/  config.json  *.safetensors  tokenizer*   ->   OUT/  iter_0000000/  config.yaml  huggingface/ (tokenizer, ...)
    IN/  .metadata  *.distcp                      ->   OUT/  iter_0000000/  config.yaml

Everything is checked before a tensor is read; OUT appears when it is whole.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_moe.checkpoint.streaming import write_weights
from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.config import dump
from megatron_moe.config.schema import Config, DataConfig
from megatron_moe.convert.configuration import carried, family_of, read_config
from megatron_moe.convert.errors import ConversionError
from megatron_moe.convert.families import FAMILIES
from megatron_moe.convert.family import Family
from megatron_moe.convert.huggingface import TOKENIZER_FILES, HuggingFaceFolder, finished_folder, read_json
from megatron_moe.convert.megatron_arguments import read_arguments
from megatron_moe.convert.megatron_core import MegatronTensors, megatron_core
from megatron_moe.convert.moving import Plan, check_copies, dtypes_of, import_pieces, plan_import, widest
from megatron_moe.convert.predictions import PREFIX, with_copied_modules
from megatron_moe.convert.quantised import Dequantised, Source
from megatron_moe.convert.torch_dist import TorchDistFolder

COMPANION_FOLDER = "huggingface"
RECORD = "huggingface"  # in run.json: what a way back needs
DTYPE_NAMES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

Describe = Callable[[Config], Mapping[str, tuple[tuple[int, ...], torch.dtype]]]
"""Shapes and types of the tensors of a model of ours; injected, since the model lives above conversion."""


@dataclass(frozen=True)
class Import:
    """A conversion that has been checked and can begin.

    Attributes:
        source: their tensors.
        ours: the tensors to write, in order.
        companions: files that travel along.
        record: what a way back needs, for ``run.json``.
    """

    family: Family
    config: Config
    source: Source
    ours: dict[str, Described]
    plan: Plan
    companions: tuple[Path, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)


def prepare_import(
    folder: str | Path,
    describe: Describe,
    *,
    predictions: str = "keep",
    dtype: str | None = None,
    ignore: Sequence[str] = (),
) -> Import:
    """Read the configuration and the headers of a Hugging Face folder, and plan.

    Args:
        predictions: multi-token-prediction modules: keep or drop; copy: where there are none, begin with copies of the
            last layer.
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
    length = hf.config.get("max_position_embeddings")
    if isinstance(length, int):
        config = replace(config, data=replace(config.data, seq_length=length))
    source = Dequantised(hf, hf.config.get("quantization_config"))
    made = _planned(family, config, source, describe, dtype, predictions)
    check_tokenizer(hf, made.config)
    record = {
        "family": family.model_type,
        "carried": carried(family, hf.config),
        "dtypes": dtypes_of(made.plan, source),
    }
    return replace(made, companions=tuple(hf.companions()), record=record)


def prepare_megatron_import(
    folder: str | Path,
    describe: Describe,
    *,
    config: Config | None = None,
    predictions: str = "keep",
    dtype: str | None = None,
    vocab_size: int | None = None,
    ignore: Sequence[str] = (),
) -> Import:
    """Read arguments and metadata of a Megatron-Core checkpoint (``torch_dist``), and plan.

    Args:
        config: of the model, instead of the arguments in the checkpoint.
        predictions: multi-token-prediction modules: keep or drop; copy: where there are none, begin with copies of the
            last layer.
        dtype: --params-dtype; default: the narrowest that loses nothing.
        vocab_size: of the tokenizer; rows beyond are padding. Default: that of the arguments, else all rows.
        ignore: arguments that the user knows to change nothing.

    Raises:
        ConversionError: all that is wrong with the checkpoint.
    """
    theirs = TorchDistFolder(folder)
    if config is None:
        arguments = theirs.arguments()
        if not arguments:
            raise ConversionError(
                f"{folder} does not carry Megatron's arguments, which Megatron-Core alone does not write: describe "
                "the model in a file of settings, --config FILE."
            )
        config = read_arguments(arguments, vocab_size, ignore)
    config = replace(Config(), model=config.model, moe=config.moe, data=DataConfig(seq_length=config.data.seq_length))
    if vocab_size is not None:
        config = replace(config, model=replace(config.model, vocab_size=vocab_size))
    if config.model.vocab_size is None:
        raise ConversionError("the size of the vocabulary is not known: give --vocab-size.")
    drop = predictions == "drop"
    if drop:
        config = replace(config, model=replace(config.model, mtp_num_layers=None))
    family = megatron_core(config.model.gated, drop_predictions=drop)
    return _planned(family, config, MegatronTensors(theirs, config), describe, dtype, predictions)


def _planned(
    family: Family, config: Config, source: Source, describe: Describe, dtype: str | None, predictions: str
) -> Import:
    num_layers = config.model.num_layers
    copy = predictions == "copy" and not _has_modules(source, num_layers)
    if copy:
        config = replace(config, model=replace(config.model, mtp_num_layers=config.model.mtp_num_layers or 1))
    ours = _described(config, "bfloat16", describe)
    there = {name: described for name, described in ours.items() if not (copy and name.startswith(PREFIX))}
    plan = plan_import(family, source, there, num_layers, drop_predictions=predictions == "drop")
    if copy:
        plan = with_copied_modules(plan, ours, num_layers)
    if dtype is None:
        dtype = str(widest(plan, source, ours)).removeprefix("torch.")
    config = replace(config, training=replace(config.training, params_dtype=dtype))
    described = _described(config, dtype, describe)
    ordered = {step.ours.name: described[step.ours.name] for step in plan.steps}
    return Import(family, config, source, ordered, plan)


def _has_modules(source: Source, num_layers: int) -> bool:
    """Whether tensors have the names of prediction modules: Hugging Face's are layers after the last."""
    return any(name.startswith((f"model.layers.{num_layers}.", "mtp.layers.")) for name in source.tensors)


def import_folder(made: Import, out: str | Path) -> Path:
    """Write the checkpoint; returns its folder.

    Raises:
        ConversionError: the folder is not empty, or a copy differs from its original; nothing is left of it.
    """
    out = Path(out)
    scalars = {"consumed_samples": 0, "optimizer_steps": 0, **({RECORD: made.record} if made.record else {})}
    text = dump(with_tokenizer(made, out))
    check_copies(made.plan, made.source)
    with finished_folder(out) as unfinished:
        if made.companions:
            (unfinished / COMPANION_FOLDER).mkdir()
            for path in made.companions:
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


def with_tokenizer(made: Import, out: Path) -> Config:
    """The configuration with the tokenizer that travels along, so that the model can generate and be trained on."""
    if not any(path.name in TOKENIZER_FILES for path in made.companions):
        return made.config
    data = replace(made.config.data, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(out / COMPANION_FOLDER))
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
