"""Placement: slices partition every tensor, and initial values do not depend on the cut."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe.config.schema import Config, DataConfig, ModelConfig, MoEConfig, ParallelConfig, TrainingConfig
from megatron_moe.model.decoder import Decoder
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.parallel.sharding import Initial, ShardSpec, sharded_parameters
from tests.helpers.building import fake_context

CONFIG = Config(
    model=ModelConfig(
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=37,
        make_vocab_size_divisible_by=8,
        add_bias_linear=True,
        qk_layernorm=True,
        untie_embeddings_and_output_weights=True,
    ),
    moe=MoEConfig(
        num_experts=4,
        moe_ffn_hidden_size=8,
        moe_shared_expert_intermediate_size=12,
        moe_shared_expert_gate=True,
    ),
    data=DataConfig(seq_length=16),
    training=TrainingConfig(seed=11),
)
MESHES = [
    MeshSizes(tp=2, ep=2),
    MeshSizes(tp=4, etp=2, ep=2),  # more tp ranks than key-value heads
    MeshSizes(tp=2, dp=2, etp=2, ep=2),
    MeshSizes(cp=2, dp=2, ep=4),
]


def decoder(ctx: ParallelContext, seed: int = 11) -> Decoder:
    config = replace(CONFIG, training=replace(CONFIG.training, seed=seed))
    if ctx.tp.size > 1:
        config = replace(config, parallel=ParallelConfig(sequence_parallel=True))
    return Decoder(config, ctx)


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in sharded_parameters(decoder(ParallelContext.single())).items()}


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_initial_values_do_not_depend_on_the_cut(sizes, alone):
    seen: dict[str, torch.Tensor] = {}
    for rank in range(sizes.world):
        ctx = fake_context(sizes, rank)
        for name, p in sharded_parameters(decoder(ctx)).items():
            assert p.spec.name == name
            whole = alone[name][tuple(slice(0, n) for n in p.spec.shape)]
            mine = p.spec.logical_slices(ctx)
            assert torch.equal(p.logical(p.data, ctx), whole[mine]), name
            padding = torch.ones_like(p, dtype=torch.bool)
            p.logical(padding, ctx).fill_(False)
            assert not p.detach()[padding].any(), f"padding of {name} is not zero"
            seen.setdefault(name, torch.zeros(p.spec.shape, dtype=torch.int64))[mine] += 1
    for name, counts in seen.items():
        assert int(counts.min()) == int(counts.max()) > 0, f"a part of {name} is nowhere"
    assert seen.keys() == alone.keys()


def test_initial_values_depend_on_seed_and_name(alone):
    other = {n: p.detach() for n, p in sharded_parameters(decoder(ParallelContext.single(), seed=12)).items()}
    drawn = [name for name, p in alone.items() if float(p.std()) > 0]
    assert "layers.1.moe.experts.fc1" in drawn and "embedding.weight" in drawn
    assert all(not torch.equal(alone[name], other[name]) for name in drawn)
    assert not torch.equal(alone["layers.0.attention.query.weight"], alone["layers.1.attention.query.weight"])
    experts = alone["layers.1.moe.experts.fc1"]
    assert not torch.equal(experts[0], experts[1]), "experts start from different weights"
    assert not torch.equal(experts[0, 0], experts[0, 1]), "gate and up projection differ"


def test_standard_deviations(alone):
    std = CONFIG.model.init_method_std
    for name, expected in {
        "embedding.weight": std,
        "layers.1.moe.experts.fc1": std,
        "layers.1.moe.experts.fc2": std / 2,  # sqrt(2 * 2 layers)
        "layers.0.attention.output.weight": std / 2,
        "layers.0.feed_forward.fc2.weight": std / 2,
    }.items():
        values = alone[name]
        values = values[: CONFIG.model.vocab_size] if name.startswith("embedding") else values
        assert float(values.std()) == pytest.approx(expected, rel=6 / (2 * values.numel()) ** 0.5), name
    assert torch.equal(alone["layers.0.attention_norm.weight"], torch.ones(16))
    assert not alone["layers.0.attention.query.bias"].any()


@st.composite
def placements(draw: st.DrawFn) -> tuple[MeshSizes, ShardSpec]:
    expert = draw(st.booleans())
    sizes = draw(st.sampled_from([*MESHES, MeshSizes(tp=2, cp=2, dp=2, etp=2, ep=2), MeshSizes()]))
    axes = draw(st.permutations(["ep", "etp"] if expert else ["tp"]))[: draw(st.integers(0, 2))]
    shards = tuple((axis, draw(st.integers(0, 2))) for axis in axes)
    storage = [draw(st.integers(1, 3)) for _ in range(3)]
    for axis, dim in shards:
        storage[dim] *= getattr(sizes, axis)
    shape = (max(storage[0] - draw(st.integers(0, 3)), 1), *storage[1:])
    return sizes, ShardSpec(shape, shards=shards, padded=tuple(storage), expert=expert)


@settings(deadline=None)
@given(placements())
def test_slices_partition_the_tensor(placement):
    sizes, spec = placement
    storage, logical = torch.zeros(spec.storage_shape), torch.zeros(spec.shape)
    for rank in range(sizes.world):
        ctx = fake_context(sizes, rank)
        storage[spec.storage_slices(ctx)] += 1
        logical[spec.logical_slices(ctx)] += 1
        assert tuple(storage[spec.storage_slices(ctx)].shape) == spec.local_shape(ctx)
        replicas = spec.num_replicas(ctx)
    assert torch.all(storage == replicas) and torch.all(logical == replicas)


def test_constant_and_normal_draws():
    assert torch.equal(Initial("constant", 3.0).draw((2, 2), 1), torch.full((2, 2), 3.0))
    drawn = Initial("normal", 0.5).draw((1000,), 1)
    assert torch.equal(drawn, Initial("normal", 0.5).draw((1000,), 1))
    assert not torch.equal(drawn, Initial("normal", 0.5).draw((1000,), 2))
