"""The truth of a dry run: what it counts on one process is what every rank of a real run counts, byte for byte.

A short part of `python -m tests.parity dry_run`, on shorter sequences.
"""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.plan.rank import trace_rank
from megatron_moe.training.build import build_machine
from megatron_moe.training.step import train_step
from tests.helpers.ranks import RankPool
from tests.parity.dry_runs import LAYOUTS, differences, quickstart
from tests.parity.harness import batches

SHORT = {"seq_length": 32, "global_batch_size": 8, "vocab_size": 512}
SUITE = {  # every axis, collective and way of sharing weights, and the layouts of the list with a feature more
    "dp=4,ep=2,zero=3": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "cp=2,dp=1,ep=2,cp_comm=p2p": {"recompute_granularity": "full"},
    "tp=2,dp=4,ep=4,etp=2,overlap=2,deduplicate=1": {"num_layers": 2},
    "pp=2,dp=2,ep=2,schedule=zb-h1,zero=2": {"moe_router": "force_skewed", "moe_router_force_skew": 2.0},
    "pp=2,tp=2,ep=2,schedule=dualpipe-v": {"moe_router_enable_expert_bias": True},
    "tp=2,cp=2,dp=2,ep=4,etp=2,dispatcher=allgather": {
        "recompute_granularity": "selective",
        "recompute_modules": ("moe", "core_attn", "layernorm"),
    },
}


@pytest.mark.parametrize("text", SUITE)
def test_a_dry_rank_counts_what_a_real_one_counts(text: str, ranks: RankPool) -> None:
    assert text in LAYOUTS
    config, world_size = quickstart(text, **SHORT, **SUITE[text])
    assert differences(config, world_size, ranks, compared={0, world_size - 1}) == []


@pytest.mark.parametrize("feature, params_dtype", [("full", "float32"), ("selective", "bfloat16")])
def test_the_peak_is_what_the_allocator_hands_out(feature: str, params_dtype: str) -> None:
    """By torch's profiler, which sees every allocation and shares nothing with the dry run."""
    modules = ("moe", "core_attn", "layernorm") if feature == "selective" else ()
    others = {"recompute_granularity": feature, "recompute_modules": modules, "params_dtype": params_dtype}
    if params_dtype == "bfloat16":  # wider products of bfloat16 have room of their own inside a CPU's kernels
        others |= {"hidden_size": 128, "seq_length": 64, "moe_ffn_hidden_size": 16, "ffn_hidden_size": 48}
    config, _ = quickstart("dp=1", **(SHORT | others))
    machine = build_machine(config, ParallelContext.single())
    data = batches(config, 0, 0, 1, padded=False)
    train_step(machine, data, 1, 1e-3)
    run, peaks = machine.runtime.run, []

    def profiled(*arguments: Any) -> torch.Tensor:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = run(*arguments)
        now = peak = 0
        assert profiler.profiler is not None
        for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
            now += event.nbytes() if event.name() == "[memory]" else 0
            peak = max(peak, now)
        peaks.append(peak)
        return result

    machine.runtime.run = profiled  # type: ignore[method-assign]
    train_step(machine, data, 2, 1e-3)
    assert trace_rank(config, 1, 0).peak[0] == pytest.approx(peaks[0], rel=0.05)
