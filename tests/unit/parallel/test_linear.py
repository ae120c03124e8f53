"""Linears, embedding and loss cut over tp against the whole; weight gradients deferred against at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.config.schema import ModelConfig, MoEConfig
from megatron_moe.kernels import grouped
from megatron_moe.model.cross_entropy import vocab_parallel_cross_entropy
from megatron_moe.model.feed_forward import FeedForward
from megatron_moe.moe.experts import Experts
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.gradients import GradientReducer
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.parallel.linear import ColumnParallelLinear, RowParallelLinear, enter_tp
from megatron_moe.parallel.sharding import Initial, ShardedParameter, name_parameters, sharded_parameters
from megatron_moe.parallel.vocab import VocabParallelEmbedding, padded_vocab, vocab_spec
from megatron_moe.parallel.weight_gradients import WeightGradientQueue
from tests.helpers.building import normal
from tests.helpers.ranks import MAX_RANKS
from tests.parity import harness

TP2 = MeshSizes(tp=2)
S, B, D, F_, V = 4, 3, 6, 8, 5
DTYPE = torch.float64


def context(rank: int, tp: int) -> ParallelContext:
    return ParallelContext.create(MeshSizes(tp=tp), rank=rank, groups=harness._groups)


def fill(module: torch.nn.Module, ctx: ParallelContext, values: dict[str, Tensor]) -> None:
    name_parameters(module)
    for name, p in sharded_parameters(module).items():
        p.data[:] = 1e3  # padding is loud
        p.logical(p.data, ctx).copy_(values[name][p.spec.logical_slices(ctx)])


def check_gradients(module: torch.nn.Module, ctx: ParallelContext, expected: dict[str, Tensor]) -> None:
    """This rank's gradients; partial ones are summed over tp, as gradient reduction does."""
    for name, p in sharded_parameters(module).items():
        grad = p.grad.clone()
        if p.spec.sum_axis == "stage" and ctx.tp.size > 1:
            torch.distributed.all_reduce(grad, group=ctx.tp.group)
        mine = p.logical(grad, ctx)
        torch.testing.assert_close(mine, expected[name][p.spec.logical_slices(ctx)], msg=lambda m, n=name: f"{n}: {m}")


def pair_on_rank(rank: int, tp: int, sequence_parallel: bool) -> None:
    """Column- and row-parallel linears, with biases, against two F.linear."""
    ctx = context(rank, tp)
    pair = torch.nn.ModuleList(
        [
            ColumnParallelLinear((2, F_, D), ctx, DTYPE, cut=1, bias=True),
            RowParallelLinear(F_, D, ctx, DTYPE, sequence_parallel=sequence_parallel, bias=True),
        ]
    )
    shapes = {"0.weight": (2, F_, D), "0.bias": (2, F_), "1.weight": (D, F_), "1.bias": (D,)}
    values = {name: normal(i, *shape).requires_grad_() for i, (name, shape) in enumerate(shapes.items())}
    fill(pair, ctx, {name: value.detach() for name, value in values.items()})

    whole_x = normal(10, S, B, D).requires_grad_()
    hidden = torch.einsum("sbd,pfd->sbpf", whole_x, values["0.weight"]) + values["0.bias"]
    whole_y = F.linear(hidden[..., 0, :] * hidden[..., 1, :], values["1.weight"], values["1.bias"])
    (whole_y * normal(11, S, B, D)).sum().backward()

    mine = slice(rank * S // tp, (rank + 1) * S // tp) if sequence_parallel else slice(None)
    x = whole_x.detach()[mine].clone().requires_grad_()
    hidden = pair[0](enter_tp(x, ctx, sequence_parallel)).unflatten(-1, (2, -1))
    y = pair[1](hidden[..., 0, :] * hidden[..., 1, :])
    (y * normal(11, S, B, D)[mine]).sum().backward()
    torch.testing.assert_close(y, whole_y[mine])
    torch.testing.assert_close(x.grad, whole_x.grad[mine])
    check_gradients(pair, ctx, {name: value.grad for name, value in values.items()})


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def tp(request, ranks) -> int:
    if request.param > 1:
        ranks.run(MAX_RANKS, harness.make_groups, TP2)
    return request.param


def on_ranks(ranks, tp: int, function: Any, *arguments: Any) -> None:
    if tp == 1:
        function(0, 1, *arguments)
    else:
        ranks.run(tp, function, tp, *arguments)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_and_row(ranks, tp, sequence_parallel):
    on_ranks(ranks, tp, pair_on_rank, sequence_parallel)


def embedding_on_rank(rank: int, tp: int, sequence_parallel: bool) -> None:
    ctx = context(rank, tp)
    table = normal(1, V, D).requires_grad_()
    embedding = VocabParallelEmbedding(vocab_spec(V, D, 4, ctx, Initial()), ctx, DTYPE, sequence_parallel)
    fill(embedding, ctx, {"weight": table.detach()})
    ids_SB = torch.tensor([[0, 4, 3], [4, 4, 0], [1, 2, 3], [3, 0, 1]])
    (F.embedding(ids_SB, table) * normal(2, S, B, D)).sum().backward()
    mine = slice(rank * S // tp, (rank + 1) * S // tp) if sequence_parallel else slice(None)
    x_SBD = embedding(ids_SB)
    assert torch.equal(x_SBD, table.detach()[ids_SB][mine])
    (x_SBD * normal(2, S, B, D)[mine]).sum().backward()
    check_gradients(embedding, ctx, {"weight": table.grad})


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedding(ranks, tp, sequence_parallel):
    on_ranks(ranks, tp, embedding_on_rank, sequence_parallel)


def loss_on_rank(rank: int, tp: int, vocab_size: int, dtype: torch.dtype) -> None:
    """Stored rows beyond the vocabulary hold large logits; a rank may hold nothing else."""
    ctx = context(rank, tp)
    spec = vocab_spec(vocab_size, D, 4, ctx, Initial())
    labels_N = torch.arange(7) % vocab_size
    whole_NV = (normal(1, 7, vocab_size) * 3).to(dtype)
    whole_NV[2] += 500.0  # exp alone overflows
    leaf = whole_NV.clone().requires_grad_()
    expected_N = F.cross_entropy(leaf, labels_N, reduction="none")
    (expected_N * normal(2, 7).to(dtype)).sum().backward()

    stored_NV = torch.full((7, spec.storage_shape[0]), 1e4, dtype=dtype)
    stored_NV[:, :vocab_size] = whole_NV
    mine = stored_NV[:, spec.storage_slices(ctx)[0]].clone()
    logits_NV = mine.clone().requires_grad_()
    given_NV, saved = logits_NV.clone(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss_N = vocab_parallel_cross_entropy(given_NV, labels_N, spec, ctx)
    torch.testing.assert_close(loss_N, expected_N)
    kept = {t.untyped_storage().data_ptr() for t in saved if t.dim() == 2}
    assert kept == {given_NV.untyped_storage().data_ptr()}, "no second tensor of the logits' size"
    (loss_N * normal(2, 7).to(dtype)).sum().backward()
    logical = spec.logical_slices(ctx)[0]
    num_real = logical.stop - logical.start
    torch.testing.assert_close(logits_NV.grad[:, :num_real], leaf.grad[:, logical])
    assert not logits_NV.grad[:, num_real:].any(), "padding gets no gradient"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [3, 5, 8])
def test_cross_entropy(ranks, tp, vocab_size, dtype):
    on_ranks(ranks, tp, loss_on_rank, vocab_size, dtype)


def test_loss_of_bfloat16_logits_is_float32():
    ctx = ParallelContext.single()
    logits_NV = normal(1, 7, 8, dtype=torch.bfloat16).requires_grad_()
    loss_N = vocab_parallel_cross_entropy(logits_NV, torch.arange(7), vocab_spec(8, D, 4, ctx, Initial()), ctx)
    torch.testing.assert_close(loss_N, F.cross_entropy(logits_NV.float(), torch.arange(7), reduction="none"))
    loss_N.sum().backward()
    assert logits_NV.grad.dtype == torch.bfloat16


def test_padded_vocabulary():
    assert [padded_vocab(v, 128, tp) for v, tp in ((50257, 1), (50257, 8), (1024, 4))] == [50304, 51200, 1024]


def deferrable(kind: str, queue: WeightGradientQueue | None) -> tuple[torch.nn.Module, Callable[[Tensor], Tensor]]:
    """A module with two deferrable weights, and how to run it on rows [6, D]."""
    ctx = ParallelContext.single()
    model = ModelConfig(hidden_size=D, ffn_hidden_size=F_)
    made: FeedForward | Experts
    if kind == "dense":
        made = FeedForward(F_, model, ctx, DTYPE, sequence_parallel=False, output_std=0.1, bias=True, queue=queue)
    else:
        made = Experts(model, MoEConfig(num_experts=3, moe_ffn_hidden_size=F_), ctx, DTYPE, 0.1, queue)
    for i, p in enumerate(made.parameters()):
        p.data.copy_(normal(20 + i, *p.shape))

    def run(x_TD: Tensor) -> Tensor:
        if kind == "dense":
            return made(x_TD.view(3, 2, D))
        return made(x_TD, normal(5, 6), torch.tensor([2, 0, 4]))

    return made, run


def count_accumulations(module: torch.nn.Module) -> list[str]:
    """From now on the name of a parameter is noted whenever a gradient is added to it."""
    noted: list[str] = []

    def count(name: str, p: ShardedParameter) -> None:
        accumulate = p.accumulate
        p.accumulate = lambda write, num_uses: (noted.append(name), accumulate(write, num_uses))[1]

    for name, p in sharded_parameters(module).items():
        count(name, p)
    return noted


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_deferred_weight_gradients(kind, monkeypatch):
    """Two micro-batches: backward gives the input's gradient alone, draining the weights', each computed once."""
    gradients: dict[bool, list[Tensor]] = {}
    products = []
    outer = grouped.add_grouped_outer_product
    monkeypatch.setattr(grouped, "add_grouped_outer_product", lambda *a: products.append(1) or outer(*a))
    for deferred in (False, True):
        queue = WeightGradientQueue()
        module, run = deferrable(kind, queue)
        reducer = GradientReducer([list(sharded_parameters(module).values())], ParallelContext.single(), "no_shard")
        reducer.begin_step(2)
        counted = count_accumulations(module)
        matrices = [name for name in sharded_parameters(module) if not name.endswith("bias")]
        products.clear()
        inputs = []
        for microbatch in range(2):
            x = normal(30 + microbatch, 6, D).requires_grad_()
            inputs.append(x)
            y = run(x)
            with queue.defer() if deferred else torch.enable_grad():
                (y * normal(40, *y.shape)).sum().backward()
            assert all(p.grad is None for p in module.parameters()), "gradients live in main_grad"
        if deferred:
            assert len(queue) == 2 and not set(matrices) & set(counted) and not products
            for microbatch in range(2):
                queue.drain_one()
                assert all(counted.count(name) == microbatch + 1 for name in matrices), counted
        assert all(counted.count(name) == 2 for name in sharded_parameters(module)), counted
        assert len(products) == (4 if kind == "experts" else 0)
        gradients[deferred] = [x.grad for x in inputs] + [p.main_grad for p in module.parameters()]
    for at_once, later in zip(gradients[False], gradients[True], strict=True):
        assert float(at_once.abs().max()) > 0 and torch.equal(at_once, later)


def test_a_queue_that_defers_nothing_changes_nothing():
    module, run = deferrable("dense", None)
    queued, run_queued = deferrable("dense", WeightGradientQueue())
    for r in (run, run_queued):
        r(normal(1, 6, D)).square().sum().backward()
    for a, b in zip(module.parameters(), queued.parameters(), strict=True):
        assert isinstance(a, ShardedParameter)
        torch.testing.assert_close(a.grad, b.grad)
