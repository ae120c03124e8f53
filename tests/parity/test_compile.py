"""--torch-compile: the same mathematics, in graphs that nothing breaks and layers share.

Kernels of inductor take too long to build for this suite; what is captured, and what the backward pass keeps, is the
same with aot_eager.
"""

from typing import Any

import pytest

from megatron_moe.config import normalise
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training.build import build_machine
from megatron_moe.training.step import StepResult, train_step
from tests.helpers.ranks import RankPool
from tests.parity.harness import BASE, batches, differences, layout, trace, vary

PARTS: dict[str, Any] = {"moe_first_dense_layers": 1, "activation": "geglu", "qk_layernorm": True}


def test_same_curve_with_all_that_touches_saved_tensors(ranks: RankPool) -> None:
    values, world_size = layout("tp=2,ep=2,mbs=4")
    others = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "core_attn")}
    found = trace(vary(BASE, **PARTS, **others, **values, torch_compile="aot_eager"), world_size, ranks)
    assert differences(found, trace(vary(BASE, **PARTS), 1, ranks)) == []


def test_same_step_in_one_process_with_few_graphs_and_no_break() -> None:
    from torch._dynamo.utils import counters

    def step(**others: Any) -> StepResult:
        config, _ = normalise(vary(BASE, **PARTS, **others), 1)
        return train_step(
            build_machine(config, ParallelContext.single()), batches(config, 0, 0, 1, padded=False), 1, 1e-2
        )

    expected = step()
    counters.clear()
    found = step(torch_compile="aot_eager", cpu_offloading_num_layers=2, min_offloaded_tensor_size=1)
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
    assert not counters["graph_break"]
    # Of four layers, one of them dense: norms of rows, of queries and keys; rotary; the activation.
    assert 3 <= counters["stats"]["unique_graphs"] <= 6


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = normalise(vary(BASE, torch_compile="inductor"), 1)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match=r"--torch-compile inductor needs a C\+\+ compiler.* install one"):
        build_machine(config, ParallelContext.single())
