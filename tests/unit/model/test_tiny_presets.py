"""Every preset has a tiny sibling: the same parts in other sizes, trained in a fraction of a second."""

from pathlib import Path

import pytest
import torch

from megatron_moe.config import Resolved
from megatron_moe.config.schema import Config
from megatron_moe.config.settings import settings, value_of
from megatron_moe.convert.configuration import families_for
from megatron_moe.convert.families import FAMILIES
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training.loop import Run
from pretrain_moe import configuration

MODELS = Path(__file__).parents[3] / "configs/models"
NAMES = sorted(path.stem for path in MODELS.glob("*.yaml"))
SIZES = """
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size seq_length
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim window_size window_attn_skip_freq
    num_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk
    moe_router_num_groups moe_router_group_topk
"""


def read(path: Path, flags: str = "") -> Resolved:
    flags = f"--config {path} --mock-data --train-iters 2 --lr 1e-2 --eval-interval 0 --num-workers 0 {flags}"
    return configuration(flags.split())


def structure(config: Config) -> dict[str, object]:
    """What sizes decide about the code that runs."""
    model, moe = config.model, config.moe
    pattern, windows = moe.layer_pattern(model.num_layers), model.windows
    return {
        "kinds of layers": set(zip(pattern, [window is not None for window in windows], strict=True)),
        "first layer is MoE": pattern[0],
        "there are dense layers before MoE layers": pattern.index(True) > 0,
        "queries share keys": model.query_groups < model.num_attention_heads,
        "heads are as wide as the stream": model.head_channels * model.num_attention_heads == model.hidden_size,
        "experts are narrower than dense layers": not all(pattern)
        and (moe.moe_ffn_hidden_size or model.dense_ffn_size) < model.dense_ffn_size,
        "shared experts": (moe.moe_shared_expert_intermediate_size or 0) // (moe.moe_ffn_hidden_size or 1),
        "one expert a token": moe.moe_router_topk == 1,
        "sizes that are not given": {name for name in SIZES.split() if value_of(config, name) in (None, ())},
        "families": [family.model_type for family in families_for(config, FAMILIES)[0]],
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_sibling_differs_in_sizes_alone(name: str) -> None:
    big, tiny = read(MODELS / f"{name}.yaml").config, read(MODELS / f"tiny/{name}.yaml").config
    assert {key for key in settings() if value_of(big, key) != value_of(tiny, key)} <= set(SIZES.split())
    assert structure(tiny) == structure(big)


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_sibling_trains(name: str, tmp_path: Path) -> None:
    """Two iterations, in which every tensor of the model moves."""
    resolved = read(MODELS / f"tiny/{name}.yaml", f"--global-batch-size 2 --micro-batch-size 2 --save {tmp_path}")
    run = Run(resolved.config, ParallelContext.single(), resolved.provenance)
    before = {key: parameter.detach().clone() for key, parameter in run.machine.parameters.items()}
    assert run.train().startswith("done: iteration 2 of 2")
    still = [key for key, parameter in run.machine.parameters.items() if torch.equal(parameter, before[key])]
    assert still == []


def test_there_is_no_tiny_model_without_its_sibling() -> None:
    assert sorted(path.stem for path in (MODELS / "tiny").glob("*.yaml")) == NAMES
