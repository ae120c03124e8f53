"""What is written can be read again: dump, dictionaries, saved files; and implied values."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_moe.config import (
    Config,
    ConfigError,
    ParallelConfig,
    TrainingConfig,
    dump,
    from_dict,
    load_config,
    normalise,
    resolve,
    to_dict,
)
from megatron_moe.config.files import read_text
from megatron_moe.config.settings import Registries, Setting, assemble, settings, value_of

WORDS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
BASES: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    # "none" and "null" mean no value, so that a setting never holds them as text unless they are a choice.
    str: WORDS.filter(lambda word: word.lower() not in ("none", "null")),
}


def values(setting: Setting) -> st.SearchStrategy[Any]:
    one = st.sampled_from(setting.own_choices) if setting.own_choices else BASES[setting.base]
    full = st.lists(one, max_size=3).map(tuple) if setting.many else one
    return st.none() | full if setting.optional else full


CONFIGS = st.fixed_dictionaries({}, optional={s.name: values(s) for s in settings().values()}).map(assemble)
QUICK = hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(CONFIGS, st.booleans())
def test_dump_reads_back_as_the_same_configuration(config: Config, with_comments: bool) -> None:
    text = dump(config, {name: "a.yaml:1" for name in settings()} if with_comments else None)
    layer = read_text(text, "dump", registries=None)
    assert layer.problems == []
    assert set(layer.values) == set(settings())
    assert assemble({name: value for name, (value, _) in layer.values.items()}) == config


@QUICK
@given(CONFIGS)
def test_dictionary_reads_back_through_json(config: Config) -> None:
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_dump_is_yaml_with_every_origin_in_a_column(tmp_path: Path, registries: Registries) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("num_layers: 6\n")
    resolved = resolve(["--config", str(path), "--lr", "1e-5", "--moe-group-size", "64"], registries)
    text = dump(resolved.config, resolved.provenance)
    assert yaml.safe_load(text)["optim"]["lr"] == 1e-5  # any YAML reader takes it for a number
    assert yaml.safe_load(text)["moe"]["moe_group_size"] == "64"
    lines = text.splitlines()
    model = lines[lines.index("model:") + 1 : lines.index("", lines.index("model:"))]
    assert {line.index("  # ") for line in model if len(line.split("  # ")[0].rstrip()) <= 60} == {
        max(len(line.split("  # ")[0].rstrip()) for line in model)
    }
    assert any(line.startswith("  num_layers: 6 ") and line.endswith(f"  # from {path}:1") for line in lines)
    assert any(line.startswith("  lr: 1.0e-05 ") and line.endswith("  # from --lr") for line in lines)
    saved = tmp_path / "config.yaml"
    saved.write_text(text)
    assert load_config(saved) == resolved.config
    assert resolve(["--config", str(saved)], registries).config == resolved.config


def test_dictionary_errors_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict({"model": {"num_layers": "4", "lr": 1}, "modle": {}, "optim": {"lr": math.inf}})
    assert [problem.split("'")[0] for problem in caught.value.problems] == [
        "model.num_layers: expected an integer, got text ",
        "unknown key ",
        "unknown section ",
        "optim.lr: expected a number, got the number inf.",
    ]


def test_implied_values_are_said_and_stable(registries: Registries) -> None:
    line = "--num-experts 8 --tensor-model-parallel-size 2 --micro-batch-size 3"
    resolved, notes = resolve(line.split(), registries).normalised(world_size=8)
    assert resolved.config.parallel.sequence_parallel is True
    assert resolved.config.training.global_batch_size == 12
    assert len(notes) == 2 and notes[0].startswith("--sequence-parallel is implied by --num-experts with")
    assert resolved.provenance["sequence_parallel"].startswith("implied by --num-experts")
    assert resolved.provenance["global_batch_size"] == "implied by --micro-batch-size 3 x data-parallel size 4"
    assert normalise(resolved.config, 8) == (resolved.config, [])


def test_nothing_is_implied_without_a_cause() -> None:
    dense = Config(parallel=ParallelConfig(tensor_model_parallel_size=2), training=TrainingConfig(global_batch_size=4))
    assert normalise(dense, 2) == (dense, [])
    alone, notes = normalise(
        Config(parallel=ParallelConfig(sequence_parallel=True), training=TrainingConfig(global_batch_size=4)),
        1,
    )
    assert alone.parallel.sequence_parallel is False and len(notes) == 1
    impossible = Config(parallel=ParallelConfig(context_parallel_size=3))
    assert value_of(normalise(impossible, 4)[0], "global_batch_size") is None
