"""What must hold for any scores: properties of every router, of capacity, and of the balance losses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import E, T, combine_matrix, config_of, inputs_of, random_inputs, uniforms

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.capacity import decide, slots_may_be_empty
from megatron_moe.moe.losses import BALANCE_LOSSES, attach_loss, balance_loss, balance_stats
from megatron_moe.moe.reference import reference_moe
from megatron_moe.moe.routers import ROUTERS
from megatron_moe.moe.routers.expert_choice import choose_tokens
from megatron_moe.moe.routers.forced import dealt_ids
from megatron_moe.moe.routers.sinkhorn import sinkhorn_plan
from megatron_moe.moe.routing import check_finite, flatten, routing_sums

seeds = st.integers(0, 2**20)
every_router = pytest.mark.parametrize("name", list(ROUTERS))


@every_router
@given(seeds)
@settings(max_examples=10)
def test_groups_are_decided_apart(name, seed):
    """Stacking groups changes nothing: what a rank holds beside a group has no influence on it."""
    config = config_of(name, moe_expert_capacity_factor=0.8)
    inputs = random_inputs(name, seed)
    together = decide(ROUTERS[name], inputs, config)
    keys_GT = torch.arange(2 * T).view(2, T)
    for g in range(2):
        alone = decide(
            ROUTERS[name],
            inputs._replace(
                logits_GTE=inputs.logits_GTE[g : g + 1],
                vocab_ids_GT=inputs.vocab_ids_GT[g : g + 1],
                uniform=uniforms(keys_GT[g : g + 1]),
            ),
            config,
        )
        assert torch.equal(together.expert_ids_GTK[g], alone.expert_ids_GTK[0])
        assert torch.equal(together.weights_GTK[g], alone.weights_GTK[0])


@every_router
@given(seeds, st.integers(1, T - 1))
@settings(max_examples=10)
def test_padding_changes_nothing(name, seed, num_valid):
    """Tokens after the valid ones get no expert and leave the others' decisions as they were."""
    if name == "expert_choice":  # the number of tokens an expert takes follows the size of the group
        config = config_of(name, moe_expert_capacity_factor=float(E))
    else:
        config = config_of(name)
    inputs = random_inputs(name, seed, groups=1)
    valid_GT = (torch.arange(T) < num_valid).unsqueeze(0)
    padded = decide(ROUTERS[name], inputs._replace(valid_GT=valid_GT), config)
    alone = decide(
        ROUTERS[name],
        inputs._replace(
            logits_GTE=inputs.logits_GTE[:, :num_valid],
            vocab_ids_GT=inputs.vocab_ids_GT[:, :num_valid],
            uniform=uniforms(torch.arange(num_valid).unsqueeze(0)),
        ),
        config,
    )
    assert (padded.expert_ids_GTK[0, num_valid:] == -1).all()
    assert not padded.weights_GTK[0, num_valid:].any() and not padded.scores_GTE[0, num_valid:].any()
    torch.testing.assert_close(combine_matrix(padded)[:, :num_valid], combine_matrix(alone))
    sums = routing_sums(padded, valid_GT)
    assert torch.equal(sums.chosen_E, routing_sums(alone, None).chosen_E) and int(sums.tokens) == num_valid


@given(seeds, st.integers(1, T - 1), st.integers(0, 4))
def test_padding_takes_no_place_at_an_expert_that_chooses(seed, num_valid, slots):
    scores_GTE = torch.softmax(random_inputs("expert_choice", seed).logits_GTE, -1)
    valid_GT = (torch.arange(T) < num_valid).expand(2, T)
    chosen_GTE = choose_tokens(scores_GTE, valid_GT, slots)[:, :num_valid]
    assert torch.equal(chosen_GTE, choose_tokens(scores_GTE[:, :num_valid], None, slots))


@given(seeds)
@settings(max_examples=20)
def test_each_group_has_its_own_sinkhorn_plan(seed):
    """A group that has converged stops there, however long its neighbour takes."""
    logits_GTE = random_inputs("sinkhorn", seed).logits_GTE * torch.tensor([0.1, 2.0]).view(2, 1, 1)
    plan_GTE, iterations_G = sinkhorn_plan(logits_GTE, None)
    for g in range(2):
        alone_GTE, alone_G = sinkhorn_plan(logits_GTE[g : g + 1], None)
        assert torch.equal(plan_GTE[g], alone_GTE[0]) and iterations_G[g] == alone_G[0]


@pytest.mark.parametrize("name", [name for name, spec in ROUTERS.items() if spec.scope == "token"])
@given(seeds)
@settings(max_examples=10)
def test_permuted_tokens_permute_a_dropless_choice(name, seed):
    inputs, config = random_inputs(name, seed, groups=1), config_of(name)
    order_T = torch.randperm(T, generator=torch.Generator().manual_seed(seed))
    straight = decide(ROUTERS[name], inputs, config)
    permuted = decide(
        ROUTERS[name],
        inputs._replace(
            logits_GTE=inputs.logits_GTE[:, order_T],
            vocab_ids_GT=inputs.vocab_ids_GT[:, order_T],
            uniform=uniforms(order_T.unsqueeze(0)),
        ),
        config,
    )
    assert torch.equal(permuted.expert_ids_GTK, straight.expert_ids_GTK[:, order_T])
    assert torch.equal(permuted.weights_GTK, straight.weights_GTK[:, order_T])


@given(seeds, st.booleans(), st.booleans(), st.sampled_from(["softmax", "sigmoid"]), st.integers(1, E))
def test_weights_sum_as_the_method_says(seed, pre, norm, score, topk):
    config = config_of(
        "topk",
        moe_router_topk=topk,
        moe_router_pre_softmax=pre,
        moe_router_norm_topk=norm,
        moe_router_score_function=score,
        moe_router_topk_scaling_factor=2.5,
    )
    choice = ROUTERS["topk"].route(random_inputs("topk", seed), config)
    sums_GT = choice.weights_GTK.sum(-1)
    if score == "softmax" and pre and not norm:
        assert (sums_GT <= 2.5 + 1e-12).all()
        torch.testing.assert_close(choice.weights_GTK, 2.5 * choice.scores_GTE.gather(-1, choice.expert_ids_GTK))
    else:
        torch.testing.assert_close(sums_GT, torch.full_like(sums_GT, 2.5))
    torch.testing.assert_close(choice.scores_GTE.sum(-1), torch.ones_like(sums_GT))


def dense_experts(seed, num_experts, width=4):
    """Random square experts, and the function that applies one."""
    generator = torch.Generator().manual_seed(seed)
    weights_EDD = torch.randn(num_experts, width, width, generator=generator, dtype=torch.float64)
    x_GTD = torch.randn(2, T, width, generator=generator, dtype=torch.float64)
    return x_GTD, lambda e, rows: torch.tanh(rows @ weights_EDD[e])


@given(seeds)
@settings(max_examples=10)
def test_k_equal_to_e_is_the_dense_mixture(seed):
    x_GTD, expert = dense_experts(seed, E)
    choice = ROUTERS["topk"].route(random_inputs("topk", seed), config_of("topk", moe_router_topk=E))
    mixture_GTD = sum(choice.scores_GTE[..., e : e + 1] * expert(e, x_GTD) for e in range(E))
    torch.testing.assert_close(reference_moe(x_GTD, choice, expert), mixture_GTD)


@given(seeds)
@settings(max_examples=10)
def test_one_expert_is_a_dense_layer(seed):
    x_GTD, expert = dense_experts(seed, 1)
    config = MoEConfig(num_experts=1, moe_router_topk=1)
    choice = ROUTERS["topk"].route(inputs_of(torch.randn(2, T, 1, dtype=torch.float64)), config)
    torch.testing.assert_close(reference_moe(x_GTD, choice, expert), expert(0, x_GTD))


@every_router
@given(seeds, st.booleans())
@settings(max_examples=10)
def test_flatten_lists_every_kept_copy(name, seed, limited):
    config = config_of(name, moe_expert_capacity_factor=0.7 if limited else None)
    choice = decide(ROUTERS[name], random_inputs(name, seed), config)
    routing = flatten(choice, slots_may_be_empty(ROUTERS[name], config, has_padding=False, training=True))
    rebuilt_TE = torch.zeros(2 * T, E, dtype=torch.float64)
    rebuilt_TE.index_put_((routing.token_ids_N, routing.expert_ids_N), routing.weights_N, accumulate=True)
    assert torch.equal(rebuilt_TE, combine_matrix(choice).flatten(0, 1))
    assert (routing.token_ids_N.diff() >= 0).all() and (routing.expert_ids_N >= 0).all()
    assert routing.expert_ids_N.numel() == int(routing_sums(choice, None).kept_E.sum())


@pytest.mark.parametrize("name", [name for name, loss in BALANCE_LOSSES.items() if loss is not None])
@given(seeds, st.integers(1, T - 1))
@settings(max_examples=10)
def test_a_group_may_be_cut_anywhere(name, seed, cut):
    """Counts summed over the parts, and partial score sums: the parts' losses add up to the group's loss."""
    config = config_of("topk", moe_router_num_groups=3, moe_router_group_topk=2)
    loss = BALANCE_LOSSES[name]
    choice = ROUTERS["topk"].route(random_inputs("topk", seed), config)

    def part(cols):
        taken = choice._replace(chosen_ids_GTK=choice.chosen_ids_GTK[:, cols], scores_GTE=choice.scores_GTE[:, cols])
        return balance_stats(taken, None, loss, config), taken.scores_GTE.sum(1)

    whole_stats, whole_sum = part(slice(None))
    stats_a, sum_a = part(slice(0, cut))
    stats_b, sum_b = part(slice(cut, None))
    summed = [None if a is None else a + b for a, b in zip(stats_a, stats_b, strict=True)]
    assert all(a is None or torch.equal(a, b) for a, b in zip(summed, whole_stats, strict=True))
    coefficients_GE = loss.coefficients(whole_stats, config)
    torch.testing.assert_close(
        balance_loss(coefficients_GE, sum_a) + balance_loss(coefficients_GE, sum_b),
        balance_loss(coefficients_GE, whole_sum),
    )


@given(st.integers(1, 40), st.integers(2, 8), st.data())
def test_forced_loads_are_exact(num_tokens, num_experts, data):
    topk = data.draw(st.integers(1, num_experts))
    skew = data.draw(st.floats(1, num_experts / topk))
    ids_TK = dealt_ids(num_tokens, num_experts, topk, skew)
    counts_E = torch.bincount(ids_TK.flatten(), minlength=num_experts)
    assert all(len(set(row)) == topk for row in ids_TK.tolist())
    assert abs(int(counts_E[0]) - skew * num_tokens * topk / num_experts) < 1 + 1e-6
    assert int(counts_E[1:].max() - counts_E[1:].min()) <= 1
    balanced_E = torch.bincount(dealt_ids(num_tokens, num_experts, topk, 1.0).flatten(), minlength=num_experts)
    assert int(balanced_E.max() - balanced_E.min()) <= 1


def test_attach_loss_is_the_identity_with_a_second_gradient():
    x = torch.arange(3.0, requires_grad=True)
    y = attach_loss(x * 2, (x**2).sum())
    assert torch.equal(y, x * 2)
    y.sum().backward()
    assert torch.equal(x.grad, 2 + 2 * x)
    # A pipeline stage detaches what it sends in place.
    attach_loss(x * 2, (x**2).sum()).detach_()


def test_non_finite_logits_are_counted():
    logits = torch.tensor([[[0.0, float("nan"), 1.0], [float("inf"), 0.0, -float("inf")]]])
    assert int(check_finite(logits)) == 3
    assert int(check_finite(torch.zeros(1, 2, 3))) == 0


@given(seeds)
@settings(max_examples=10)
def test_unnamed_ties_go_to_the_lower_index(seed):
    generator = torch.Generator().manual_seed(seed)
    logits_GTE = torch.randint(0, 2, (1, T, E), generator=generator).double()
    choice = ROUTERS["topk"].route(inputs_of(logits_GTE), config_of("topk"))
    for row, ids in zip(logits_GTE[0].tolist(), choice.expert_ids_GTK[0].tolist(), strict=True):
        assert ids == sorted(range(E), key=lambda e: (-row[e], e))[:2]


@given(seeds, st.integers(1, 3), st.integers(1, 4), st.sampled_from(["softmax", "sigmoid"]))
@settings(max_examples=30)
def test_group_limit_by_plain_loops(seed, keep, counted, score):
    """The groups with the largest sums of best biased scores, and the best experts inside them."""
    config = config_of(
        "topk",
        moe_router_score_function=score,
        moe_router_num_groups=3,
        moe_router_group_topk=keep,
        moe_router_group_score_topk=counted,
    )
    inputs = random_inputs("topk", seed, groups=1)
    bias_E = torch.randn(E, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    choice = ROUTERS["topk"].route(inputs._replace(bias_E=bias_E), config)
    logits_TE = inputs.logits_GTE[0]
    scores_TE = torch.sigmoid(logits_TE) if score == "sigmoid" else torch.softmax(logits_TE, -1)
    for keys, ids in zip(
        (scores_TE + bias_E).tolist(),
        choice.expert_ids_GTK[0].tolist(),
        strict=True,
    ):
        groups = [range(2 * g, 2 * g + 2) for g in range(3)]
        groups.sort(key=lambda members: -sum(sorted((keys[e] for e in members), reverse=True)[:counted]))
        allowed = [e for members in groups[:keep] for e in members]
        assert ids == sorted(allowed, key=lambda e: -keys[e])[:2]
