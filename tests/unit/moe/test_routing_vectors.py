"""Every decision of the independent oracle: indices exactly, weights to 1e-9 (float64) and 1e-5 (float32)."""

import hashlib
from dataclasses import replace

import numpy as np
import torch
from moe_oracle import (
    VECTORS,
    both_types,
    close,
    combine_matrix,
    inputs_of,
    kept_counts,
    load_cases,
    logits_of,
    topk_config,
)

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.capacity import (
    apply_capacity,
    apply_device_capacity,
    bounded_slots,
    capacity_slots,
)
from megatron_moe.moe.routers.expert_choice import choose_tokens, expert_choice
from megatron_moe.moe.routers.gshard_top2 import gshard_gating
from megatron_moe.moe.routers.hash import balanced_hash_table, hash_router
from megatron_moe.moe.routers.sinkhorn import sinkhorn, sinkhorn_plan
from megatron_moe.moe.routers.switch import switch
from megatron_moe.moe.routers.topk import topk
from megatron_moe.moe.routing import expert_counts, multi_hot


def test_vectors_are_as_copied():
    for line in (VECTORS / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((VECTORS / name).read_bytes()).hexdigest() == digest, name


@both_types
@load_cases("topk_softmax")
def test_topk(case, dtype):
    logits_GTE, expected = logits_of(case, dtype), case["expected"]
    choice = topk(inputs_of(logits_GTE), topk_config(logits_GTE, case["params"]))
    assert choice.expert_ids_GTK[0].tolist() == expected["indices"]
    close(choice.weights_GTK[0], expected["weights"], dtype)
    close(combine_matrix(choice)[0], expected["combine"], dtype)
    assert kept_counts(choice) == expected["tokens_per_expert"]


@both_types
@load_cases("group_limited")
def test_group_limited(case, dtype):
    logits_GTE, params, expected = logits_of(case, dtype), case["params"], case["expected"]
    bias_E = torch.tensor(case["inputs"]["bias"], dtype=dtype) if "bias" in case["inputs"] else None
    choice = topk(inputs_of(logits_GTE, bias_E=bias_E), topk_config(logits_GTE, params))
    assert choice.expert_ids_GTK[0].tolist() == expected["indices"]
    weights_TK = choice.weights_GTK[0]
    if params.get("eps"):
        # The guard that other code adds to the sum of sigmoids shrinks tiny weights; ours stay normalised.
        sums_T1 = torch.sigmoid(logits_GTE[0].double()).gather(-1, choice.expert_ids_GTK[0]).sum(-1, True)
        weights_TK = weights_TK * (sums_T1 / (sums_T1 + params["eps"])).to(dtype)
    close(weights_TK, expected["weights"], dtype)
    assert kept_counts(choice) == expected["tokens_per_expert"]
    size = logits_GTE.shape[-1] // params["n_groups"]
    for ids_K, groups in zip(choice.expert_ids_GTK[0].tolist(), expected["groups"], strict=True):
        assert {expert // size for expert in ids_K} <= set(groups)


@both_types
@load_cases("switch_top1")
def test_switch(case, dtype):
    logits_GTE, params, expected = logits_of(case, dtype), case["params"], case["expected"]
    num_tokens, num_experts = logits_GTE.shape[1:]
    options = {name: params[name] for name in ("rounding", "minimum", "multiple")}
    slots = capacity_slots(num_tokens, num_experts, 1, params["capacity_factor"], **options)
    assert slots == params["capacity"]
    config = MoEConfig(num_experts=num_experts, moe_router_topk=1)
    inputs = inputs_of(logits_GTE)
    before = switch(inputs, config)
    choice = apply_capacity(before, slots, "position", inputs.uniform)
    assert choice.chosen_ids_GTK[0, :, 0].tolist() == expected["expert"]
    close(before.weights_GTK[0, :, 0], expected["gate"], dtype)
    close(combine_matrix(choice)[0], expected["combine"], dtype)
    assert expert_counts(choice.chosen_ids_GTK, num_experts)[0].tolist() == expected["count_before_drop"]
    assert kept_counts(choice) == expected["kept_per_expert"]
    dropped = (choice.expert_ids_GTK[0, :, 0] < 0).nonzero()[:, 0].tolist()
    assert dropped == expected["dropped_tokens"]


@both_types
@load_cases("gshard_top2")
def test_gshard(case, dtype):
    params = case["params"]
    assert params["threshold"] == 0.5
    logits_GTE = torch.tensor(case["inputs"]["logits"], dtype=dtype)
    uniform_GT = torch.tensor(case["inputs"]["uniforms"], dtype=dtype)
    config = MoEConfig(
        num_experts=logits_GTE.shape[-1],
        moe_gshard_second_policy=params["second"],
        moe_gshard_slot_counting={"paper": "paper", "lingvo": "code"}[params["variant"]],
        moe_gshard_normalize=params["normalize"],
    )
    inputs = inputs_of(logits_GTE, uniform=lambda use, num: uniform_GT.unsqueeze(-1))
    choice = gshard_gating(inputs, config, params["capacity"])
    combine_GTE = combine_matrix(choice)
    for g, expected in enumerate(case["expected"]["groups"]):
        ids_T2, chosen_T2 = choice.expert_ids_GTK[g], choice.chosen_ids_GTK[g]
        assert chosen_T2[:, 0].tolist() == expected["first"]
        lost = [-1 if not coin else e for e, coin in zip(expected["second"], expected["coin"], strict=True)]
        assert chosen_T2[:, 1].tolist() == lost
        assert (ids_T2[:, 0] >= 0).tolist() == [slot >= 0 for slot in expected["slot1"]]
        assert (ids_T2[:, 1] >= 0).tolist() == [slot >= 0 for slot in expected["slot2"]]
        close(choice.weights_GTK[g, :, 0], expected["weight1"], dtype)
        close(choice.weights_GTK[g, :, 1], expected["weight2"], dtype)
        close(combine_GTE[g], expected["combine"], dtype)
        counts_E = expert_counts(ids_T2.unsqueeze(0), config.num_experts)[0]
        assert counts_E.tolist() == expected["kept_per_expert"]
        overflow = (ids_T2 < 0).all(dim=-1).nonzero()[:, 0].tolist()
        assert overflow == expected["overflow_tokens"]


@both_types
@load_cases("expert_choice")
def test_expert_choice(case, dtype):
    logits_GTE, params, expected = logits_of(case, dtype), case["params"], case["expected"]
    num_tokens, num_experts = logits_GTE.shape[1:]
    slots = capacity_slots(num_tokens, num_experts, 1, params["capacity_factor"], rounding=params["rounding"])
    assert min(slots, num_tokens) == expected["k"]
    chosen_GTE = choose_tokens(torch.softmax(logits_GTE, -1), None, slots)
    assert chosen_GTE[0].sum(-1).tolist() == expected["experts_per_token"]
    for expert, token_ids in enumerate(expected["token_indices"]):
        assert chosen_GTE[0, :, expert].nonzero()[:, 0].tolist() == sorted(token_ids)
    close(torch.softmax(logits_GTE, -1)[0] * chosen_GTE[0], expected["combine"], dtype)
    if capacity_slots(num_tokens, num_experts, 1, params["capacity_factor"]) == slots:
        config = MoEConfig(
            num_experts=num_experts, moe_router_topk=1, moe_expert_capacity_factor=params["capacity_factor"]
        )
        close(combine_matrix(expert_choice(inputs_of(logits_GTE), config))[0], expected["combine"], dtype)


@both_types
@load_cases("sinkhorn_hash", lambda case: case["params"]["method"] == "sinkhorn")
def test_sinkhorn(case, dtype):
    logits_GTE, params, expected = logits_of(case, dtype), case["params"], case["expected"]
    plan_GTE, iterations_G = sinkhorn_plan(logits_GTE.detach(), None, params["tol"])
    assert iterations_G.tolist() == [expected["iterations"]]
    close(plan_GTE[0], expected["plan"], dtype)
    config = MoEConfig(num_experts=logits_GTE.shape[-1], moe_router_topk=params["k"])
    choice = sinkhorn(inputs_of(logits_GTE), config)
    assert choice.expert_ids_GTK[0].tolist() == expected["indices"]
    close(choice.weights_GTK[0], expected["weights"], dtype)
    assert kept_counts(choice) == expected["tokens_per_expert"]
    plain = sinkhorn(inputs_of(logits_GTE, training=False), config)
    assert torch.equal(plain.expert_ids_GTK, topk(inputs_of(logits_GTE), config).expert_ids_GTK)


@load_cases("sinkhorn_hash", lambda case: case["params"]["method"] == "hash")
def test_balanced_hash(case, tmp_path):
    num_experts, expected = case["params"]["n_experts"], case["expected"]
    table_V, load_E = balanced_hash_table(case["inputs"]["frequency"], num_experts)
    assert (table_V, load_E) == (expected["table"], expected["load"])
    np.save(tmp_path / "table.npy", np.array(table_V))
    vocab_ids_GT = torch.tensor([case["inputs"]["token_ids"]])
    config = MoEConfig(num_experts=num_experts, moe_router_topk=1, moe_hash_table=str(tmp_path / "table.npy"))
    logits_GTE = torch.zeros(*vocab_ids_GT.shape, num_experts)
    choice = hash_router(inputs_of(logits_GTE, vocab_ids_GT=vocab_ids_GT), config)
    assert choice.expert_ids_GTK[0, :, 0].tolist() == expected["expert"]
    assert kept_counts(choice) == expected["tokens_per_expert"]


@load_cases("capacity", lambda case: case["params"]["kind"] == "slots")
def test_capacity_slots(case):
    p = case["params"]
    options = {name: p[name] for name in ("rounding", "minimum", "multiple")}
    slots = capacity_slots(p["tokens"], p["experts"], p["k"], p["factor"], **options)
    assert slots == case["expected"]["capacity"]


@both_types
@load_cases("capacity", lambda case: case["params"]["kind"] == "drop")
def test_drop(case, dtype):
    logits_GTE, params, expected = logits_of(case, dtype), case["params"], case["expected"]
    inputs = inputs_of(logits_GTE)
    before = topk(inputs, topk_config(logits_GTE, params))
    choice = apply_capacity(before, params["capacity"], params["policy"], inputs.uniform)
    keep_TE = multi_hot(choice.expert_ids_GTK, logits_GTE.shape[-1])[0]
    assert keep_TE.tolist() == expected["keep"]
    assert kept_counts(choice) == expected["kept_per_expert"]
    dropped_TE = multi_hot(choice.chosen_ids_GTK, logits_GTE.shape[-1])[0] - keep_TE
    assert sorted(dropped_TE.nonzero().tolist()) == sorted(expected["dropped_pairs"])
    counts_GE = expert_counts(choice.chosen_ids_GTK, logits_GTE.shape[-1])
    assert int(bounded_slots(counts_GE, params["capacity"])) == max(kept_counts(choice))


@both_types
@load_cases("capacity", lambda case: case["params"]["kind"] == "device_drop")
def test_device_drop(case, dtype):
    logits_GTE, params, expected = logits_of(case, dtype), case["params"], case["expected"]
    config = replace(topk_config(logits_GTE, params), moe_router_pre_softmax=True)
    protected_GT = torch.zeros(logits_GTE.shape[:2], dtype=torch.bool)
    protected_GT[0, params["protected_tokens"]] = True
    before = topk(inputs_of(logits_GTE), config)
    choice = apply_device_capacity(before, params["capacity_factor"], params["n_devices"], protected_GT)
    keep_TE = multi_hot(choice.expert_ids_GTK, logits_GTE.shape[-1])[0]
    assert keep_TE.tolist() == expected["keep"]
    kept_D = keep_TE.unflatten(-1, (params["n_devices"], -1)).sum(dim=(0, 2))
    assert kept_D.tolist() == expected["kept_per_device"]
