"""Learning rates against formulas written out here, and torch's schedulers where there is one."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe.config.schema import OptimizerConfig
from megatron_moe.optim.learning_rate import LearningRate

PEAK, FLOOR, WARMUP, DECAY = 2.0, 0.5, 40, 240


def schedule(style: str, total: int = DECAY, batch: int = 1, **changes: object) -> LearningRate:
    settings = {"lr": PEAK, "min_lr": FLOOR, "lr_decay_style": style, "lr_warmup_samples": WARMUP} | changes
    return LearningRate.of(OptimizerConfig(**settings), total, batch)  # type: ignore[arg-type]


def between(share: float) -> float:
    return FLOOR + (PEAK - FLOOR) * share


WSD = {"lr_wsd_decay_samples": 100}  # from 140 on
EXPECTED = {
    "constant": ("constant", {}, lambda n: PEAK),
    "linear": ("linear", {}, lambda n: between((240 - n) / 200)),
    "cosine": ("cosine", {}, lambda n: between(math.cos((n - 40) / 200 * math.pi / 2) ** 2)),
    "inverse": ("inverse-square-root", {}, lambda n: max(FLOOR, PEAK * math.sqrt(40 / n))),
    "inverse, no warm-up": (
        "inverse-square-root",
        {"lr_warmup_samples": 0},
        lambda n: max(FLOOR, PEAK / math.sqrt(n)),
    ),
    "wsd": ("WSD", WSD, lambda n: PEAK if n <= 140 else between(2 ** ((240 - n) / 100) - 1)),
    "wsd linear": (
        "WSD",
        WSD | {"lr_wsd_decay_style": "linear"},
        lambda n: PEAK if n <= 140 else between((240 - n) / 100),
    ),
    "wsd cosine": (
        "WSD",
        WSD | {"lr_wsd_decay_style": "cosine"},
        lambda n: PEAK if n <= 140 else between(math.cos((n - 140) / 100 * math.pi / 2) ** 2),
    ),
}


@pytest.mark.parametrize(("style", "changes", "formula"), list(EXPECTED.values()), ids=list(EXPECTED))
def test_styles(style, changes, formula):
    rate = schedule(style, **changes)
    start = int(rate.warmup) + 1
    for samples in (*range(start, DECAY, 7), DECAY):
        assert rate.at(samples) == pytest.approx(formula(samples), rel=1e-12), samples
    assert rate.at(DECAY + 1) == (PEAK if style == "constant" else FLOOR)


@pytest.mark.parametrize("style", ["linear", "cosine", "constant", "inverse-square-root"])
def test_warm_up(style):
    rate = schedule(style, lr_warmup_init=0.4)
    for samples in range(1, WARMUP + 1):
        assert rate.at(samples) == pytest.approx(0.4 + 1.6 * samples / 40, rel=1e-12)
    assert rate.at(WARMUP) == pytest.approx(PEAK)


def test_lengths_in_all_units():
    assert schedule("cosine", lr_warmup_samples=0, lr_warmup_iters=10, batch=4).warmup == 40
    assert schedule("cosine", lr_warmup_samples=0, lr_warmup_fraction=0.25).warmup == 60
    assert schedule("cosine", total=999).decay == 999
    assert schedule("cosine", lr_decay_iters=30, batch=4).decay == 120
    assert schedule("cosine", lr_decay_samples=77).decay == 77
    assert schedule("cosine", lr_warmup_samples=0, lr_warmup_fraction=0.5, lr_decay_samples=80).warmup == 40
    assert schedule("WSD", lr_wsd_decay_iters=5, batch=4).wsd == 20


def torch_rates(make, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_against_torch():
    cosine = torch_rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 240, eta_min=FLOOR), 240)
    linear = torch_rates(lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, FLOOR / PEAK, 240), 240)
    for style, rates in (("cosine", cosine), ("linear", linear)):
        ours = schedule(style, lr_warmup_samples=0)
        assert [ours.at(n) for n in range(1, 241)] == pytest.approx(rates, rel=1e-9)


@settings(deadline=None)
@given(
    st.sampled_from([("cosine", {}), ("linear", {}), ("inverse-square-root", {}), ("WSD", WSD), ("constant", {})]),
    st.integers(0, 100),
)
def test_continuous_and_bounded(case, warmup):
    style, changes = case
    rate = schedule(style, lr_warmup_samples=warmup, **changes)
    rates = [rate.at(n) for n in range(1, DECAY + 1)]
    assert all(0 < r <= PEAK + 1e-12 for r in rates)
    after = rates[max(warmup - 1, 0) :]
    assert all(a >= b - 1e-12 for a, b in pairwise(after)), "never rises after the warm-up"
    jumps = [abs(a - b) for a, b in pairwise(rates[warmup:])]
    if style != "inverse-square-root":
        assert max(jumps) <= PEAK / 50
