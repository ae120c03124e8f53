"""Recomputation: the same mathematics, only what was named, and never another routing."""

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_moe.config import normalise
from megatron_moe.config.schema import Config
from megatron_moe.kernels.forgetting import without_keeping
from megatron_moe.moe.routers import ROUTERS
from megatron_moe.moe.routing import Choice, RouterInputs
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.pipeline.actions import Kind
from megatron_moe.plan.rank import trace_rank
from megatron_moe.training.build import Machine, build_machine
from megatron_moe.training.step import train_step
from tests.helpers.ranks import MAX_RANKS, RankPool
from tests.parity.factors import LATENT
from tests.parity.harness import BASE, Trace, _groups, batches, differences, layout, make_groups, trace, vary

SHARED = {"moe_shared_expert_intermediate_size": 16, "moe_z_loss_coeff": 0.01}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


@pytest.fixture(scope="module")
def reference(ranks: RankPool) -> Trace:
    return trace(vary(BASE, **SHARED), 1, ranks)


@pytest.mark.parametrize(
    ("text", "recompute"),
    [
        ("dp=1,mbs=4", {"recompute_granularity": "full"}),
        ("dp=1,mbs=4", selective("core_attn", "mlp", "moe", "layernorm")),
        ("tp=2,ep=2,cp=2,mbs=4", {"recompute_granularity": "full"}),
        ("tp=2,ep=2,pp=2,schedule=zb-v,mbs=2", selective("core_attn", "mlp", "moe", "layernorm")),
        ("tp=2,ep=2,pp=2,schedule=zb-v,mbs=2", selective("layernorm", "shared_experts", "moe_act")),
    ],
)
def test_same_curve(text: str, recompute: dict[str, Any], reference: Trace, ranks: RankPool) -> None:
    values, world_size = layout(text)
    found = trace(vary(BASE, **SHARED, **recompute, **values), world_size, ranks)
    assert differences(found, reference) == []


def step_once(config: Config, ctx: ParallelContext, machine: Machine | None = None) -> Machine:
    """One optimizer step of one micro-batch per rank."""
    config, _ = normalise(config, ctx.world.size)
    machine = build_machine(config, ctx) if machine is None else machine
    train_step(machine, batches(config, 0, ctx.dp.rank, ctx.dp.size, False), 1, 1e-2)
    return machine


PARTS = ("attention_norm", "attention.query", "feed_forward", "moe", "moe.gate", "moe.shared_expert.feed_forward")


@pytest.mark.parametrize(
    ("recompute", "twice"),
    [
        ({}, set()),
        ({"recompute_granularity": "full"}, set(PARTS)),
        (selective("core_attn"), set()),
        (selective("mlp"), {"feed_forward"}),
        (selective("moe"), {"moe", "moe.gate", "moe.shared_expert.feed_forward"}),
        (selective("moe", "shared_experts"), {"moe", "moe.gate", "moe.shared_expert.feed_forward"}),
        (selective("shared_experts"), {"moe.shared_expert.feed_forward"}),
        (selective("moe_act"), set()),
        (selective("layernorm"), {"attention_norm"}),
    ],
)
def test_only_what_was_named_runs_twice(recompute: dict[str, Any], twice: set[str]) -> None:
    machine = build_machine(normalise(vary(BASE, **SHARED, **recompute), 1)[0], ParallelContext.single())
    calls, cores = Counter[str](), Counter[str]()
    blocks = [module for module in machine.stages[0].module.modules() if hasattr(module, "attention_norm")]
    for block in blocks:
        for name, module in block.named_modules():
            if name in PARTS and name != "moe":
                module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
        if block.moe is not None:  # called by its steps
            layer: Any = block.moe
            layer.steps = lambda *inputs, steps=layer.steps: (calls.update(["moe"]), steps(*inputs))[1]
        attention: Any = block.attention
        core = attention.core
        attention.core = lambda *inputs, core=core: (cores.update(["core"]), core(*inputs))[1]
    step_once(machine.config, machine.ctx, machine)
    num_layers = {name: len(blocks) if name.startswith("attention") else len(blocks) // 2 for name in PARTS}
    assert calls == {name: num_layers[name] * (2 if name in twice else 1) for name in PARTS}
    core_again = "full" in recompute.values() or "core_attn" in recompute.get("recompute_modules", ())
    assert cores["core"] == len(blocks) * (1 + core_again)


def test_norm_output_is_not_kept() -> None:
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    kept: list[weakref.ref[torch.Tensor]] = []

    def norm(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (F.rms_norm(x, (8,)),)

    def use(h: torch.Tensor) -> torch.Tensor:
        kept.append(weakref.ref(h))
        return F.linear(h, weight).sin() + F.linear(h.view(5, 2, 4).flatten(1), weight).cos()

    y = without_keeping(norm, use, x)
    assert kept.pop()() is None
    found = torch.autograd.grad(y.sum(), [x, weight])
    for a, b in zip(found, torch.autograd.grad(use(*norm(x)).sum(), [x, weight]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("who_reads_it", [{}, SHARED | {"moe_residual_coefficient": True}], ids=str)
def test_no_part_of_a_moe_layer_keeps_the_norm_output(who_reads_it: dict[str, Any]) -> None:
    def kept(**recompute: Any) -> int:
        config = vary(BASE, **who_reads_it, **recompute, num_layers=2, micro_batch_size=2, moe_layer_freq="1")
        return trace_rank(normalise(config, 1)[0], 1, 0).costs[Kind.F, 0, "last"].kept

    tokens, norms = 16 * 2, 2 * 2  # of two layers, in float64
    assert kept() - kept(**selective("layernorm")) == norms * tokens * BASE.model.hidden_size * 8


@pytest.mark.parametrize("core", [(), ("core_attn",)])
@pytest.mark.parametrize("queries", [{}, {"q_lora_rank": 10}])
def test_latents_are_kept_in_place_of_heads(core: tuple[str, ...], queries: dict[str, int]) -> None:
    def kept(*modules: str) -> int:
        recompute = selective(*modules) if modules else {}
        config = vary(BASE, **LATENT, **queries, **recompute, num_experts=None, num_layers=2, micro_batch_size=2)
        return trace_rank(normalise(config, 1)[0], 1, 0).costs[Kind.F, 0, "last"].kept

    heads, key, value, tokens = 4, 12, 6, 2 * 16 * 2  # of both layers
    forgotten = heads * (key * (2 if queries else 1) + value) * 8 * tokens
    assert kept(*core) - kept(*core, "mla_up_proj") >= forgotten


@pytest.mark.parametrize(
    ("activation", "forgotten"),
    [
        ({}, 1),  # swiglu keeps its inputs; its output is the second product's input
        ({"activation": "quick_geglu", "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0}, 6),
    ],
)
def test_nothing_behind_the_activation_of_experts_is_kept(activation: dict[str, Any], forgotten: int) -> None:
    def kept(**recompute: Any) -> int:
        config = vary(BASE, **activation, **recompute, num_layers=2, micro_batch_size=2)
        return trace_rank(normalise(config, 1)[0], 1, 0).costs[Kind.F, 0, "last"].kept

    rows, width = 2 * 16 * 2, 16  # of one MoE layer, in float64
    assert kept() - kept(**selective("moe_act")) == forgotten * rows * width * 8


@pytest.fixture
def restless_router() -> Iterator[str]:
    """Top-k that sees other logits each time it is asked."""

    def route(inputs: RouterInputs, config: Any) -> Choice:
        noise = torch.randn(inputs.logits_GTE.shape, dtype=inputs.logits_GTE.dtype)
        return ROUTERS["topk"].route(inputs._replace(logits_GTE=inputs.logits_GTE + 10 * noise), config)

    ROUTERS["restless"] = replace(ROUTERS["topk"], route=route)
    yield "restless"
    del ROUTERS["restless"]


@pytest.mark.parametrize("recompute", [{"recompute_granularity": "full"}, selective("moe")])
@pytest.mark.parametrize("capacity", [{}, {"moe_expert_capacity_factor": 0.7, "moe_token_drop_policy": "probs"}])
def test_never_routes_again(recompute: dict[str, Any], capacity: dict[str, Any], restless_router: str) -> None:
    config = vary(BASE, moe_router=restless_router, **recompute, **capacity)
    machine = build_machine(normalise(config, 1)[0], ParallelContext.single())
    routed: dict[int, list[torch.Tensor]] = {}
    for layer_id, gate in machine.gates.items():
        layer: Any = next(m for m in machine.stages[0].module.modules() if getattr(m, "gate", None) is gate)
        dispatch = layer.dispatcher.dispatch

        def noted(x: Any, routing: Any, layer_id: int = layer_id, dispatch: Any = dispatch) -> Any:
            routed.setdefault(layer_id, []).append(torch.stack([routing.token_ids_N, routing.expert_ids_N]))
            return dispatch(x, routing)

        layer.dispatcher.dispatch = noted
    for passes in (2, 4):  # forward and recomputation of one step, then of another
        step_once(machine.config, machine.ctx, machine)
        for ids in routed.values():
            assert len(ids) == passes
            assert torch.equal(ids[-1], ids[-2])
    assert not torch.equal(routed[1][0], routed[1][2]), "the router is not restless: this test shows nothing"


def count_calls(rank: int, config: Config, sizes: MeshSizes) -> dict[tuple[str, str], int]:
    ctx = ParallelContext.create(sizes, rank=rank, groups=_groups)
    step_once(config, ctx)
    return {key: calls for key, calls in ctx.traffic.calls.items() if key[0] in ("ep", "seq")}


@pytest.mark.parametrize("parts", [1, 3])
def test_counts_are_exchanged_once(parts: int, ranks: RankPool) -> None:
    """Per MoE layer the recomputation moves rows and weights again, but no counts, results or load statistics."""
    sizes = MeshSizes(tp=2, dp=2, ep=2)
    ranks.run(MAX_RANKS, make_groups, sizes)
    values, _ = layout("tp=2,dp=2,ep=2,mbs=4")
    config = vary(BASE, **values, moe_overlap_degree=parts)
    kept = ranks.run(4, count_calls, config, sizes)[0]
    recomputed = ranks.run(4, count_calls, vary(config, **selective("moe")), sizes)[0]
    dispatches = 2 * parts  # of two layers
    assert kept["ep", "all_to_all"] == dispatches * (4 + 3)
    assert recomputed["ep", "all_to_all"] == dispatches * (4 + 3 + 2)  # nothing behind the experts is needed again
    assert recomputed["seq", "all_reduce"] == kept["seq", "all_reduce"] > 0
