"""Every impossible setting of the mixture of experts gets one sentence that says what to change."""

import numpy as np
import pytest
import torch
from moe_oracle import inputs_of

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.capacity import apply_capacity, capacity_slots
from megatron_moe.moe.checks import moe_checks
from megatron_moe.moe.routers import ROUTERS

NONE = {"moe_router_load_balancing_type": ("none",)}
FAULTS = [
    ({"num_experts": 0}, "must be positive"),
    ({"moe_router_topk": 9}, "--moe-router-topk 9 must be from 1 to --num-experts 8"),
    ({"moe_router_topk": 0}, "--moe-router-topk 0 must be from 1"),
    ({"moe_router_num_groups": 3, "moe_router_group_topk": 2}, "choose one of 1, 2, 4, 8"),
    ({"moe_router_num_groups": 4}, "alone limits nothing"),
    (
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_group_score_topk": 0},
        "--moe-router-group-score-topk 0 must be positive",
    ),
    ({"moe_router_num_groups": 4, "moe_router_group_topk": 5}, "must be from 1 to --moe-router-num-groups 4"),
    (
        {"moe_router_topk": 5, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
        "leaves 4 experts to a token, fewer than --moe-router-topk 5: allow at least 3 groups",
    ),
    ({"moe_router_topk": 1}, "gives every token weight 1"),
    ({"moe_router_topk": 1, "moe_router_score_function": "sigmoid"}, "gives every token weight 1"),
    ({"moe_expert_capacity_factor": 0.0}, "--moe-expert-capacity-factor 0.0 would drop every token"),
    ({"moe_eval_capacity_factor": -1.0}, "--moe-eval-capacity-factor"),
    ({"moe_device_capacity_factor": 1.0}, "needs --moe-router-num-groups"),
    ({"moe_router_group_topk": 2}, "--moe-router-group-topk 2 needs --moe-router-num-groups"),
    (
        {"moe_router_load_balancing_type": ("deepseek_comm",), "moe_router_num_groups": 4},
        "deepseek_comm needs --moe-router-group-topk",
    ),
    ({"moe_device_capacity_protected": 2.0}, "from 0 to 1"),
    ({"moe_aux_loss_coeff": (0.0,)}, "0 for aux_loss balances nothing"),
    ({"moe_aux_loss_coeff": (0.1, 0.1)}, "names 1 losses but --moe-aux-loss-coeff has 2"),
    ({"moe_router_load_balancing_type": ("none", "aux_loss")}, "'none' stands alone"),
    (
        {"moe_router_load_balancing_type": ("gshard", "gshard"), "moe_aux_loss_coeff": (0.1, 0.1)},
        "names gshard 2 times",
    ),
    ({"moe_router_load_balancing_type": ("deepseek_comm",)}, "needs --moe-router-num-groups"),
    ({"moe_z_loss_coeff": 0.0}, "--moe-z-loss-coeff 0 does nothing"),
    ({"moe_router": "expert_choice"}, "--moe-allow-acausal-routing"),
    ({"moe_router": "switch"}, "takes one expert per token"),
    (
        {"moe_router": "switch", "moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
        "--moe-router-score-function means nothing to --moe-router switch: leave it out, or use topk.",
    ),
    ({"moe_router": "gshard_top2", "moe_router_topk": 3}, "--moe-router-topk 3 must be 2"),
    ({"moe_router": "hash"}, "a balance loss cannot act"),
    (
        {"moe_router": "hash", "moe_router_enable_expert_bias": True, **NONE},
        "means nothing to --moe-router hash: leave it out, or use topk or switch",
    ),
    (
        {"moe_router": "sinkhorn", "moe_router_enable_expert_bias": True},
        "means nothing to --moe-router sinkhorn",
    ),
    ({"moe_router": "force_skewed", "moe_router_force_skew": 5.0}, "from 1 to E/K = 4 times"),
]


@pytest.mark.parametrize(("changes", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_one_clear_sentence(changes, words):
    sentences = list(moe_checks(MoEConfig(**{"num_experts": 8, **changes})))
    assert len(sentences) == 1
    assert words in sentences[0] and sentences[0].endswith(".")


@pytest.mark.parametrize("name", list(ROUTERS))
def test_sensible_settings_pass(name):
    changes = {
        "expert_choice": {"moe_allow_acausal_routing": True},
        "switch": {"moe_router_topk": 1},
        "hash": NONE,
    }
    assert not list(moe_checks(MoEConfig(num_experts=8, moe_router=name, **changes.get(name, {}))))


def test_a_dense_model_has_nothing_to_check():
    assert not list(moe_checks(MoEConfig(moe_aux_loss_coeff=(0.0,))))


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'ceil' or 'floor', not 'up'"):
        capacity_slots(8, 4, 2, 1.0, rounding="up")
    choice = ROUTERS["topk"].route(inputs_of(torch.randn(1, 8, 4)), MoEConfig(num_experts=4))
    with pytest.raises(ValueError, match="position, probs or random, not 'first'"):
        apply_capacity(choice, 4, "first", lambda use, num: torch.rand(1, 8, num))


@pytest.mark.parametrize(
    ("table", "words"), [([[0, 1, 2]], "not \\[V, 2\\]"), ([[0, 8]], "outside 0..7")], ids=["shape", "range"]
)
def test_bad_hash_tables_are_named(tmp_path, table, words):
    path = tmp_path / "table.npy"
    np.save(path, np.array(table))
    config = MoEConfig(num_experts=8, moe_router="hash", moe_hash_table=str(path))
    with pytest.raises(ValueError, match=words):
        ROUTERS["hash"].route(inputs_of(torch.zeros(1, 1, 8)), config)
