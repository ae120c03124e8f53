"""Rules about what is read and written: data, tokenizer, checkpoints."""

import math
from collections.abc import Iterator

from megatron_moe.config.checks.support import Rule, typed
from megatron_moe.config.schema import Config

_BY_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")


def data_has_one_source(config: Config, world_size: int) -> Iterator[str]:
    """Data is one blend cut by ``--split``, or one blend per split, or made up."""
    data = config.data
    by_split = [name for name in _BY_SPLIT if getattr(data, name)]
    given = [flag for flag, used in (("--data-path", data.data_path), ("--mock-data", data.mock_data)) if used]
    given += [typed(config, name).split(" ")[0] for name in by_split]
    if data.mock_data and len(given) > 1:
        yield f"{' and '.join(given)} exclude each other; leave out --mock-data, or set the paths to 'none'."
    elif data.data_path and by_split:
        yield (
            f"{' and '.join(given)} exclude each other; --data-path is cut by --split, while the others are "
            "each used whole."
        )


def split_can_be_read(config: Config, world_size: int) -> Iterator[str]:
    """``--split`` is up to three shares that are not all zero."""
    try:
        shares = [float(part) for part in config.data.split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < math.inf for share in shares) or sum(shares) == 0:
        yield (
            f"{typed(config, 'split')} cannot be read; give up to three shares, for training, validation and "
            "test, such as 969,30,1."
        )


def tokenizer_has_its_file(config: Config, world_size: int) -> Iterator[str]:
    """Only the byte tokenizer needs no file."""
    if config.data.tokenizer_type != "ByteTokenizer" and config.data.tokenizer_model is None:
        yield f"{typed(config, 'tokenizer_type')} needs its file or folder; give --tokenizer-model."


def saving_has_a_folder(config: Config, world_size: int) -> Iterator[str]:
    """What asks for a checkpoint needs ``--save``."""
    if config.checkpoint.save is not None:
        return
    for name in ("save_interval", "save_interval_minutes", "keep_last", "save_retain_interval"):
        if getattr(config.checkpoint, name) is not None:
            yield f"{typed(config, name)} has no folder to save to; give --save."
    for name in ("on_nonfinite", "on_spike"):
        if getattr(config.training, name) == "rollback":
            yield f"{typed(config, name)} has no checkpoint to go back to; give --save."
    for name in ("exit_interval", "exit_duration_in_mins"):
        if getattr(config.training, name) is not None:
            yield f"{typed(config, name)} would end the run and lose it; give --save."


def loading_has_a_folder(config: Config, world_size: int) -> Iterator[str]:
    """What asks for a checkpoint to begin with needs to know where it is."""
    checkpoint = config.checkpoint
    if checkpoint.finetune and checkpoint.load is None:
        yield "--finetune needs a checkpoint to begin with; give --load."
    if checkpoint.ckpt_step is not None and checkpoint.load is None and checkpoint.save is None:
        yield f"{typed(config, 'ckpt_step')} has no folder to load from; give --load."


RULES: tuple[Rule, ...] = (
    data_has_one_source,
    split_can_be_read,
    tokenizer_has_its_file,
    saving_has_a_folder,
    loading_has_a_folder,
)


def data_is_given(config: Config, world_size: int) -> Iterator[str]:
    """A run that trains has data to train on."""
    data = config.data
    if not (data.data_path or data.train_data_path or data.mock_data):
        yield "There is no training data; give --data-path, --train-data-path or --mock-data."
