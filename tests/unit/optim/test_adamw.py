"""AdamW on pieces against torch's on plain copies; gradient norm and clipping."""

import pytest
import torch

from megatron_moe.config.schema import OptimizerConfig
from megatron_moe.optim.adamw import AdamW
from megatron_moe.optim.grad_norm import clip, gradient_norm
from megatron_moe.parallel.buckets import Piece
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.gradients import GradientReducer
from megatron_moe.parallel.sharding import ShardedParameter
from tests.helpers.building import normal, whole_parameter

CONFIG = OptimizerConfig(
    lr=0.5, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3
)  # loud, so that a wrong one shows
RATES = [0.01, 0.03, 0.02]


def parameters(dtype: torch.dtype) -> list[ShardedParameter]:
    return [whole_parameter(normal(1, 4, 3, dtype=dtype)), whole_parameter(normal(2, 5, dtype=dtype), decay=False)]


def pieces_of(made: list[ShardedParameter]) -> list[Piece]:
    return GradientReducer([made], ParallelContext.single(), "no_shard").pieces()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_steps_are_those_of_torch(dtype):
    made = parameters(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    copies = [p.detach().to(wide).clone().requires_grad_() for p in made]
    theirs = torch.optim.AdamW(
        [
            {"params": copies[:1], "weight_decay": 0.1},
            {"params": copies[1:], "weight_decay": 0.0},
        ],
        lr=1.0,
        betas=(0.8, 0.9),
        eps=1e-3,
        foreach=False,
    )
    ours = AdamW(pieces_of(made), CONFIG)
    assert [m.dtype for m in ours.masters] == [wide, wide]
    for step, rate in enumerate(RATES, 1):
        for index, (p, copy) in enumerate(zip(made, copies, strict=True)):
            copy.grad = normal(10 * step + index, *p.shape, dtype=wide)
            p.main_grad.copy_(copy.grad)
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        ours.step(rate)
        assert ours.num_steps == step
    for index, (p, copy) in enumerate(zip(made, copies, strict=True)):
        state = ours.tensors(index)
        tight = {"rtol": 1e-13, "atol": 1e-14} if wide == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(state["master"].view(p.shape), copy.detach(), **tight)
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[moment].view(p.shape), theirs.state[copy][moment], **tight)
        assert torch.equal(p.detach(), state["master"].view(p.shape).to(dtype)), "weights are the rounded masters"


def test_small_steps_survive_in_the_masters():
    made = [whole_parameter(torch.ones(1, dtype=torch.bfloat16))]
    ours = AdamW(pieces_of(made), OptimizerConfig(weight_decay=0.0))
    made[0].main_grad.fill_(1.0)
    for _ in range(100):
        ours.step(1e-3)  # below half the spacing of bfloat16 under 1
    assert float(made[0].detach()) == pytest.approx(0.9, abs=0.005)


def test_masters_from_weights():
    made = [whole_parameter(torch.ones(3, dtype=torch.bfloat16))]
    ours = AdamW(pieces_of(made), OptimizerConfig())
    made[0].data.fill_(0.5)
    ours.masters_from_weights()
    assert torch.equal(ours.masters[0], torch.full((3,), 0.5))


def test_steps_done_count_in_the_bias_correction():
    """As if loaded from a checkpoint after 1000 steps: no bias correction is left."""
    made = [whole_parameter(torch.zeros(1))]
    ours = AdamW(pieces_of(made), OptimizerConfig(weight_decay=0.0, adam_eps=0.0, adam_beta1=0.9, adam_beta2=0.99))
    ours.num_steps = 100000
    assert ours.num_steps == 100000
    made[0].main_grad.fill_(1.0)
    ours.step(1.0)
    assert float(made[0].detach()) == pytest.approx(-0.1 / 0.01**0.5, rel=1e-5)


def test_norm_counts_every_element_once():
    made = parameters(torch.float64)
    pieces = pieces_of(made)
    grads = [normal(7, 4, 3), normal(8, 5)]
    for p, grad in zip(made, grads, strict=True):
        p.main_grad.copy_(grad)
    expected = float(torch.cat([g.flatten() for g in grads]).norm())
    ctx = ParallelContext.single()
    assert gradient_norm(pieces, ctx) == pytest.approx(expected, rel=1e-14)
    assert gradient_norm([], ctx) == 0.0
    twice = [Piece(p.parameter, p.start, p.stop, p.weight, p.grad, replicas=2) for p in pieces]
    assert gradient_norm(twice + twice, ctx) == pytest.approx(expected, rel=1e-14), "two owners count as one"
    copied = pieces_of([whole_parameter(normal(3, 2), copy=True)])
    assert gradient_norm(pieces + copied, ctx) == pytest.approx(expected, rel=1e-14)


def test_clipping():
    made = parameters(torch.float64)
    pieces = pieces_of(made)
    for p in made:
        p.main_grad.fill_(2.0)
    norm = gradient_norm(pieces, ParallelContext.single())
    clip(pieces, norm, norm + 1)
    assert all(torch.all(p.main_grad == 2.0) for p in made), "nothing to clip"
    clip(pieces, norm, 0.5)
    assert gradient_norm(pieces, ParallelContext.single()) == pytest.approx(0.5, rel=1e-6)
    torch.testing.assert_close(made[0].main_grad, torch.full((4, 3), 2.0 * 0.5 / norm, dtype=torch.float64))
    clip([], 1.0, 0.5)  # a rank that owns nothing
