"""Every collective, forward and backward, against plain torch on the tensors of all ranks."""

import gc
import inspect
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import Axis, ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from tests.helpers.building import normal
from tests.helpers.ranks import MAX_RANKS
from tests.parity import harness

D = 3
COUNTS = {"uneven": [2, 0, 3], "even": [2, 2, 2], "nobody": [0, 0, 0]}
SENDS = {"uneven": [[1, 0, 2], [0, 0, 0], [3, 1, 0]], "nobody": [[0] * 3] * 3}  # [sender][receiver] rows
Joint = Callable[[list[Tensor]], list[Tensor]]


def rows_of(case: str, size: int) -> list[int]:
    return COUNTS[case][:size]


def sends_of(case: str, size: int) -> list[list[int]]:
    return [sends[:size] for sends in SENDS[case][:size]]


def call(name: str, case: str, x: Tensor, axis: Axis) -> Tensor:
    """The collective as the model calls it."""
    counts, sends = rows_of(case, axis.size), sends_of(case if case in SENDS else "uneven", axis.size)
    return {
        "all_gather": lambda: collectives.all_gather(x, axis),
        "reduce_scatter": lambda: collectives.reduce_scatter(x, axis),
        "begin_all_to_all": lambda: collectives.begin_all_to_all(
            x, sends[axis.rank], [row[axis.rank] for row in sends], axis
        )(),
        "all_gather_rows": lambda: collectives.all_gather_rows(x, counts, axis),
        "reduce_scatter_rows": lambda: collectives.reduce_scatter_rows(x, counts, axis),
    }[name]()


def joint(name: str, case: str, size: int) -> tuple[list[int], Joint]:
    """Rows that each rank gives, and the same as a plain function of all ranks' tensors."""
    counts, sends = rows_of(case, size), sends_of(case if case in SENDS else "uneven", size)

    def scattered(xs: list[Tensor], rows: list[int]) -> list[Tensor]:
        return list(torch.stack(xs).sum(0).split(rows))

    def exchanged(xs: list[Tensor]) -> list[Tensor]:
        blocks = [x.split(row) for x, row in zip(xs, sends, strict=True)]
        return [torch.cat([blocks[sender][receiver] for sender in range(size)]) for receiver in range(size)]

    return {
        "all_gather": ([2] * size, lambda xs: [torch.cat(xs)] * size),
        "reduce_scatter": ([2 * size] * size, lambda xs: scattered(xs, [2] * size)),
        "begin_all_to_all": ([sum(row) for row in sends], exchanged),
        "all_gather_rows": (counts, lambda xs: [torch.cat(xs)] * size),
        "reduce_scatter_rows": ([sum(counts)] * size, lambda xs: scattered(xs, counts)),
    }[name]


CASES = [
    ("all_gather", "even"),
    ("reduce_scatter", "even"),
    *[("begin_all_to_all", case) for case in SENDS],
    *[(name, case) for name in ("all_gather_rows", "reduce_scatter_rows") for case in COUNTS],
]


def inputs(rank: int, rows: int) -> Tensor:
    """A rank's tensor, strided as a transpose leaves it."""
    return normal(rank, D, rows).T


def run_on_rank(rank: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(output, gradient of the input) of every case; the loss is the inner product with this rank's own numbers."""
    axis = ParallelContext.create(MeshSizes(tp=size), rank=rank, groups=harness._groups).tp
    results = []
    for name, case in CASES:
        x = inputs(rank, joint(name, case, size)[0][rank]).requires_grad_()
        y = call(name, case, x, axis)
        (y * normal(100 + rank, *y.shape)).sum().backward()
        assert x.grad is not None
        results.append((y.detach().numpy(), x.grad.numpy()))
    return results


@pytest.fixture(params=[1, 2, 3])
def size(request, ranks) -> int:
    if request.param > 1:
        ranks.run(MAX_RANKS, harness.make_groups, MeshSizes(tp=request.param))
    return request.param


def on_ranks(ranks, size, function):
    return [function(0, 1)] if size == 1 else ranks.run(size, function, size)


def test_changes_of_layout(ranks, size):
    found = on_ranks(ranks, size, run_on_rank)
    for index, (name, case) in enumerate(CASES):
        rows, function = joint(name, case, size)
        xs = [inputs(rank, rows[rank]).requires_grad_() for rank in range(size)]
        ys = function(xs)
        sum((y * normal(100 + rank, *y.shape)).sum() for rank, y in enumerate(ys)).backward()
        for rank, (x, y) in enumerate(zip(xs, ys, strict=True)):
            output, gradient = found[rank][index]
            np.testing.assert_allclose(output, y.detach(), rtol=1e-13, err_msg=f"{name} {case}")
            np.testing.assert_allclose(gradient, x.grad, rtol=1e-13, err_msg=f"gradient of {name} {case}")


def replicated_on_rank(rank: int, size: int) -> None:
    """``all_reduce`` and ``replicate``, whose gradients are replicated or partial by contract."""
    ctx = ParallelContext.create(MeshSizes(tp=size), rank=rank, groups=harness._groups)
    axis = ctx.tp
    given = normal(rank, D, 4).T
    x = given.clone().requires_grad_()
    y = collectives.all_reduce(x, axis)
    torch.testing.assert_close(y, sum(normal(r, D, 4).T for r in range(size)))
    y.backward(normal(50, 4, D))
    assert torch.equal(x.grad, normal(50, 4, D)), "the gradient is replicated already"
    assert torch.equal(x, given), "the input is not summed in place"

    x = normal(60, 4, D).requires_grad_()
    y = collectives.replicate(x, axis)
    assert torch.equal(y, x)
    gradient = normal(rank, D, 4).T
    y.backward(gradient)
    torch.testing.assert_close(x.grad, sum(normal(r, D, 4).T for r in range(size)))
    assert torch.equal(gradient, normal(rank, D, 4).T), "the incoming gradient is not summed in place"


def test_replicated_tensors(ranks, size):
    on_ranks(ranks, size, replicated_on_rank)


def plain_on_rank(rank: int, size: int) -> None:
    """What has no autograd: sums, maxima, gathers, rings."""
    axis = ParallelContext.create(MeshSizes(tp=size), rank=rank, groups=harness._groups).tp
    everybody = [normal(r, 2 * size, D) for r in range(size)]
    whole, mine = torch.stack(everybody), everybody[rank]
    total = whole.sum(0)
    torch.testing.assert_close(collectives.sum_(mine.clone(), axis), total)
    assert torch.equal(collectives.max_(mine.clone(), axis), whole.amax(0))
    assert torch.equal(collectives.gather_dim0(mine.T, axis), torch.cat([x.T for x in everybody]))
    share = total[2 * rank : 2 * rank + 2]
    torch.testing.assert_close(collectives.scatter_sum_dim0(mine, axis), share)
    later = mine.clone()
    work = collectives.start_sum(later, axis)
    assert (work is None) == (size == 1)
    if work is not None:
        work.wait()
    torch.testing.assert_close(later, total)
    if size > 1:
        received, work = collectives.start_scatter_sum_dim0(mine.clone(), axis)
        assert work is not None
        work.wait()
        torch.testing.assert_close(received, share)
    seen = list(collectives.round_the_ring(mine.T, axis))
    assert [owner for owner, _ in seen] == [(rank - step) % size for step in range(size)]
    assert all(torch.equal(tensor, everybody[owner].T) for owner, tensor in seen)


def test_without_autograd(ranks, size):
    on_ranks(ranks, size, plain_on_rank)


def abandoned_on_rank(rank: int, size: int) -> bool:
    """Begin an all-to-all and never ask for its result, as a recomputation does that stops early: is it let go of?"""
    axis = ParallelContext.create(MeshSizes(tp=size), rank=rank, groups=harness._groups).tp
    rows = normal(rank, size, D).requires_grad_()
    finish = collectives.begin_all_to_all(rows, [1] * size, [1] * size, axis)
    exchange = weakref.ref(inspect.getclosurevars(finish).nonlocals["exchange"])
    collectives.sum_(torch.zeros(1), axis)  # behind the transfer
    del finish
    gc.collect()
    return exchange() is None


def test_an_abandoned_transfer_is_let_go_of(ranks):
    ranks.run(MAX_RANKS, harness.make_groups, MeshSizes(tp=2))
    assert ranks.run(2, abandoned_on_rank, 2) == [True, True]


def traffic_on_rank(rank: int, size: int) -> dict[tuple[str, str], int]:
    ctx = ParallelContext.create(MeshSizes(tp=size), rank=rank, groups=harness._groups)
    x = torch.zeros(6, 2, dtype=torch.float64)  # 96 bytes
    collectives.sum_(x, ctx.tp)
    collectives.gather_dim0(x, ctx.tp)
    collectives.scatter_sum_dim0(x, ctx.tp)
    sends = sends_of("uneven", size)
    collectives.exchange_rows(x[: sum(sends[rank])], sends[rank], [row[rank] for row in sends], ctx.tp)
    return dict(ctx.traffic.sent_bytes)


def test_bytes_are_those_of_ring_algorithms(ranks, size):
    found = on_ranks(ranks, size, traffic_on_rank)
    if size == 1:
        assert found == [{}]
        return
    for rank, sent in enumerate(found):
        away = sum(sends_of("uneven", size)[rank]) - sends_of("uneven", size)[rank][rank]
        assert sent == {
            ("tp", "all_reduce"): 2 * (size - 1) * 96 // size,
            ("tp", "all_gather"): (size - 1) * 96,
            ("tp", "reduce_scatter"): (size - 1) * 96 // size,
            ("tp", "all_to_all"): away * 16,
        }
