"""Residual experts, several shared experts, fine-grained segments and pyramids: each against what it stands for."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config import normalise
from megatron_moe.config.schema import Config, ModelConfig, MoEConfig
from megatron_moe.config.settings import assemble
from megatron_moe.kernels.activation import activate
from megatron_moe.model.feed_forward import SharedExpert
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training.registries import routing_rules
from tests.helpers.building import normal, token_batch

S, B, D, F, E = 4, 3, 6, 4, 4
MODEL = ModelConfig(hidden_size=D, ffn_hidden_size=F)
SWITCH = MoEConfig(num_experts=E, moe_ffn_hidden_size=F, moe_router="switch", moe_router_topk=1)
CTX = ParallelContext.single()


def shared_expert(width: int) -> SharedExpert:
    return SharedExpert(width, False, MODEL, CTX, torch.float64, sequence_parallel=False, output_std=0.02)


def filled(module: torch.nn.Module, seed: int = 0) -> None:
    for i, parameter in enumerate(module.parameters()):
        parameter.data.copy_(normal(100 * seed + i, *parameter.shape))


def layer(moe: MoEConfig, shared: SharedExpert | None = None) -> MoELayer:
    made = MoELayer(MODEL, moe, 0, CTX, torch.float64, output_std=0.02, shared_expert=shared)
    filled(made)
    return made


def tokens():
    return token_batch(torch.arange(S * B).view(S, B))


def mlp(fc1_PFD: Tensor, fc2_DF: Tensor, x: Tensor) -> Tensor:
    """A gated feed-forward from its two matrices."""
    return activate(torch.einsum("pfd,...d->...pf", fc1_PFD, x), "swiglu") @ fc2_DF.T


def test_residual_moe_is_switch_with_a_shared_expert_of_dense_width() -> None:
    """DeepSpeed-MoE: y = MLP(x) + p_e(x) Expert_e(x), e the most probable expert."""
    made, x = layer(SWITCH, shared_expert(F)), normal(1, S, B, D)
    probabilities, best = torch.softmax(x @ made.gate.weight.T, -1).max(-1)
    routed = torch.stack([mlp(made.experts.fc1[e], made.experts.fc2[e], x) for e in range(E)])
    routed = routed.gather(0, best[None, ..., None].expand(1, S, B, D))[0] * probabilities.unsqueeze(-1)
    dense = made.shared_expert.feed_forward
    torch.testing.assert_close(made(x, tokens()), mlp(dense.fc1.weight, dense.fc2.weight, x) + routed)


def test_learned_coefficient_is_that_of_deepspeed() -> None:
    """deepspeed/moe/layer.py: softmax over Linear(D, 2), the first for the routed experts."""
    moe = replace(SWITCH, moe_residual_coefficient=True)
    made, x = layer(moe, shared_expert(F)), normal(1, S, B, D)
    plain = layer(moe, made.shared_expert)
    plain.load_state_dict(made.state_dict())
    plain.coefficient = None
    shared = made.shared_expert(x)
    routed = plain(x, tokens()) - shared
    weights = torch.softmax(x @ made.coefficient.weight.T + made.coefficient.bias, -1)
    expected = weights[..., :1] * routed + weights[..., 1:] * shared
    torch.testing.assert_close(made(x, tokens()), expected)


@pytest.mark.parametrize("num", [2, 3])
def test_several_shared_experts_are_one_as_wide_as_all(num: int) -> None:
    wide, x = shared_expert(num * F), normal(1, S, B, D)
    filled(wide)
    singles = [shared_expert(F) for _ in range(num)]
    for i, single in enumerate(singles):
        single.feed_forward.fc1.weight.data.copy_(wide.feed_forward.fc1.weight[:, i * F : (i + 1) * F])
        single.feed_forward.fc2.weight.data.copy_(wide.feed_forward.fc2.weight[:, i * F : (i + 1) * F])
    torch.testing.assert_close(wide(x), torch.stack([single(x) for single in singles]).sum(0))


def segmented(moe: MoEConfig) -> MoEConfig:
    return normalise(Config(model=MODEL, moe=moe), 1)[0].moe


def test_segments_of_an_expert_add_up_to_it() -> None:
    """When all m segments of an expert are chosen, m times the mean of their outputs is the expert's output."""
    factor, x = 2, normal(1, S, B, D)
    coarse_moe = MoEConfig(num_experts=E, moe_ffn_hidden_size=F, moe_router_topk=2, moe_router_pre_softmax=True)
    fine_moe = segmented(
        replace(coarse_moe, moe_segmentation_factor=factor, moe_router_topk_scaling_factor=float(factor))
    )
    assert (fine_moe.num_experts, fine_moe.moe_ffn_hidden_size, fine_moe.moe_router_topk) == (8, 2, 4)
    coarse, fine = layer(coarse_moe), layer(fine_moe)
    fine.gate.weight.data.copy_(coarse.gate.weight.repeat_interleave(factor, 0))  # segments of one expert score alike
    for e in range(E):
        for part in range(factor):
            piece = slice(part * F // factor, (part + 1) * F // factor)
            fine.experts.fc1.data[factor * e + part].copy_(coarse.experts.fc1[e][:, piece])
            fine.experts.fc2.data[factor * e + part].copy_(coarse.experts.fc2[e][:, piece])
    torch.testing.assert_close(fine(x, tokens()), coarse(x, tokens()))


def test_segmentation_is_written_out_once_and_said() -> None:
    config = assemble({"num_experts": 16, "ffn_hidden_size": 64, "moe_segmentation_factor": 4, "global_batch_size": 4})
    fine, notes = normalise(config, 1)
    assert (fine.moe.num_experts, fine.moe.moe_ffn_hidden_size, fine.moe.moe_router_topk) == (64, 16, 8)
    assert notes[0] == ("--num-experts 64 is implied by --moe-segmentation-factor 4: each of 16 experts is cut into 4.")
    assert normalise(fine, 1) == (fine, [])
    uneven = replace(config, model=replace(config.model, ffn_hidden_size=62))
    assert normalise(uneven, 1)[0] == uneven  # a rule says why


def test_pyramid_names_its_largest_layer_and_is_cut_like_other_experts() -> None:
    config = assemble({"moe_num_experts_per_layer": "[4]+[8]", "global_batch_size": 4})
    assert config.moe.experts_per_layer(4) == (0, 0, 0, 0)  # dense, as long as it is not normalised
    found, notes = normalise(config, 1)
    assert found.moe.experts_per_layer(4) == (0, 4, 0, 8)
    assert notes == ["--num-experts 8 is implied by --moe-num-experts-per-layer [4]+[8]: it is the largest of them."]
    layers = [found.moe.for_layer(i, 4) for i in range(4)]
    assert [moe.num_experts for moe in layers] == [None, 4, None, 8]
    assert layers[1] == replace(found.moe, num_experts=4, moe_num_experts_per_layer=None)
    finer = normalise(replace(config, moe=replace(config.moe, moe_segmentation_factor=2)), 1)[0].moe
    assert finer.experts_per_layer(4) == (0, 8, 0, 16) and finer.num_experts == 16


def test_rules_of_routing_hold_for_every_layer_of_a_pyramid() -> None:
    values = {"num_experts": 8, "moe_num_experts_per_layer": "[2,8]", "moe_router_topk": 4}
    (problem,) = routing_rules(assemble(values), 1)
    assert problem.startswith("--moe-router-topk 4 must be from 1 to --num-experts 2")
    assert list(routing_rules(assemble(values | {"moe_router_topk": 2}), 1)) == []
