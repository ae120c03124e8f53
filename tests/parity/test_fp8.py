"""FP8 under layouts that cut every matrix, against one process: a tile's scale is the same whoever holds it."""

from typing import Any

import pytest

from tests.helpers.ranks import RankPool
from tests.parity.harness import BASE, Trace, differences, layout, trace, vary

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 160,  # no multiple of a tile: what is not cut may end in a shorter one
    "ffn_hidden_size": 256,
    "num_attention_heads": 2,
    "num_query_groups": 2,
    "kv_channels": 128,
    "num_experts": 4,
    "moe_layer_freq": "[0,1]",
    "moe_ffn_hidden_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "global_batch_size": 2,
    "micro_batch_size": 2,
    "init_method_std": 0.1,
}
FP8 = vary(BASE, **SIZES, fp8_format="hybrid", fp8_recipe="blockwise")


@pytest.fixture(scope="module")
def one_process(ranks: RankPool) -> Trace:
    return trace(FP8, 1, ranks)


@pytest.mark.parametrize("text", ["tp=2,ep=2", "tp=2,etp=2"])
def test_layouts(ranks: RankPool, one_process: Trace, text: str) -> None:
    values, world_size = layout(text)
    assert differences(trace(vary(FP8, **values), world_size, ranks), one_process) == []
