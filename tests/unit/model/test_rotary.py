"""Rotary frequencies against known numbers, and what a rotation keeps; the rest is compared with transformers."""

import math

import pytest
import torch

from megatron_moe.config.schema import ModelConfig
from megatron_moe.model.latent_attention import softmax_scale
from megatron_moe.model.rotary import Rotary, rotary_frequencies, yarn_mscale
from tests.helpers.building import normal

DEEPSEEK_V3 = ModelConfig(
    multi_latent_attention=True,
    rope_type="yarn",
    rotary_scaling_factor=40.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)


def test_numbers_of_deepseek_v3() -> None:
    """Channels 10 to 23 of 32 pass from kept to scaled; the scores are scaled by 192^-1/2 (0.1 ln 40 + 1)^2."""
    plain, scaled = rotary_frequencies(64, ModelConfig()), rotary_frequencies(64, DEEPSEEK_V3)
    torch.testing.assert_close(scaled[:11], plain[:11])
    torch.testing.assert_close(scaled[23:], plain[23:] / 40)
    ratios = scaled[10:24] / plain[10:24]
    assert (ratios.diff() < 0).all()
    assert softmax_scale(DEEPSEEK_V3) == pytest.approx(0.13523, abs=5e-6)
    assert Rotary(64, 1.0, DEEPSEEK_V3, torch.device("cpu")).magnitude == 1.0
    assert yarn_mscale(40.0, 1.0) == pytest.approx(1.3689, abs=5e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distance_alone(interleaved: bool) -> None:
    rotary = Rotary(12, 0.7, ModelConfig(rotary_interleaved=interleaved), torch.device("cpu"))
    assert rotary.num_rotated == 8
    q_SBHC, k_SBHC = normal(1, 1, 1, 1, 12), normal(2, 1, 1, 1, 12)

    def score(query: int, key: int) -> float:
        tables = [rotary.tables(torch.tensor([[p]]), torch.float64) for p in (query, key)]
        return float((rotary.rotate(q_SBHC, tables[0]) * rotary.rotate(k_SBHC, tables[1])).sum())

    assert score(1009, 1003) == pytest.approx(score(6, 0), rel=1e-12)
    assert not math.isclose(score(1009, 1003), score(7, 0), rel_tol=1e-3)


def test_layouts_are_a_permutation_of_channels() -> None:
    halves, pairs = (Rotary(8, 1.0, ModelConfig(rotary_interleaved=i), torch.device("cpu")) for i in (False, True))
    x_SBHC, order = normal(3, 5, 2, 3, 8), torch.arange(8).view(2, 4).T.flatten()
    tables = halves.tables(torch.arange(5).unsqueeze(1).expand(-1, 2), torch.float64)
    torch.testing.assert_close(pairs.rotate(x_SBHC[..., order], tables), halves.rotate(x_SBHC, tables)[..., order])


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_against_finite_differences(interleaved: bool) -> None:
    rotary = Rotary(12, 0.7, ModelConfig(rotary_interleaved=interleaved), torch.device("cpu"))
    tables = rotary.tables(torch.arange(3).unsqueeze(1), torch.float64)
    assert torch.autograd.gradcheck(lambda x: rotary.rotate(x, tables), normal(1, 3, 1, 2, 12).requires_grad_())
