"""A checkpoint of ours becomes a Hugging Face folder that transformers, vLLM and SGLang load."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from torch import Tensor

from megatron_moe.checkpoint import Checkpoint
from megatron_moe.checkpoint.entries import MODEL
from megatron_moe.checkpoint.offline import CONFIG_FILE, read_run
from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.config import from_dict
from megatron_moe.config.schema import Config
from megatron_moe.convert.configuration import carried, families_for, write_config
from megatron_moe.convert.errors import ConversionError
from megatron_moe.convert.families import FAMILIES
from megatron_moe.convert.family import Family
from megatron_moe.convert.huggingface import (
    CONFIG,
    SHARD_BYTES,
    companions_of,
    finished_folder,
    read_json,
    write_tensors,
)
from megatron_moe.convert.importing import COMPANION_FOLDER, record_of
from megatron_moe.convert.moving import Exported, plan_export

_TRAINING_STATE = "batch_load_E"  # of the balance loss over the global batch


class Weights:
    """The weights and buffers of a checkpoint by their names in the model."""

    def __init__(self, path: Path, *, predictions: bool = True) -> None:
        self._checkpoint = Checkpoint(path)
        names = [n.removeprefix(MODEL) for n in self._checkpoint.names if n.startswith(MODEL)]
        kept = [n for n in names if not n.endswith(_TRAINING_STATE) and (predictions or not n.startswith("mtp."))]
        self.tensors = {
            name: Described(*self._checkpoint.describe(MODEL + name)) for name in sorted(kept, key=_natural)
        }

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one row of it (index into dim 0)."""
        return self._checkpoint.read(MODEL + name, row)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def config_of(path: Path) -> Config:
    """The configuration that a checkpoint (iter_...) was saved with."""
    return from_dict(yaml.safe_load((path / CONFIG_FILE).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Export:
    """A conversion that has been checked and can begin."""

    family: Family
    config: Config
    theirs: dict
    exported: Exported
    companions: tuple[Path, ...]


def prepare_export(
    path: Path,
    *,
    family: str | None = None,
    like: str | Path | None = None,
    fused_experts: bool = False,
    predictions: str = "keep",
    dtype: str | None = None,
) -> Export:
    """Read the configuration and the index of a checkpoint, and plan.

    Args:
        path: of one checkpoint (iter_...).
        family: model_type of the target; default: that of the import, else the first that can express the model.
        like: a folder from which tokenizer, generation settings and keys that change nothing are taken.
        fused_experts: write all experts of a layer as one tensor, as transformers 5 has them in memory.
        predictions: multi-token-prediction modules: keep, or drop.
        dtype: for weights that are in the model's own type, instead of it.

    Raises:
        ConversionError: no family can express the model, or the one asked for cannot; says what stands in the way.
    """
    config = config_of(path)
    record = record_of(read_run(path)["scalars"])
    if predictions == "drop":
        config = replace(config, model=replace(config.model, mtp_num_layers=None))
    chosen = _family(config, family or record.get("family"))
    kept = record.get("carried", {}) if record.get("family") == chosen.model_type else {}
    if like is not None:
        kept = carried(chosen, read_json(Path(like) / CONFIG))
    weights = Weights(path, predictions=predictions != "drop")
    theirs = write_config(chosen, config, dtype or _main_dtype(record, config), kept)
    plan = plan_export(chosen, weights.tensors, config.model.num_layers, fused_experts=fused_experts)
    target = None if dtype is None else getattr(torch, dtype)
    exported = Exported(plan, weights.tensors, weights, record.get("dtypes", {}), target)
    return Export(chosen, config, theirs, exported, tuple(_companions(path, config, like)))


def export_folder(made: Export, out: str | Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the folder.

    Raises:
        ConversionError: it is there and not empty, or cannot be written; nothing is left of it.
    """
    with finished_folder(out) as unfinished:
        write_tensors(unfinished, made.exported.tensors, _named(made.exported), shard_bytes)
        (unfinished / CONFIG).write_text(json.dumps(made.theirs, indent=2) + "\n", encoding="utf-8")
        for path in made.companions:
            shutil.copy2(path, unfinished)


def _named(exported: Exported) -> Iterator[tuple[str, Tensor]]:
    for piece, tensor in exported.pieces():
        yield piece.name, tensor


def _family(config: Config, name: str | None) -> Family:
    if name is not None:
        if name not in FAMILIES:
            raise ConversionError(f"--family {name} is not known. Known are: {', '.join(FAMILIES)}.")
        return FAMILIES[name]
    fitting, reasons = families_for(config, FAMILIES)
    if not fitting:
        lines = "".join(f"\n  {family}: {reason}" for family, reason in reasons.items())
        raise ConversionError(f"no family of transformers that is known here can express this model:{lines}")
    return fitting[0]


def _main_dtype(record: Mapping, config: Config) -> str:
    """The type that config.json names: of most tensors."""
    codes = list(record.get("dtypes", {}).values())
    if not codes:
        return config.training.params_dtype
    return {"F16": "float16", "BF16": "bfloat16", "F64": "float64"}.get(max(set(codes), key=codes.count), "float32")


def _companions(path: Path, config: Config, like: str | Path | None) -> list[Path]:
    """Files of the first of these places that has some."""
    if like is not None:
        return companions_of(Path(like))
    model = config.data.tokenizer_model
    places = [path.parent / COMPANION_FOLDER] + ([Path(model)] if model is not None else [])
    for place in places:
        if place.is_dir():
            return companions_of(place)
        if place.is_file() and config.data.tokenizer_type == "HuggingFaceTokenizer":
            return [place]
    return []
