"""Properties of the whole layer that hold for any tokens."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.building import normal
from tests.unit.moe.test_moe_layer import BASE, B, D, S, batch, layer


@given(st.permutations(range(S)), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_permuted_tokens_give_permuted_outputs(order: list[int], seed: int) -> None:
    """Dropless top-k looks at one token at a time: nothing of a token's output depends on where its neighbours are."""
    made, x_SBD = layer(BASE), normal(seed, S, B, D)
    permutation = torch.tensor(order)
    torch.testing.assert_close(
        made(x_SBD[permutation], batch()), made(x_SBD, batch())[permutation], rtol=1e-12, atol=1e-14
    )


@given(st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_what_is_kept_and_dropped_is_what_was_chosen(seed: int) -> None:
    made = layer(replace(BASE, moe_expert_capacity_factor=0.5))
    choice, _ = made.gate(normal(seed, S, B, D), batch())
    kept, chosen = choice.expert_ids_GTK, choice.chosen_ids_GTK
    assert ((kept == chosen) | (kept == -1)).all()
    sums = made.gate.statistics[0].routing
    assert int(sums.kept_E.sum()) == int((kept >= 0).sum()) <= int(sums.chosen_E.sum()) == S * B * 2
