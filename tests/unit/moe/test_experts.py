"""Routed experts against a loop of plain layers, under every activation and cut."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_moe.config.schema import ModelConfig, MoEConfig
from megatron_moe.moe.experts import Experts
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.parallel.sharding import sharded_parameters
from tests.helpers.building import fake_context, normal

D, FF, E = 6, 8, 4
COUNTS = [2, 0, 3, 1]
POINTWISE = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x) ** 2,
}


def experts(
    activation: str, ctx: ParallelContext, dtype: torch.dtype = torch.float64, backend: str = "auto"
) -> Experts:
    """Weights of the logical tensors, cut for this rank."""
    moe = MoEConfig(num_experts=E, moe_ffn_hidden_size=FF, moe_expert_backend=backend)
    made = Experts(ModelConfig(hidden_size=D, activation=activation), moe, ctx, dtype, 0.02)
    for i, p in enumerate(sharded_parameters(made).values()):
        p.data.copy_(normal(i, *p.spec.shape, dtype=dtype)[p.spec.logical_slices(ctx)])
    return made


def plain(made: Experts, rows_RD: Tensor, weights_R: Tensor, counts: list[int]) -> Tensor:
    outputs = []
    for e, (rows, weights) in enumerate(zip(rows_RD.split(counts), weights_R.split(counts), strict=True)):
        hidden = POINTWISE[made.activation](F.linear(rows, made.fc1[e, 0]))
        if made.num_projections == 2:
            hidden = hidden * F.linear(rows, made.fc1[e, 1])
        outputs.append(F.linear(hidden, made.fc2[e]) * weights.unsqueeze(1))
    return torch.cat(outputs)


@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 0], [0, 6, 0, 0]], ids=str)
@pytest.mark.parametrize("activation", list(POINTWISE))
def test_against_plain_layers(activation, counts):
    made, rows = experts(activation, ParallelContext.single()), sum(counts)
    results = []
    for run in (
        lambda x, w: made(x, w, torch.tensor(counts)),
        lambda x, w: plain(made, x, w, counts),
    ):
        x_RD, weights_R = normal(5, rows, D).requires_grad_(), normal(6, rows).requires_grad_()
        made.zero_grad()
        y_RD = run(x_RD, weights_R)
        (y_RD * normal(7, rows, D)).sum().backward()
        results.append((y_RD.detach(), x_RD.grad, weights_R.grad, made.fc1.grad, made.fc2.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"activation": "quick_geglu", "activation_func_clamp_value": 0.5}], ids=str)
def test_a_recomputed_activation_changes_nothing(options):
    moe, results = MoEConfig(num_experts=E, moe_ffn_hidden_size=FF), []
    for recompute in (False, True):
        ctx, model = ParallelContext.single(), ModelConfig(hidden_size=D, **options)
        made = Experts(model, moe, ctx, torch.float64, 0.02, recompute_activation=recompute)
        for i, p in enumerate(sharded_parameters(made).values()):
            p.data.copy_(normal(i, *p.spec.shape))
        x_RD, weights_R = normal(5, 6, D).requires_grad_(), normal(6, 6).requires_grad_()
        y_RD = made(x_RD, weights_R, torch.tensor(COUNTS))
        (y_RD * normal(7, 6, D)).sum().backward()
        results.append((y_RD.detach(), x_RD.grad, weights_R.grad, made.fc1.grad, made.fc2.grad))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 0]], ids=str)
def test_biases(counts):
    """Against plain layers; of rows as wide as the model only the input is kept."""
    moe, model = MoEConfig(num_experts=E, moe_ffn_hidden_size=FF), ModelConfig(hidden_size=D, add_bias_linear=True)
    made = Experts(model, moe, ParallelContext.single(), torch.float64, 0.02)
    for i, p in enumerate(sharded_parameters(made).values()):
        p.data.copy_(normal(i, *p.spec.shape))
    x_RD, weights_R = normal(5, sum(counts), D).requires_grad_(), normal(6, sum(counts)).requires_grad_()
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        found_RD = made(x_RD, weights_R, torch.tensor(counts))
    assert all(saved is x_RD for saved in kept if saved.shape == x_RD.shape)
    expected = []
    for e, (x, w) in enumerate(zip(x_RD.split(counts), weights_R.split(counts), strict=True)):
        gate, up = (F.linear(x, made.fc1[e, i], made.fc1_bias[e, i]) for i in (0, 1))
        expected.append(F.linear(F.silu(gate) * up, made.fc2[e], made.fc2_bias[e]) * w.unsqueeze(1))
    leaves = [x_RD, weights_R, *made.parameters()]
    results = [
        (y, *torch.autograd.grad((y * normal(7, *y.shape)).sum(), leaves)) for y in (found_RD, torch.cat(expected))
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_cut_experts_add_up():
    """ep x etp = 2 x 2: each rank has two experts in half their width; etp partners' outputs sum."""
    whole, sizes = experts("swiglu", ParallelContext.single()), MeshSizes(tp=2, dp=2, etp=2, ep=2)
    rows_RD, weights_R = normal(5, 6, D), normal(6, 6)
    expected = whole(rows_RD, weights_R, torch.tensor(COUNTS)).split([2, 4])
    for ep in range(2):
        total = torch.zeros_like(expected[ep])
        for etp in range(2):
            part = experts("swiglu", fake_context(sizes, etp + 2 * ep))
            assert part.fc1.shape == (2, 2, FF // 2, D) and part.fc2.shape == (2, D, FF // 2)
            mine = slice(0, 2) if ep == 0 else slice(2, 6)
            total += part(rows_RD[mine], weights_R[mine], torch.tensor(COUNTS[2 * ep : 2 * ep + 2]))
        torch.testing.assert_close(total, expected[ep])


def test_backends_agree():
    results = []
    for backend in ("loop", "grouped_mm"):
        ctx = ParallelContext.single()
        moe = MoEConfig(num_experts=E, moe_ffn_hidden_size=8, moe_expert_backend=backend)
        made = Experts(ModelConfig(hidden_size=16), moe, ctx, torch.float32, 0.02)
        for i, p in enumerate(made.parameters()):
            p.data.copy_(normal(i, *p.shape, dtype=torch.float32))
        x_RD = normal(5, 6, 16, dtype=torch.float32).requires_grad_()
        y_RD = made(x_RD, normal(6, 6, dtype=torch.float32), torch.tensor(COUNTS))
        y_RD.square().sum().backward()
        results.append((y_RD, x_RD.grad, made.fc1.grad, made.fc2.grad))
    for loop, fused in zip(*results, strict=True):
        torch.testing.assert_close(loop, fused, rtol=1e-4, atol=1e-3)
