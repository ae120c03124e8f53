"""Offloaded activations leave the device between forward and backward pass: whole, once each, without parameters."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_moe.config import normalise
from megatron_moe.model.offload import Mover, OffloadedPass
from megatron_moe.pipeline.actions import Kind
from megatron_moe.plan.rank import RankTrace, trace_rank
from tests.parity.harness import BASE, vary


class _Counting(Mover):
    """Notes what is copied, in order."""

    def __init__(self, min_numel: int = 1) -> None:
        super().__init__(torch.device("cpu"), min_numel)
        self.log: list[tuple[str, int]] = []

    def to_host(self, whole_X: Tensor) -> Tensor | None:
        self.log.append(("out", len(whole_X)))
        return super().to_host(whole_X)

    def to_device(self, host_X: Tensor | None, numel: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
        self.log.append(("back", numel))
        return super().to_device(host_X, numel, dtype)


class _Layer(nn.Module):
    """Saves an intermediate twice, a part of it, its input, and its weight as a view; notes the intermediate."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size, dtype=torch.float64) / size)
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.weight.view(-1).view(self.weight.shape)).sin()
        self.seen.append(StorageWeakRef(h.untyped_storage()))
        return h * h + F.pad(h[:, 1:].T.cos().T, (1, 0)) + F.linear(h, self.weight)


def _run(layers: list[_Layer], x: Tensor, mover: Mover | None) -> Tensor:
    below = None
    for layer in layers:
        if mover is None:
            x = layer(x)
            continue
        below = OffloadedPass(layer, mover, below)
        x = below.run(layer, x)
    return x


def test_gradients_are_the_same_bits_and_nothing_is_kept_meanwhile() -> None:
    layers, mover = [_Layer(6), _Layer(6)], _Counting()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *(layer.weight for layer in layers)]
    expected = torch.autograd.grad(_run(layers, x, None).square().sum(), inputs)
    assert all(layer.seen.pop().expired() for layer in layers)
    y = _run(layers, x, mover)
    assert all(layer.seen[0].expired() for layer in layers)
    found = torch.autograd.grad(y.square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_each_storage_travels_once_and_begins_one_layer_ahead() -> None:
    layers, mover, size = [_Layer(6), _Layer(6), _Layer(6)], _Counting(), 5 * 6
    y = _run(layers, torch.randn(5, 6, dtype=torch.float64), mover)
    # Of each layer its input, what goes into the sine, and h: saved by three operations, one of them a part of it.
    assert mover.log == [("out", size)] * 9
    mover.log.clear()
    unpacked: list[int] = []
    for layer in reversed(layers):
        layer.weight.register_hook(lambda grad: unpacked.append(len(mover.log)))
    y.sum().backward()
    assert mover.log == [("back", size)] * 9
    assert unpacked == [6, 9, 9]  # when the last layer's weight has its gradient, the layer before is back too


def test_what_is_small_stays_and_without_gradients_nothing_moves() -> None:
    layer, mover = _Layer(6), _Counting(min_numel=31)
    _run([layer], torch.randn(5, 6, dtype=torch.float64), mover)
    assert mover.log == []
    with torch.no_grad():
        _run([layer], torch.randn(6, 6, dtype=torch.float64), mover)
    assert mover.log == []


def test_a_dry_run_sees_that_the_device_holds_less() -> None:
    def rank(num_layers: int) -> RankTrace:
        off = {"cpu_offloading_num_layers": num_layers, "min_offloaded_tensor_size": 1} if num_layers else {}
        config = vary(BASE, moe_router="force_balanced", micro_batch_size=4, **off)
        return trace_rank(normalise(config, 1)[0], 1, 0)

    ranks = [rank(num_layers) for num_layers in (0, 2, 4)]
    kept, half, none = (trace.costs[Kind.F, 0, "last"].kept for trace in ranks)
    of_layers = kept - none
    assert of_layers > 0.5 * kept  # what stays are the logits, and integers of the routing
    assert kept - half == pytest.approx(of_layers / 2, rel=0.05)
    peaks = [trace.peak[0] for trace in ranks]
    two_layers = of_layers / 2  # the one in use and the one that is fetched ahead
    assert peaks[1] == pytest.approx(peaks[0] - two_layers, rel=0.1)
    assert peaks[2] == pytest.approx(none + two_layers, rel=0.1)
    assert ranks[0].state == ranks[2].state
    assert ranks[0].traffic == ranks[2].traffic
