"""Balance losses, z-loss and bias update against the oracle: values, and gradients with fixed counts."""

import torch
from moe_oracle import both_types, close, inputs_of, load_cases, logits_of, topk_config
from torch.nn.utils.rnn import pad_sequence

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.bias import update_bias
from megatron_moe.moe.losses import BALANCE_LOSSES, balance_loss, balance_stats, z_loss_sum
from megatron_moe.moe.routers.gshard_top2 import gshard_gating
from megatron_moe.moe.routers.switch import switch
from megatron_moe.moe.routers.topk import topk
from megatron_moe.moe.routing import Choice, expert_counts, make_choice

NAMES = {
    "switch": "aux_loss",
    "deepseek_expert": "deepseek_expert",
    "deepseek_device": "deepseek_device",
    "deepseek_comm": "deepseek_comm",
    "sequence_wise": "seq_aux_loss",
    "global_batch": "global_aux_loss",
}


def loss_of(name, choice, config, stats_of=None):
    """[G] losses of a choice; ``stats_of``: the choice that is counted, if another."""
    loss = BALANCE_LOSSES[name]
    stats = balance_stats(choice if stats_of is None else stats_of, None, loss, config)
    return balance_loss(loss.coefficients(stats, config), choice.scores_GTE.sum(dim=1)), stats


def mapped_choice(scores_GTE, routing_map):
    """A choice with the given scores and 0/1 map of chosen experts."""
    map_GTE = torch.tensor(routing_map).view(scores_GTE.shape).bool()
    ids_GTE = torch.where(map_GTE, torch.arange(scores_GTE.shape[-1]), -1)
    return Choice(ids_GTE, ids_GTE * 0.0, scores_GTE, ids_GTE)


def per_sequence(tensor, sequence_length):
    """[1, T, E] or [T, E] -> [G, sequence length, E]."""
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor.view(-1, sequence_length or tensor.shape[0], tensor.shape[-1])


@both_types
@load_cases("aux_losses", lambda case: case["params"]["loss"] not in ("z", "global_batch"))
def test_balance_losses(case, dtype):
    params, expected, logits_GTE = case["params"], case["expected"], logits_of(case, dtype)
    config = MoEConfig(
        num_experts=logits_GTE.shape[-1],
        moe_router_topk=params.get("k", 2),
        moe_router_score_function=params.get("score", "softmax"),
        moe_router_num_groups=params.get("n_devices"),
        moe_router_group_topk=params.get("max_devices"),
        moe_router_load_balancing_type=(NAMES[params["loss"]],),
    )
    grouped_GTE = per_sequence(logits_GTE, params.get("sequence_length"))
    if params.get("count_from") == "unbiased top-k":
        # With a bias that turns the choice round, the plain ids must still be counted.
        bias_E = torch.arange(config.num_experts, dtype=dtype)
        choice = topk(inputs_of(grouped_GTE, bias_E=bias_E), config)
        assert not torch.equal(choice.chosen_ids_GTK, choice.plain_ids_GTK)
        plain_GE = expert_counts(choice.plain_ids_GTK, config.num_experts)
        assert plain_GE.tolist() == per_sequence(torch.tensor(expected["routing_map"]), 8).sum(1).tolist()
    else:
        scores_GTE = torch.softmax(grouped_GTE, -1)
        if params.get("score") == "sigmoid":
            scores_GTE = torch.sigmoid(grouped_GTE) / torch.sigmoid(grouped_GTE).sum(-1, keepdim=True)
        choice = mapped_choice(scores_GTE, case["inputs"]["routing_map"])
    loss_G, _ = loss_of(NAMES[params["loss"]], choice, config)
    loss = params["alpha"] * loss_G.mean()
    close(loss, expected["loss"], dtype)
    if "per_sequence" in expected:
        close(params["alpha"] * loss_G, expected["per_sequence"], dtype)
    (gradient,) = torch.autograd.grad(loss, logits_GTE)
    close(gradient[0], expected["grad_logits"], dtype)


@both_types
@load_cases("aux_losses", lambda case: case["params"]["loss"] == "z")
def test_z_loss(case, dtype):
    logits_GTE, expected = logits_of(case, dtype), case["expected"]
    loss = case["params"]["coeff"] * z_loss_sum(logits_GTE[0], None) / logits_GTE.shape[1]
    close(loss, expected["loss"], dtype)
    close(torch.autograd.grad(loss, logits_GTE)[0][0], expected["grad_logits"], dtype)
    half = torch.arange(logits_GTE.shape[1]) % 2 == 0
    masked = z_loss_sum(logits_GTE[0], half)
    close(masked, z_loss_sum(logits_GTE[0, half], None).detach(), dtype)


@both_types
@load_cases("aux_losses", lambda case: case["params"]["loss"] == "global_batch")
def test_global_batch_loss(case, dtype):
    """Counts of the whole batch, probabilities of each part: the parts add up to the loss of the union.

    Parts are of unequal length; the shorter ones are padded here with tokens that must not count.
    """
    params, expected = case["params"], case["expected"]
    parts = [torch.tensor(part, dtype=dtype) for part in case["inputs"]["logits_list"]]
    maps = [torch.tensor(part).bool() for part in case["inputs"]["routing_map_list"]]
    lengths = [len(part) for part in parts]
    logits_GTE = pad_sequence(parts, batch_first=True, padding_value=7.0).requires_grad_()
    valid_GT = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    map_GTE = pad_sequence(maps, batch_first=True, padding_value=True)
    ids_GTE = torch.where(map_GTE, torch.arange(map_GTE.shape[-1]), -1)
    choice = make_choice(ids_GTE, ids_GTE * 0.0, torch.softmax(logits_GTE, -1), valid_GT)
    config = MoEConfig(num_experts=logits_GTE.shape[-1], moe_router_topk=params["k"])
    spec = BALANCE_LOSSES["global_aux_loss"]
    stats = balance_stats(choice, valid_GT, spec, config)
    whole = stats._replace(counts_GE=stats.counts_GE.sum(0, True), tokens_G=stats.tokens_G.sum(0, True))
    loss_P = params["alpha"] * balance_loss(spec.coefficients(whole, config), choice.scores_GTE.sum(dim=1))
    close(loss_P.sum(), expected["loss"], dtype)
    share_P = torch.tensor(lengths) / sum(lengths)
    close(loss_P / share_P, expected["local"], dtype)
    (gradient_GTE,) = torch.autograd.grad(loss_P.sum(), logits_GTE)
    assert not gradient_GTE[~valid_GT].any()
    for gradient_TE, length, share, theirs in zip(
        gradient_GTE, lengths, share_P, expected["grad_logits_local"], strict=True
    ):
        close(gradient_TE[:length] / share, theirs, dtype)
    micro_P = balance_loss(spec.coefficients(stats, config), choice.scores_GTE.sum(dim=1))
    close(params["alpha"] * micro_P, expected["micro"], dtype)


@both_types
@load_cases("switch_top1")
def test_switch_loss(case, dtype):
    logits_GTE, expected = logits_of(case, dtype), case["expected"]
    config = MoEConfig(num_experts=logits_GTE.shape[-1], moe_router_topk=1)
    loss_G, stats = loss_of("aux_loss", switch(inputs_of(logits_GTE), config), config)
    close(stats.counts_GE[0].double() / logits_GTE.shape[1], expected["aux_f"], dtype)
    loss = case["params"]["alpha"] * loss_G[0]
    close(loss, expected["aux_loss"], dtype)
    close(torch.autograd.grad(loss, logits_GTE)[0][0], expected["aux_grad_logits"], dtype)


@both_types
@load_cases("gshard_top2")
def test_gshard_loss(case, dtype):
    """The mean form as printed; first choices alone are counted, overflowed ones included."""
    logits_GTE = torch.tensor(case["inputs"]["logits"], dtype=dtype).requires_grad_()
    config = MoEConfig(num_experts=logits_GTE.shape[-1])
    choice = gshard_gating(inputs_of(logits_GTE), config, case["params"]["capacity"])
    loss_G, stats = loss_of("gshard", choice, config)
    gradient_GTE = torch.autograd.grad(loss_G.sum(), logits_GTE)[0]
    for g, expected in enumerate(case["expected"]["groups"]):
        assert stats.counts_GE[g].tolist() == expected["first_count"]
        close(loss_G[g], expected["aux_loss"], dtype)
        close(loss_G[g] * config.num_experts**2, expected["aux_loss_scaled"], dtype)
        close(gradient_GTE[g], expected["aux_loss_grad_logits"], dtype)
    close(loss_G.mean(), case["expected"]["aux_loss"], dtype)


@both_types
@load_cases("bias_update", lambda case: "tokens_per_expert" in case["inputs"])
def test_bias_update(case, dtype):
    bias_E = torch.tensor(case["inputs"]["bias"], dtype=dtype)
    counts_E = torch.tensor(case["inputs"]["tokens_per_expert"])
    close(update_bias(bias_E, counts_E, case["params"]["rate"]), case["expected"]["bias"], dtype)


@both_types
@load_cases("bias_update", lambda case: "logits" in case["inputs"])
def test_bias_closed_loop(case, dtype):
    params, logits_GTE = case["params"], logits_of(case, dtype)
    config = topk_config(logits_GTE, {"k": params["k"], "mode": "sigmoid"})
    bias_E = torch.tensor(case["inputs"]["bias"], dtype=dtype)
    for step in case["expected"]["trace"]:
        close(bias_E, step["bias_before"], dtype)
        choice = topk(inputs_of(logits_GTE, bias_E=bias_E), config)
        counts_E = expert_counts(choice.chosen_ids_GTK, logits_GTE.shape[-1])[0]
        assert counts_E.tolist() == step["tokens_per_expert"]
        bias_E = update_bias(bias_E, counts_E, params["rate"])
    close(bias_E, case["expected"]["bias"], dtype)
