"""The oracle's vectors as test parameters, and short ways to run a router on them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.routers import ROUTERS
from megatron_moe.moe.routing import Choice, RouterInputs

VECTORS = Path(__file__).parents[2] / "vectors"
# A shared machine may pause any example: only wrong answers fail.
settings.register_profile("moe", deadline=None)
settings.load_profile("moe")

E, T = 6, 12  # of random inputs
both_types = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])


def load_cases(family: str, keep: Callable[[dict[str, Any]], bool] = lambda case: True) -> Any:
    """Parametrize a test over the cases of a family."""
    cases = json.loads((VECTORS / f"{family}.json").read_text())["cases"]
    chosen = [case for case in cases if keep(case)]
    assert chosen
    return pytest.mark.parametrize("case", chosen, ids=[case["name"] for case in chosen])


def close(actual: Tensor, expected: Any, dtype: torch.dtype) -> None:
    """Compare at the precision of the vectors: 1e-9 in float64, 1e-5 in float32."""
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    expected = torch.as_tensor(expected, dtype=torch.float64).reshape(actual.shape)
    torch.testing.assert_close(actual.detach().double(), expected, rtol=tolerance, atol=tolerance)


def logits_of(case: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """Logits [1, T, E] of a case, with gradient."""
    return torch.tensor(case["inputs"]["logits"], dtype=dtype).unsqueeze(0).requires_grad_()


def uniforms(keys_GT: Tensor, seed: int = 0) -> Callable[[str, int], Tensor]:
    """Numbers in [0, 1) that depend on the token's key, the use and the column alone."""

    def uniform(use: str, num: int) -> Tensor:
        columns = torch.arange(num, dtype=torch.float64)
        angle = keys_GT.double().unsqueeze(-1) * 12.9898 + columns * 78.233 + sum(map(ord, use)) + seed
        return torch.frac(torch.sin(angle).abs() * 43758.5453)

    return uniform


def inputs_of(logits_GTE: Tensor, **changes: Any) -> RouterInputs:
    """Router inputs in training, tokens keyed by position, without padding and bias unless given."""
    keys_GT = torch.arange(logits_GTE[..., 0].numel()).view(logits_GTE.shape[:2])
    inputs = RouterInputs(logits_GTE, None, None, keys_GT % 13, uniforms(keys_GT), True)
    return inputs._replace(**changes)


def combine_matrix(choice: Choice) -> Tensor:
    """[G, T, E]: the combine weight of each expert, 0 where it is not used."""
    ids_GTK, num_experts = choice.expert_ids_GTK, choice.scores_GTE.shape[-1]
    columns_GTK = torch.where(ids_GTK < 0, num_experts, ids_GTK)
    weights_GTE = choice.weights_GTK.new_zeros(*ids_GTK.shape[:2], num_experts + 1)
    return weights_GTE.scatter_add(-1, columns_GTK, choice.weights_GTK)[..., :num_experts]


def kept_counts(choice: Choice) -> list[int]:
    """Copies per expert over all groups."""
    ids_N = choice.expert_ids_GTK[choice.expert_ids_GTK >= 0]
    return torch.bincount(ids_N, minlength=choice.scores_GTE.shape[-1]).tolist()


def topk_config(logits_GTE: Tensor, params: dict[str, Any], **more: Any) -> MoEConfig:
    """The configuration of the oracle's routing parameters: k, mode or method, groups, scale."""
    method = params.get("method", "topk")
    mode = params.get("mode") or {"deepseek_v3": "sigmoid", "deepseek_v2": "pre"}.get(method, "pre")
    if params.get("renorm"):
        mode = "pre_renorm"
    return MoEConfig(
        num_experts=logits_GTE.shape[-1],
        moe_router_topk=params["k"],
        moe_router_score_function="sigmoid" if mode == "sigmoid" else "softmax",
        moe_router_pre_softmax=mode.startswith("pre"),
        moe_router_norm_topk=mode == "pre_renorm",
        moe_router_topk_scaling_factor=params.get("scale", 1.0),
        moe_router_num_groups=params.get("n_groups"),
        moe_router_group_topk=params.get("keep_groups"),
        **more,
    )


def config_of(name, **changes):
    """A small configuration for a router."""
    topk = 1 if name == "switch" else 2
    return replace(MoEConfig(num_experts=E, moe_router=name, moe_router_topk=topk), **changes)


def random_inputs(name, seed, groups=2, num_tokens=T):
    """Random float64 inputs for a router."""
    generator = torch.Generator().manual_seed(seed)
    width = E * ROUTERS[name].logits_per_expert
    logits_GTE = 2 * torch.randn(groups, num_tokens, width, generator=generator, dtype=torch.float64)
    return inputs_of(logits_GTE)
