"""The whole MoE layer: against the dense reference, at its edges, and its gradients by finite differences."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.schema import ModelConfig, MoEConfig
from megatron_moe.moe.layer import MoELayer
from megatron_moe.moe.reference import reference_moe
from megatron_moe.moe.routers import ROUTERS
from megatron_moe.moe.routing import Choice
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sharding import sharded_parameters
from megatron_moe.parallel.tokens import TokenBatch
from tests.helpers.building import normal, token_batch

S, B, D, FF, E = 6, 2, 5, 4, 4
MODEL = ModelConfig(hidden_size=D, ffn_hidden_size=FF)
BASE = MoEConfig(num_experts=E, moe_ffn_hidden_size=FF, moe_aux_loss_coeff=(0.7,), moe_group_size="3")
VARIANTS: dict[str, MoEConfig] = {
    name: replace(BASE, moe_router=name) for name in ROUTERS if name not in ("switch", "hash")
} | {
    "switch": replace(BASE, moe_router="switch", moe_router_topk=1),
    "hash": replace(BASE, moe_router="hash", moe_router_load_balancing_type=("none",), moe_aux_loss_coeff=()),
    "sigmoid": replace(BASE, moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5),
    "capacity": replace(BASE, moe_expert_capacity_factor=0.6, moe_token_drop_policy="position"),
    "random drops": replace(BASE, moe_expert_capacity_factor=0.6, moe_token_drop_policy="random"),
    "jitter and z-loss": replace(BASE, moe_input_jitter_eps=0.2, moe_z_loss_coeff=0.3),
}


def layer(moe: MoEConfig, model: ModelConfig = MODEL, shared: torch.nn.Module | None = None) -> MoELayer:
    """A layer in float64 with weights far from their small initial values."""
    ctx = ParallelContext.single()
    made = MoELayer(model, moe, 0, ctx, torch.float64, output_std=0.02, shared_expert=shared)
    for i, p in enumerate(made.parameters()):
        p.data.copy_(normal(i, *p.shape) * 0.7)
    return made


def batch(padded: bool = False, **changes: Any) -> TokenBatch:
    ids_SB = torch.arange(S * B).view(S, B) % 7
    padding_SB = None
    if padded:
        padding_SB = torch.zeros(S, B, dtype=torch.bool)
        padding_SB[4:, 1] = True
    return token_batch(ids_SB, padding_SB=padding_SB, **changes)


def dense(made: MoELayer, x_SBD: Tensor, choice: Choice) -> Tensor:
    """The reference on the layer's own decision."""

    def expert(e: int, rows: Tensor) -> Tensor:
        gate, up = made.experts.fc1[e]
        return F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), made.experts.fc2[e])

    return reference_moe(x_SBD.reshape(1, -1, D), choice, expert).view(x_SBD.shape)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_against_the_dense_reference(variant, training):
    made, tokens = layer(VARIANTS[variant]), batch(padded=True, training=training)
    x_SBD, weight = normal(99, S, B, D), normal(98, S, B, D)
    results = []
    for fast in (True, False):
        x = x_SBD.clone().requires_grad_()
        choice, loss = made.gate(x, tokens)
        assert (loss is not None) == (training and bool(made.gate.coefficients))
        y = made(x, tokens) if fast else dense(made, x, choice)
        objective = (y * weight).sum()
        if not fast and loss is not None:
            objective = objective + loss
        for p in made.parameters():
            p.grad = None
        objective.backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in made.parameters()]
        results.append((y.detach(), x.grad, *grads))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-11, atol=1e-12)
    assert not results[0][0][4:, 1].any(), "padding has no expert"


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_gradients_by_finite_differences(variant):
    """Of the output and of the balance loss that rides on it, for the input and every weight."""
    moe = VARIANTS[variant]
    made, tokens = layer(moe), batch(padded=True)
    x_SBD = normal(97, S, B, D).requires_grad_()
    parameters = sharded_parameters(made)
    y = made(x_SBD, tokens)
    weight = normal(96, S, B, D)
    (y * weight).sum().backward()

    def objective() -> float:
        with torch.no_grad():
            _, loss = made.gate(x_SBD, tokens)
            return float((made(x_SBD, tokens) * weight).sum() + (0.0 if loss is None else loss))

    for name, p in {"x": x_SBD, **parameters}.items():
        direction = normal(95, *p.shape)
        step = 1e-6
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                p.add_(direction, alpha=sign * step)
                values.append(objective())
                p.add_(direction, alpha=-sign * step)
        slope = (values[0] - values[1]) / (2 * step)
        found = 0.0 if p.grad is None else float((p.grad * direction).sum())
        assert found == pytest.approx(slope, rel=1e-6, abs=1e-7), name


def test_tokens_without_an_expert_give_zero():
    made = layer(replace(BASE, moe_expert_capacity_factor=0.01, moe_group_size="sequence"))
    x_SBD = normal(1, S, B, D).requires_grad_()
    choice, _ = made.gate(x_SBD, batch())
    kept_SB = (choice.expert_ids_GTK >= 0).any(-1).view(S, B)
    assert 0 < int(kept_SB.sum()) < S * B
    y_SBD = made(x_SBD, batch())
    assert not y_SBD[~kept_SB].any() and y_SBD[kept_SB].abs().amin(-1).gt(0).all()


def test_capacity_is_kept_per_group():
    moe = replace(BASE, moe_expert_capacity_factor=0.6, moe_group_size="3", moe_token_drop_policy="position")
    made = layer(moe)
    choice, _ = made.gate(normal(1, S, B, D), batch())
    ids_SBK = choice.expert_ids_GTK.view(S, B, -1)
    for sample in range(B):
        for start in (0, 3):
            ids = ids_SBK[start : start + 3, sample].flatten()
            counts = torch.bincount(ids[ids >= 0], minlength=E)
            assert int(counts.max()) <= 1  # ceil(0.6 * 2 * 3 / 4)


def test_nothing_arrives_anywhere():
    """Everything is padding: no rows for any expert, zeros out, gradients of zero."""
    ids_SB = torch.zeros(S, B, dtype=torch.int64)
    tokens = replace(batch(), padding_SB=torch.ones_like(ids_SB, dtype=torch.bool))
    made, x_SBD = layer(BASE), normal(1, S, B, D).requires_grad_()
    y_SBD = made(x_SBD, tokens)
    y_SBD.sum().backward()
    assert not y_SBD.any() and not x_SBD.grad.any()
    assert all(p.grad is not None and not p.grad.any() for p in made.parameters())


def test_all_experts_are_a_dense_mixture():
    made = layer(replace(BASE, moe_router_topk=E))
    x_SBD = normal(1, S, B, D)
    weights_SBE = torch.softmax(F.linear(x_SBD, made.gate.weight), -1)
    hidden = torch.einsum("sbd,epfd->sbepf", x_SBD, made.experts.fc1)
    outputs = torch.einsum("sbef,edf->sbed", F.silu(hidden[..., 0, :]) * hidden[..., 1, :], made.experts.fc2)
    expected = torch.einsum("sbe,sbed->sbd", weights_SBE, outputs)
    torch.testing.assert_close(made(x_SBD, batch()), expected)


def test_one_expert_is_a_dense_layer():
    made = layer(replace(BASE, num_experts=1, moe_router_topk=1))
    x_SBD = normal(1, S, B, D)
    (gate, up), down = made.experts.fc1[0], made.experts.fc2[0]
    torch.testing.assert_close(
        made(x_SBD, batch()), F.linear(F.silu(F.linear(x_SBD, gate)) * F.linear(x_SBD, up), down)
    )


def test_shared_expert_sees_every_token():
    shared = torch.nn.Linear(D, D, dtype=torch.float64)
    made = layer(replace(BASE, moe_expert_capacity_factor=0.01), shared=shared)
    x_SBD = normal(1, S, B, D)
    with_it = made(x_SBD, batch())
    made.shared_expert = None
    torch.testing.assert_close(with_it, made(x_SBD, batch()) + shared(x_SBD))


def test_memory_that_nobody_wrote_is_never_read(monkeypatch):
    """Fresh memory is full of NaN; with empty experts, drops and padding none of it may come out."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: _poisoned(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, _f=torch.empty_like, **k: _poisoned(_f(*a, **k)))
    made = layer(replace(BASE, moe_expert_capacity_factor=0.6))
    made.gate.weight.data[2] = -50.0  # positive inputs never choose it
    x_SBD = normal(1, S, B, D).abs().requires_grad_()
    y_SBD = made(x_SBD, batch(padded=True))
    y_SBD.sum().backward()
    assert not y_SBD.isnan().any() and not x_SBD.grad.isnan().any()
    assert all(not p.grad.isnan().any() for p in made.parameters())
    assert not made.experts.fc1.grad[2].any() and not made.experts.fc2.grad[2].any(), "an empty expert: zero, not NaN"


def _poisoned(tensor: Tensor) -> Tensor:
    return tensor.fill_(np.nan) if tensor.is_floating_point() else tensor


def test_statistics_are_overwritten_not_added():
    made = layer(BASE)
    x_SBD = normal(1, S, B, D)
    for _ in range(2):
        made(x_SBD, batch())
    (statistics,) = made.gate.statistics.values()
    assert int(statistics.routing.chosen_E.sum()) == S * B * 2
    assert int(statistics.routing.tokens) == S * B and int(statistics.num_nonfinite) == 0
    made(torch.full_like(x_SBD, torch.nan), batch())
    assert int(made.gate.statistics[0].num_nonfinite) == S * B * E


def test_random_numbers_belong_to_the_iteration():
    made = layer(replace(BASE, moe_input_jitter_eps=0.5))
    x_SBD = normal(1, S, B, D)
    first = made.gate(x_SBD, batch(iteration=1))[0].scores_GTE
    assert torch.equal(first, made.gate(x_SBD, batch(iteration=1))[0].scores_GTE)
    assert not torch.equal(first, made.gate(x_SBD, batch(iteration=2))[0].scores_GTE)
    still = made.gate(x_SBD, batch(training=False))[0].scores_GTE
    torch.testing.assert_close(still[0], torch.softmax(F.linear(x_SBD, made.gate.weight), -1).flatten(0, 1))
