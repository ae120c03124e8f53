"""Every collective of the model, as a change of layout: ``before -> after`` forward, and its mirror backward.

    function          forward                          backward (of the gradient)
    ---------------   ------------------------------   ----------------------------------
    all_gather        shard(0)    -> replicated        partial sums -> shard(0)
    reduce_scatter    partial sum -> shard(0)          shard(0)     -> replicated
    all_reduce        partial sum -> replicated        replicated   -> replicated
    replicate         replicated  -> replicated        partial sums -> replicated
    begin_all_to_all  rows by sender -> by receiver    the same, reversed; each under way until it is needed
    all_gather_rows   uneven shard(0) -> replicated    partial sums -> uneven shard(0)
    reduce_scatter_rows  the mirror of all_gather_rows
    round_the_ring  shard -> every shard in turn   none: its users have backwards of their own

Only sums are used: means are scaled by their caller, where the divisor is visible. On an axis of size 1 each is the
identity. ``sent_bytes`` are those of ring algorithms: (n-1)/n of the whole tensor for a gather or scatter.
"""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megatron_moe.parallel.context import Axis

# torch 2.13 renamed these two; 2.11 has the old names alone.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# --- without autograd: for statistics, gradients and metadata --------------------------------------------------


def sum_(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, in place: partial sum -> replicated. No gradient."""
    if axis.size > 1:
        axis.traffic.add(axis.name, "all_reduce", 2 * (axis.size - 1) * _bytes(tensor) // axis.size)
        with axis.traffic.waiting():
            dist.all_reduce(tensor, group=axis.group)
    return tensor


def max_(tensor: Tensor, axis: Axis) -> Tensor:
    """Maximum over the axis, in place. No gradient."""
    if axis.size > 1:
        axis.traffic.add(axis.name, "all_reduce", 2 * (axis.size - 1) * _bytes(tensor) // axis.size)
        with axis.traffic.waiting():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=axis.group)
    return tensor


def gather_dim0(tensor: Tensor, axis: Axis) -> Tensor:
    """[n, ...] on each rank -> [n * size, ...], in rank order. No gradient."""
    if axis.size == 1:
        return tensor
    axis.traffic.add(axis.name, "all_gather", (axis.size - 1) * _bytes(tensor))
    whole = tensor.new_empty((tensor.shape[0] * axis.size, *tensor.shape[1:]))
    with axis.traffic.waiting():
        _all_gather_single(whole, tensor.contiguous(), group=axis.group)
    return whole


def scatter_sum_dim0(tensor: Tensor, axis: Axis) -> Tensor:
    """[n * size, ...] partial sums -> [n, ...], this rank's share of the sum. No gradient."""
    if axis.size == 1:
        return tensor
    axis.traffic.add(axis.name, "reduce_scatter", (axis.size - 1) * _bytes(tensor) // axis.size)
    share = tensor.new_empty((tensor.shape[0] // axis.size, *tensor.shape[1:]))
    with axis.traffic.waiting():
        _reduce_scatter_single(share, tensor.contiguous(), group=axis.group)
    return share


def start_sum(tensor: Tensor, axis: Axis) -> dist.Work | None:
    """:func:`sum_` that returns at once; the result is there after ``wait`` of what it returns (None: it is there)."""
    if axis.size == 1:
        return None
    axis.traffic.add(axis.name, "all_reduce", 2 * (axis.size - 1) * _bytes(tensor) // axis.size)
    return dist.all_reduce(tensor, group=axis.group, async_op=True)


def start_gather_dim0(whole: Tensor, share: Tensor, axis: Axis) -> dist.Work | None:
    """:func:`gather_dim0` into a given tensor that returns at once; the whole is there after ``wait``."""
    axis.traffic.add(axis.name, "all_gather", (axis.size - 1) * _bytes(share))
    return _all_gather_single(whole, share, group=axis.group, async_op=True)


def start_scatter_sum_dim0(tensor: Tensor, axis: Axis) -> tuple[Tensor, dist.Work | None]:
    """:func:`scatter_sum_dim0` that returns at once with the tensor that will hold the result."""
    axis.traffic.add(axis.name, "reduce_scatter", (axis.size - 1) * _bytes(tensor) // axis.size)
    share = tensor.new_empty((tensor.shape[0] // axis.size, *tensor.shape[1:]))
    return share, _reduce_scatter_single(share, tensor, group=axis.group, async_op=True)


def exchange_rows(rows: Tensor, send: list[int], receive: list[int], axis: Axis) -> Tensor:
    """Rows [sum(send), ...] cut by receiver -> rows [sum(receive), ...] ordered by sender. No gradient."""
    if axis.size == 1:
        return rows
    _count_rows(rows, send, axis)
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    with axis.traffic.waiting():
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=axis.group)
    return received


def _count_rows(rows: Tensor, send: list[int], axis: Axis) -> None:
    row_bytes = _bytes(rows) // max(rows.shape[0], 1)
    axis.traffic.add(axis.name, "all_to_all", (sum(send) - send[axis.rank]) * row_bytes)


# --- with autograd: changes of layout inside the model ---------------------------------------------------------


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis  # type: ignore[attr-defined]
        return gather_dim0(x, axis)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return scatter_sum_dim0(grad, ctx.axis), None  # type: ignore[attr-defined]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis  # type: ignore[attr-defined]
        return scatter_sum_dim0(x, axis)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gather_dim0(grad, ctx.axis), None  # type: ignore[attr-defined]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: Axis) -> Tensor:
        return sum_(x.clone(), axis)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return sum_(grad.clone(), ctx.axis), None  # type: ignore[attr-defined]


class _Exchange:
    """An all-to-all of rows that is under way: forth, and in the backward pass back."""

    def __init__(self, send: list[int], receive: list[int], axis: Axis) -> None:
        self.send, self.receive, self.axis = send, receive, axis
        self._under_way: tuple[Tensor, Tensor, dist.Work | None] | None = None

    def start(self, rows: Tensor, *, back: bool = False) -> Tensor:
        """Returns what will hold the received rows."""
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        rows = rows.contiguous()
        _count_rows(rows, send, self.axis)
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        work = dist.all_to_all_single(received, rows, receive, send, group=self.axis.group, async_op=True)
        self._under_way = (rows, received, work)  # what is sent must live as long
        # Another tensor of the same memory: autograd makes the one that it is given refer to this exchange, and where a
        # recomputation stops before it waits, that circle would never be freed.
        return received.data

    def wait(self) -> Tensor:
        """The received rows, once they are here."""
        assert self._under_way is not None
        _, received, work = self._under_way
        self._under_way = None
        if work is not None:
            with self.axis.traffic.waiting():
                work.wait()
        return received


class _BeginAllToAll(torch.autograd.Function):
    """Its output is not to be read before ``_FinishAllToAll``; its backward waits for what the other one's began."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange  # type: ignore[attr-defined]
        return exchange.start(rows)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.exchange.wait(), None  # type: ignore[attr-defined]


class _FinishAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, received: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange  # type: ignore[attr-defined]
        return exchange.wait()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.exchange.start(grad, back=True)  # type: ignore[attr-defined]
        return grad, None  # nobody reads it: the gradient is what comes back


class _AllGatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, counts: list[int], axis: Axis) -> Tensor:
        ctx.layout = (counts, axis)  # type: ignore[attr-defined]
        return _gather_rows(rows, counts, axis)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        counts, axis = ctx.layout  # type: ignore[attr-defined]
        return _scatter_sum_rows(grad, counts, axis), None, None


class _ReduceScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, counts: list[int], axis: Axis) -> Tensor:
        ctx.layout = (counts, axis)  # type: ignore[attr-defined]
        return _scatter_sum_rows(rows, counts, axis)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        counts, axis = ctx.layout  # type: ignore[attr-defined]
        return _gather_rows(grad, counts, axis), None, None


def _gather_rows(rows: Tensor, counts: list[int], axis: Axis) -> Tensor:
    """Uneven all-gather; gloo has none, so it is an all-to-all in which everybody gets the same rows."""
    copies = rows.repeat((axis.size, *([1] * (rows.dim() - 1))))
    return exchange_rows(copies, [counts[axis.rank]] * axis.size, counts, axis)


def _scatter_sum_rows(rows: Tensor, counts: list[int], axis: Axis) -> Tensor:
    """Uneven reduce-scatter: every rank receives its rows from all peers and adds them in rank order."""
    received = exchange_rows(rows, counts, [counts[axis.rank]] * axis.size, axis)
    return received.view(axis.size, counts[axis.rank], *rows.shape[1:]).sum(0)


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """[n, ...] shard of dim 0 -> [n * size, ...] replicated; the gradient is summed and scattered."""
    return x if axis.size == 1 else _AllGather.apply(x, axis)  # type: ignore[return-value]


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """[n * size, ...] partial sums -> [n, ...] shard of the sum; the gradient is gathered."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis)  # type: ignore[return-value]


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Partial sums -> replicated sum; the gradient, replicated already, passes."""
    return x if axis.size == 1 else _AllReduce.apply(x, axis)  # type: ignore[return-value]


def replicate(x: Tensor, axis: Axis) -> Tensor:
    """Replicated -> replicated, at the door of computation that differs per rank: the gradient is summed."""
    return x if axis.size == 1 else _Replicate.apply(x, axis)  # type: ignore[return-value]


def begin_all_to_all(rows: Tensor, send: list[int], receive: list[int], axis: Axis) -> Callable[[], Tensor]:
    """Rows cut by receiver (``send`` per peer) -> rows ordered by sender (``receive`` per peer), later.

    Whatever is computed between this and the call of what it returns hides the transfer; so does its backward pass,
    which autograd runs between the beginning and the end of the way back.
    """
    if axis.size == 1:
        return lambda: rows
    exchange = _Exchange(send, receive, axis)
    received: Tensor = _BeginAllToAll.apply(rows, exchange)  # type: ignore[assignment]
    return lambda: _FinishAllToAll.apply(received, exchange)  # type: ignore[return-value]


def all_gather_rows(rows: Tensor, counts: list[int], axis: Axis) -> Tensor:
    """[counts[rank], ...] -> [sum(counts), ...] replicated, in rank order; the gradient is summed and scattered."""
    return rows if axis.size == 1 else _AllGatherRows.apply(rows, counts, axis)  # type: ignore[return-value]


def reduce_scatter_rows(rows: Tensor, counts: list[int], axis: Axis) -> Tensor:
    """[sum(counts), ...] partial sums -> [counts[rank], ...] of the sum; the gradient is gathered."""
    return rows if axis.size == 1 else _ReduceScatterRows.apply(rows, counts, axis)  # type: ignore[return-value]


# --- rings: a tensor passed from rank to rank while something else is computed ----------------------------------


class RingShift:
    """A shift round a ring that is under way: rank r's tensor -> rank r + 1. No gradient.

    Both directions are posted as one batch at once, so that no order of ranks can make them wait for each other.
    """

    def __init__(self, tensor: Tensor, axis: Axis) -> None:
        assert axis.size > 1
        axis.traffic.add(axis.name, "send", _bytes(tensor))
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(self._sent)
        following, previous = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
        self._traffic = axis.traffic
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, following, group=axis.group),
                dist.P2POp(dist.irecv, self._received, previous, group=axis.group),
            ]
        )

    def wait(self) -> Tensor:
        """The previous rank's tensor, once it is here."""
        with self._traffic.waiting():
            for work in self._works:
                work.wait()
        return self._received


def round_the_ring(tensor: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Every rank's tensor in turn, this rank's first: (whose it is, the tensor). No gradient.

    The next one travels while the caller works on this one. Sends (size - 1) times the tensor; all ranks must take all.
    """
    for step in range(axis.size):
        shift = RingShift(tensor, axis) if step + 1 < axis.size else None
        yield (axis.rank - step) % axis.size, tensor
        if shift is not None:
            tensor = shift.wait()
