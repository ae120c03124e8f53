"""Who keeps a slot, whatever the scores: capacities are kept, nobody is dropped without need."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_oracle import E, T, combine_matrix, config_of, random_inputs

from megatron_moe.moe.capacity import apply_capacity, apply_device_capacity, decide, group_slots
from megatron_moe.moe.routers import ROUTERS
from megatron_moe.moe.routing import expert_counts, multi_hot

seeds = st.integers(0, 2**20)
every_router = pytest.mark.parametrize("name", list(ROUTERS))


@every_router
@given(seeds, st.floats(0.1, 2.0), st.sampled_from(["position", "probs", "random"]))
@settings(max_examples=15)
def test_capacity_is_never_exceeded(name, seed, factor, policy):
    """Kept + dropped = chosen, a drop only where the expert is full, survivors as before."""
    config = config_of(name, moe_expert_capacity_factor=factor, moe_token_drop_policy=policy)
    inputs = random_inputs(name, seed)
    choice = decide(ROUTERS[name], inputs, config)
    slots = group_slots(T, config, training=True)
    kept_GE = expert_counts(choice.expert_ids_GTK, E)
    chosen_GE = expert_counts(choice.chosen_ids_GTK, E)
    assert int(kept_GE.max()) <= slots
    kept_GTE, chosen_GTE = multi_hot(choice.expert_ids_GTK, E), multi_hot(choice.chosen_ids_GTK, E)
    assert ((chosen_GTE - kept_GTE) >= 0).all()
    assert not choice.weights_GTK[choice.expert_ids_GTK < 0].any()
    if name != "gshard_top2":  # there a second choice lost by the coin may use up a slot
        assert torch.equal(kept_GE, chosen_GE.clamp(max=slots))
    if not ROUTERS[name].own_capacity:
        free = combine_matrix(decide(ROUTERS[name], inputs, replace(config, moe_expert_capacity_factor=None)))
        assert torch.equal(combine_matrix(choice), free * kept_GTE)


@given(seeds, st.integers(1, 6))
def test_drop_policies_keep_whom_they_say(seed, slots):
    inputs = random_inputs("topk", seed, groups=1)
    choice = ROUTERS["topk"].route(inputs, config_of("topk", moe_router_pre_softmax=True))
    draws_TK = inputs.uniform("drop", 2)[0]
    for policy in ("position", "probs", "random"):
        ids_TK = apply_capacity(choice, slots, policy, inputs.uniform).expert_ids_GTK[0]
        for expert in range(E):
            wanting = [(t, k) for t in range(T) for k in range(2) if choice.expert_ids_GTK[0, t, k] == expert]
            rank = {
                "position": lambda tk: tk[0],
                "probs": lambda tk: -float(choice.weights_GTK[0, tk[0], tk[1]]),
                "random": lambda tk: -float(draws_TK[tk]),
            }[policy]
            kept = {(t, k) for t, k in wanting if ids_TK[t, k] == expert}
            assert kept == set(sorted(wanting, key=rank)[:slots])


@given(seeds, st.floats(0.1, 1.5))
def test_device_budget_is_kept(seed, factor):
    inputs = random_inputs("topk", seed)
    choice = apply_device_capacity(ROUTERS["topk"].route(inputs, config_of("topk")), factor, num_devices=3)
    kept_GD = expert_counts(choice.expert_ids_GTK, E).unflatten(-1, (3, -1)).sum(-1)
    assert int(kept_GD.max()) <= int(factor * T * 2 / 3)


@given(seeds, st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=20)
def test_protected_groups_lose_nothing(seed, share):
    """Whole groups are spared, in training alone; the others keep their budget."""
    config = config_of(
        "topk",
        moe_router_num_groups=3,
        moe_device_capacity_factor=0.5,
        moe_device_capacity_protected=share,
    )
    inputs = random_inputs("topk", seed, groups=8)
    spared_G = inputs.uniform("protect", 1)[:, 0, 0] < share
    choice = decide(ROUTERS["topk"], inputs, config)
    kept_G = (choice.expert_ids_GTK >= 0).flatten(1).sum(1)
    assert torch.equal(kept_G == 2 * T, spared_G)
    evaluated = decide(ROUTERS["topk"], inputs._replace(training=False), config)
    assert (evaluated.expert_ids_GTK >= 0).all()
