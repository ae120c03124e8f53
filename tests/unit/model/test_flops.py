"""The FLOPs of the formulas against those of the products that a forward pass does."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_moe.config.schema import Config, DataConfig, ModelConfig, MoEConfig
from megatron_moe.model.decoder import Decoder
from megatron_moe.model.flops import ForwardFlops
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.building import token_batch

S, B, V = 12, 2, 40
SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 6,
    "qk_head_dim": 5,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 3,
}


@pytest.mark.parametrize(
    ("model", "moe"),
    [
        ({"num_query_groups": 2, "kv_channels": 6}, {}),
        ({"activation": "gelu"}, {"num_experts": 6, "moe_ffn_hidden_size": 10}),
        (LATENT, {"num_experts": 6, "moe_router_topk": 3, "moe_shared_expert_intermediate_size": 9}),
        (LATENT | {"q_lora_rank": 7}, {}),
        ({"mtp_num_layers": 2}, {}),
    ],
)
def test_every_product_is_counted(model: dict[str, Any], moe: dict[str, Any]) -> None:
    config = Config(
        model=ModelConfig(**SIZES, vocab_size=V, make_vocab_size_divisible_by=1, **model),
        moe=MoEConfig(**moe),
        data=DataConfig(seq_length=2 * S),  # of which half is counted; the counter counts the whole square of S
    )
    flops = ForwardFlops.of(config)
    decoder, ids_SB = Decoder(config, ParallelContext.single()), torch.zeros(S, B, dtype=torch.int64)
    # The counter knows the products of the plain implementation of attention only.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        decoder(None, token_batch(ids_SB, training=True))
    assert counter.get_total_flops() == S * B * (sum(flops.layers) + flops.head + flops.mtp)


@pytest.mark.parametrize(("window", "keys"), [(100, 24.0), (48, 24.0), (12, 10.5)])
def test_a_window_is_cut_at_the_start(window: int, keys: float) -> None:
    def per_token(**values: Any) -> float:
        config = Config(model=ModelConfig(**SIZES, **values), data=DataConfig(seq_length=48))
        return ForwardFlops.of(config).layers[0]

    core = 4.0 * 16 * 24
    assert per_token() - per_token(window_size=(window, 0)) == pytest.approx(core - core * keys / 24)
