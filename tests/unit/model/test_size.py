"""Published sizes: every preset has the parameters its authors count, and docs/models.md says them."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from megatron_moe.config.schema import Config
from megatron_moe.convert.configuration import families_for
from megatron_moe.convert.families import FAMILIES
from megatron_moe.model.decoder import Decoder
from megatron_moe.model.size import logical_tensors, size
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sharding import sharded_parameters
from megatron_moe.training.shrink import vary
from pretrain_moe import configuration

ROOT = Path(__file__).parents[3]
PRESETS = sorted((ROOT / "configs/models").glob("*.yaml"))

# Totals to the last parameter: formulas of each layer added up by hand; DeepSeek-V3's without the 58 x 256 biases of
# the choice, which are no parameters here. Billions: as published; active ones with or without the input embedding.
TOTALS = {
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    # embedding, attention, 6 dense layers, 6 of 128 experts with their rows of the router, norms
    "switch-base-128-decoder": 32128 * 768 + 12 * 4 * 768**2 + 6 * 2 * 768 * 3072 + 6 * 128 * 768 * 6145 + 25 * 768,
    "gshard-12l-128e-decoder": 1024 * (64000 + 12 * 4 * 2048 + 6 * 2 * 8192 + 6 * 128 * 16385 + 25 * 2),
}
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9, "with"),
    "mixtral-8x22b": (140.6, 39.0, "without"),
    "qwen1.5-moe-a2.7b": (14.3, 2.7, "with"),
    "qwen3-30b-a3b": (30.5, 3.3, "with"),
    "qwen3-235b-a22b": (235, 22, "with"),
    "olmoe-1b-7b": (6.9, 1.3, "with"),
    "deepseek-moe-16b": (16.4, 2.8, "with"),
    "deepseek-v2-lite": (15.7, 2.4, "without"),
    "deepseek-v2": (236, 21, "without"),
    "deepseek-v3": (671, 36.7, "without"),
    "gpt-oss-20b": (20.9, 3.6, "without"),
    "gpt-oss-120b": (116.8, 5.1, "without"),
    "glm-4.5-air": (106, 12, "without"),
}
GSHARD = {  # (layers, experts): billions as published, table 1; this decoder, of which the experts alone are more
    (36, 2048): (600, 619_182_704_640),
    (12, 2048): (200, 206_437_926_912),
    (36, 512): (150, 155_297_925_120),
    (12, 512): (50, 51_809_667_072),
    (36, 128): (37, 39_326_730_240),
    (12, 128): (12.5, 13_152_602_112),
}


def preset(path: Path) -> Config:
    """Read and checked, as for a run."""
    return configuration(["--config", str(path), "--mock-data", "--train-iters", "1"]).config


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_have_the_published_sizes(path: Path):
    config = preset(path)
    found = size(config)
    if path.stem in TOTALS:
        assert found.total == TOTALS[path.stem]
    if path.stem in PUBLISHED:
        total, active, embedding = PUBLISHED[path.stem]
        assert found.total / 1e9 == pytest.approx(total, rel=0.009)
        counted = found.active if embedding == "with" else found.active_without_embedding
        assert counted / 1e9 == pytest.approx(active, rel=0.07 if path.stem == "glm-4.5-air" else 0.025)
    row = f"| `{path.stem}` | {found.total:,} | {found.active / 1e9:.2f} | {found.active_without_embedding / 1e9:.2f} |"
    assert row in (ROOT / "docs/models.md").read_text(), f"docs/models.md lacks: {row}"


@pytest.mark.parametrize("layers, experts", GSHARD)
def test_gshards_models_have_the_published_sizes(layers: int, experts: int):
    config = vary(preset(ROOT / "configs/models/gshard-12l-128e-decoder.yaml"), num_layers=layers, num_experts=experts)
    billions, exactly = GSHARD[layers, experts]
    total = size(config).total
    assert total == exactly
    assert total / 1e9 == pytest.approx(billions, rel=0.065)
    routed = layers // 2 * experts * 2 * 1024 * 8192
    assert 1.0 < total / routed < 1.025 and f"{total / 1e9:.1f}B" in (ROOT / "docs/gshard.md").read_text()


def test_every_published_model_has_a_preset_and_a_family():
    names = {path.stem for path in PRESETS}
    assert names >= PUBLISHED.keys()
    for path in PRESETS:
        fitting, reasons = families_for(preset(path), FAMILIES)
        own_method = "decoder" in path.stem  # Switch and GShard have no model of transformers
        assert bool(fitting) != own_method, (path.stem, reasons)


@pytest.mark.parametrize("tied", [False, True])
def test_prediction_modules_and_tied_embeddings(tied: bool):
    config = preset(ROOT / "configs/models/deepseek-v3.yaml")
    config = replace(config, model=replace(config.model, untie_embeddings_and_output_weights=not tied))
    found = size(config)
    assert found.prediction == 11_610_068_224 - 256  # without the biases of the choice
    assert found.total == TOTALS["deepseek-v3"] - tied * 129280 * 7168
    assert found.active - found.active_without_embedding == (not tied) * 129280 * 7168


def test_tensors_are_those_of_a_model():
    flags = "--mock-data --vocab-size 61 --num-layers 3 --hidden-size 16 --num-attention-heads 2 --num-experts 4 "
    flags += "--train-iters 1 --moe-router-enable-expert-bias --moe-router-score-function sigmoid --mtp-num-layers 1"
    config = configuration(flags.split(" ")).config
    model = Decoder(config, ParallelContext.single())
    expected = {name: (p.spec.shape, p.dtype) for name, p in sharded_parameters(model).items()}
    expected |= {name: (tuple(b.shape), b.dtype) for name, b in model.named_buffers()}
    assert logical_tensors(config) == expected
    numels = [prod(p.spec.shape) for p in sharded_parameters(model).values()]
    assert size(config).total + size(config).prediction == sum(numels)
