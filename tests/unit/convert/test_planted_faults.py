"""Faults that converters have had, planted one by one into a model that was converted rightly: verify sees every one.

Each fault is a change of the weights, of the configuration, or of the routing, on a family that has the part. Run in
float64, where a right conversion differs by 1e-14.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_moe.config.schema import Config
from megatron_moe.convert.exporting import Weights, config_of
from megatron_moe.convert.importing import import_folder, prepare_import
from megatron_moe.model.size import logical_tensors
from megatron_moe.training.conversion_check import compare, model_of
from tests.helpers.huggingface import E, float32_means_float64, loud_model, save, tokens

Named = dict[str, Tensor]
topk: Any = import_module("megatron_moe.moe.routers.topk")  # the package hands on the function of that name
TOLERANCE = 1e-8


class InMemory:
    """Weights that a fault can reach."""

    def __init__(self, values: Named) -> None:
        self.values = self.tensors = values

    def read(self, name: str, row: int | None = None) -> Tensor:
        return self.values[name] if row is None else self.values[name][row]


@cache
def converted(family: str) -> tuple[Any, Config, Named]:
    """Their model, and ours as it was imported."""
    with TemporaryDirectory() as folder, float32_means_float64():
        reference = loud_model(family)
        made = prepare_import(save(reference, Path(folder) / "theirs"), logical_tensors)
        checkpoint = import_folder(made, Path(folder) / "ours")
        weights = Weights(checkpoint)
        return reference, config_of(checkpoint), {name: weights.read(name) for name in weights.tensors}


def change(part: str, by: Callable[[Tensor], Tensor]) -> Callable[[Named], Named]:
    """A fault in all tensors whose names end so."""

    def changed(weights: Named) -> Named:
        found = {name: by(tensor) for name, tensor in weights.items() if name.endswith(part)}
        assert found, f"no tensor ends in {part}"
        return weights | found

    return changed


def model(**settings: Any) -> Callable[[Config], Config]:
    return lambda config: replace(config, model=replace(config.model, **settings))


def moe(**settings: Any) -> Callable[[Config], Config]:
    return lambda config: replace(config, moe=replace(config.moe, **settings))


def scaled(name: str, factor: float) -> Callable[[Config], Config]:
    return lambda config: model(**{name: getattr(config.model, name) * factor})(config)


def swapped(x: Tensor) -> Tensor:
    return x[[1, 0, *range(2, len(x))]]


def by_group(weights: Named) -> Named:
    """Rows of [q q k v, q q k v], a block a group, read as [q q q q, k k, v v]."""
    found = dict(weights)
    for layer in range(3):
        names = [f"layers.{layer}.attention.{kind}.weight" for kind in ("query", "key", "value")]
        q, k, v = (weights[name] for name in names)
        blocks = torch.cat([q.unflatten(0, (2, -1)), k.unflatten(0, (2, -1)), v.unflatten(0, (2, -1))], 1).flatten(0, 1)
        found |= dict(zip(names, blocks.split([len(q), len(k), len(v)]), strict=True))
    return found


def in_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def sorted_by_name(x: Tensor) -> Tensor:
    """Expert 10 before 2."""
    return x[sorted(range(E), key=str)]


WEIGHTS: dict[str, tuple[str, Callable[[Named], Named]]] = {
    "query, key and value of a group read as one after the other": ("mixtral", by_group),
    "gate and up swapped": ("mixtral", change("experts.fc1", lambda x: x.flip(1))),
    "the second half of the experts is the first": (
        "mixtral", change("experts.fc2", lambda x: x[: E // 2].repeat(2, 1, 1)),
    ),
    "two experts swapped": ("mixtral", change("experts.fc1", swapped)),
    "experts in the order of their names": ("mixtral", change("experts.fc2", sorted_by_name)),
    "dense gate and up swapped": ("qwen2_moe", change("feed_forward.fc1.weight", lambda x: x.flip(0))),
    "norms of queries and keys lost": ("qwen3_moe", change("_norm.weight", torch.ones_like)),
    "norm of keys lost": ("olmoe", change("key_norm.weight", torch.ones_like)),
    "biases of query, key, value lost": ("qwen2_moe", change("query.bias", torch.zeros_like)),
    "gate of the shared expert lost": ("qwen2_moe", change("shared_expert.gate_weight", torch.zeros_like)),
    "shared experts lost": ("deepseek_v2", change("shared_expert.feed_forward.fc2.weight", torch.zeros_like)),
    "bias of the choice lost (V3)": ("deepseek_v3", change("gate.bias_E", torch.zeros_like)),
    "bias of the choice lost (GLM)": ("glm4_moe", change("gate.bias_E", torch.zeros_like)),
    "bias of the choice in bfloat16": ("glm4_moe", change("gate.bias_E", in_bfloat16)),
    "router in bfloat16": ("mixtral", change("gate.weight", in_bfloat16)),
    "experts' gate and up read as halves": (
        "gpt_oss", change("experts.fc1", lambda x: x.transpose(1, 2).reshape(x.shape)),
    ),
    "experts' biases read as halves": (
        "gpt_oss", change("experts.fc1_bias", lambda x: x.transpose(1, 2).reshape(x.shape)),
    ),
    "a square matrix transposed": ("gpt_oss", change("experts.fc2", lambda x: x.transpose(1, 2))),
    "sinks lost": ("gpt_oss", change("attention.sinks", lambda x: x - 50.0)),
    "bias of the router lost": ("gpt_oss", change("gate.logit_bias", torch.zeros_like)),
    "value and key of a head swapped": (
        "deepseek_v3", change("kv_up.weight", lambda x: x.unflatten(0, (4, 11)).roll(5, 1).flatten(0, 1)),
    ),
    "rotated channels come first": (
        "deepseek_v2", change("query_up.weight", lambda x: x.unflatten(0, (4, 14)).roll(8, 1).flatten(0, 1)),
    ),
    "the latent's norm lost": ("deepseek_v2", change("kv_down_norm.weight", torch.ones_like)),
    "the embedding in place of the output layer": (
        "mixtral", lambda weights: weights | {"output.weight": weights["embedding.weight"]},
    ),
}  # fmt: skip

CONFIGURATION: dict[str, tuple[str, Callable[[Config], Config]]] = {
    "rotary halves read as pairs": ("mixtral", model(rotary_interleaved=True)),
    "theta a tenth": ("mixtral", scaled("rotary_base", 0.1)),
    "epsilon ten times": ("mixtral", scaled("norm_epsilon", 10.0)),
    "window lost": ("mixtral", model(window_size=())),
    "window one token longer": ("mixtral", model(window_size=(7, 0))),
    "chosen weights not divided by their sum": ("qwen3_moe", moe(moe_router_pre_softmax=True)),
    "chosen weights divided by their sum": ("olmoe", moe(moe_router_pre_softmax=False)),
    "heads normalised one by one": ("qwen3_moe", model(qk_layernorm=False)),
    "scaling of routed weights lost": ("deepseek_v3", moe(moe_router_topk_scaling_factor=1.0)),
    "limit to groups lost": ("deepseek_v3", moe(moe_router_num_groups=None, moe_router_group_topk=None)),
    "groups ranked by two experts": ("deepseek_v2", moe(moe_router_group_score_topk=2)),
    "groups ranked by one expert": ("deepseek_v3", moe(moe_router_group_score_topk=1)),
    "yarn lost": ("deepseek_v2", model(rope_type="rope")),
    "scale of yarn's scores lost": ("deepseek_v2", model(mscale=0.0, mscale_all_dim=0.0)),
    "pairs read as rotary halves": ("deepseek_v3", model(rotary_interleaved=False)),
    "epsilon of the latents ten times": ("deepseek_v3", model(qk_layernorm_epsilon=1e-5)),
    "all of a head is rotated": ("glm4_moe", model(rotary_percent=1.0)),
    "yarn's channels rounded": ("gpt_oss", model(yarn_correction_range_round_to_int=True)),
    "window in the other layers": ("gpt_oss", model(window_attn_skip_freq="[0,1,0]")),
    "clamp lost": ("gpt_oss", model(activation_func_clamp_value=None)),
    "offset of the linear factor lost": ("gpt_oss", model(glu_linear_offset=0.0)),
}


def leaking_bias(log_scores_GTE: Tensor, ids_GTK: Tensor, config: Any) -> Tensor:
    """Weights that were meant for the choice."""
    biased = log_scores_GTE.exp() + 0.3 * torch.arange(E, dtype=torch.float64)
    return biased.gather(-1, ids_GTK) / biased.gather(-1, ids_GTK).sum(-1, keepdim=True) * 2.5


def raw_sigmoids(log_scores_GTE: Tensor, ids_GTK: Tensor, config: Any) -> Tensor:
    return log_scores_GTE.exp().gather(-1, ids_GTK) * config.moe_router_topk_scaling_factor


def masked_by_zero(keys_GTE: Tensor, config: Any) -> Tensor:
    limited = ORIGINAL_LIMIT(keys_GTE, config)
    return limited.masked_fill(limited.isinf(), 0.0)


ORIGINAL_LIMIT = topk.limit_groups
ROUTING: dict[str, tuple[str, AbstractContextManager]] = {
    "bias of the choice in the weights": ("deepseek_v3", mock.patch.object(topk, "combine_weights", leaking_bias)),
    "sigmoids not divided by their sum": ("deepseek_v3", mock.patch.object(topk, "combine_weights", raw_sigmoids)),
    "groups masked by 0, not minus infinity": ("deepseek_v3", mock.patch.object(topk, "limit_groups", masked_by_zero)),
}


def differs(family: str, config: Config, weights: Named, fault: AbstractContextManager | None = None) -> bool:
    reference, _, _ = converted(family)
    with float32_means_float64(), fault or nullcontext():
        return not compare(reference, model_of(config, InMemory(weights), "float64"), tokens(), TOLERANCE).same


@pytest.mark.parametrize("fault", WEIGHTS)
def test_faults_in_weights(fault):
    family, apply = WEIGHTS[fault]
    _, config, weights = converted(family)
    assert not differs(family, config, weights)
    assert differs(family, config, apply(weights))


def test_how_it_was_trained_is_no_fault():
    _, config, weights = converted("mixtral")
    in_turns = moe(moe_overlap_degree=4, moe_overlap_attention=True)
    assert not differs("mixtral", model(fp8_format="e4m3", fp8_recipe="blockwise")(in_turns(config)), weights)


@pytest.mark.parametrize("fault", CONFIGURATION)
def test_faults_in_the_configuration(fault):
    family, apply = CONFIGURATION[fault]
    _, config, weights = converted(family)
    assert apply(config) != config
    assert differs(family, apply(config), weights)


@pytest.mark.parametrize("fault", ROUTING)
def test_faults_in_routing(fault):
    family, patch = ROUTING[fault]
    _, config, weights = converted(family)
    assert differs(family, config, weights, patch)
