"""``tools/verify_layout.py``: says equal where a layout is, names the parameter where a collective is at fault."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import Tensor

from megatron_moe.config import check
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import Axis
from megatron_moe.training import registries
from megatron_moe.training.build import Machine
from megatron_moe.training.local_ranks import RankPool
from tools.verify_layout import main, report, scaled_down, verify

CONFIG = """
num_layers: 24
hidden_size: 1024
num_attention_heads: 32
num_query_groups: 4
vocab_size: 50000
num_experts: 64
moe_router_topk: 6
moe_router_num_groups: 8
moe_router_group_topk: 3
moe_router_enable_expert_bias: true
moe_router_score_function: sigmoid
moe_layer_freq: "[0]*1+[1]*23"
moe_shared_expert_intermediate_size: 2048
moe_router_load_balancing_type: [seq_aux_loss, global_aux_loss]
moe_aux_loss_coeff: [0.001, 0.01]
seq_length: 4096
moe_group_size: "1024"
micro_batch_size: 4
global_batch_size: 1000
recompute_granularity: full
"""


@pytest.fixture
def yaml_file(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.mark.parametrize(
    "layout", ["", "tp=2,pp=2,ep=4", "tp=8,ep=8,etp=1", "pp=4,schedule=interleaved-1f1b,vpp=3", "cp=4,ep=8,zero=3,sp=0"]
)
def test_scaled_down_keeps_what_matters(layout: str, yaml_file: str) -> None:
    config, world_size = scaled_down(["--config", yaml_file, "--qk-layernorm"], layout)
    assert check(config, world_size, registries.CHOICES, registries.RULES, to_train=False) == []
    model, moe, data = config.model, config.moe, config.data
    pattern = moe.layer_pattern(model.num_layers)
    assert 4 <= model.num_layers <= 12 and not pattern[0] and all(pattern[1:])
    assert model.hidden_size <= 32 and moe.num_experts is not None and moe.num_experts <= 24
    assert 1 < model.query_groups < model.num_attention_heads
    assert (model.query_groups < config.parallel.tensor_model_parallel_size) == layout.startswith("tp=8")
    assert (moe.moe_router_topk, moe.moe_router_num_groups, moe.moe_router_group_topk) == (6, 8, 3)
    assert data.seq_length <= 32 and moe.moe_group_size == str(data.seq_length // 2)
    assert config.training.global_batch_size is not None
    assert config.training.global_batch_size > config.training.micro_batch_size
    assert model.qk_layernorm and config.training.recompute_granularity == "full"


def test_latent_attention_windows_and_dense_models_are_kept(yaml_file: str) -> None:
    latent = ["--multi-latent-attention", "--num-query-groups", "none", "--window-size", "512", "0"]
    for flags in (latent, ["--window-size", "512", "0", "--window-attn-skip-freq", "6"]):
        config, world_size = scaled_down(["--config", yaml_file, *flags], "tp=2,pp=2")
        assert check(config, world_size, registries.CHOICES, registries.RULES, to_train=False) == []
        assert config.model.multi_latent_attention == (flags is latent)
        assert 0 < config.model.window_size[0] < config.data.seq_length
        assert (None in config.model.windows) == (flags is not latent)


def test_tiles_of_fp8_stay_whole(yaml_file: str) -> None:
    fp8 = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--kv-channels", "128", "--ffn-hidden-size", "2048"]
    for latent in ([], ["--multi-latent-attention", "--kv-channels", "none", "--num-query-groups", "none"]):
        config, world_size = scaled_down(["--config", yaml_file, *fp8, *latent], "tp=2,etp=2,pp=2")
        assert check(config, world_size, registries.CHOICES, registries.RULES, to_train=False) == []
        assert config.model.fp8_format == "e4m3" and config.moe.moe_ffn_hidden_size == 256


@contextmanager
def sum_forgets_a_rank(machine: Machine) -> Iterator[None]:
    """Rank 1 of tp contributes nothing to reduce-scatters of activations of one layer's attention output."""
    right, calls = collectives.scatter_sum_dim0, 0

    def wrong(tensor: Tensor, axis: Axis) -> Tensor:
        nonlocal calls
        calls += axis.name == "tp" and tensor.requires_grad is False
        return right(tensor * (0.0 if axis.rank == 1 and calls == 3 else 1.0), axis)

    with patch.object(collectives, "scatter_sum_dim0", wrong):
        yield


def test_a_fault_in_one_collective_is_named(yaml_file: str, ranks: RankPool) -> None:
    config, world_size = scaled_down(["--config", yaml_file], "tp=2,ep=2,etp=1")
    assert report(verify(config, world_size, ranks)).startswith("equal: largest relative difference")
    comparison = verify(config, world_size, ranks, prepare=sum_forgets_a_rank)
    assert comparison.parameters and comparison.largest > 1e-3
    text = report(comparison)
    assert re.search(r"first parameter in the model's order: gradient of [\w.]+ of step 1: relative difference", text)


def test_command(yaml_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", yaml_file, "--layout", "dp=2,ep=2,zero=1", "--no-qk-layernorm"]) == 0
    assert "equal: largest relative difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp=3", "--num-attention-heads 32 does not divide over --tensor-model-parallel-size 3"),
        ("tensor=2", "tensor is none of dp, tp"),
        ("zero=4", "zero=0 to zero=3"),
        ("tp=2,dp=64", "more than the 64"),
        ("pp=2,schedule=2f2b", "2f2b"),
    ],
)
def test_what_cannot_be_is_said(layout: str, words: str, yaml_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", yaml_file, "--layout", layout]) == 2
    assert words in capsys.readouterr().err


def test_no_flag_plants_a_fault(yaml_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", yaml_file, "--plant-fault", "all_reduce"]) == 2
    assert "unknown flag --plant-fault" in capsys.readouterr().err
