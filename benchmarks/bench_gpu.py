"""One GPU: training steps of two model slices, MFU by module, in bfloat16 and FP8; fused kernels, grouped product.

    bash benchmarks/run_gpu.sh                                                  everything, under ten minutes
    python benchmarks/bench_gpu.py --parts kernels products                     some of it
    TRITON_INTERPRET=1 python benchmarks/bench_gpu.py --device cpu --tiny       that it runs, where there is no GPU

    steps      whole steps of a Mixtral-8x7B-like and a Qwen3-30B-A3B-like slice (few layers, bfloat16 and FP8, AdamW)
    modules    attention, MoE layer, routed experts and output layer alone, forward and backward
    kernels    Triton against PyTorch: largest difference, and bytes that must move over time
    products   the experts' three products: torch's grouped one against a loop over experts

Prints tables and, with --json, writes all figures. MFU counts model FLOPs (two per multiply-add, attention causal, no
recomputation) against the peak of training/utilization.py.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_step import random_batches
from measure import machine, markdown
from torch import Tensor

from megatron_moe.config.schema import Config
from megatron_moe.kernels import grouped
from megatron_moe.kernels.scoring import ScoringRule, score_topk
from megatron_moe.kernels.selection import choose, choose_fp8, functions, missing
from megatron_moe.kernels.swiglu import swiglu
from megatron_moe.model.flops import ForwardFlops, training_flops_per_token
from megatron_moe.moe.permute import Copies, add_rows, copy_rows
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.plan.configure import configured
from megatron_moe.training.build import Machine, build_machine
from megatron_moe.training.step import token_batches, train_step
from megatron_moe.training.utilization import device_peak_tflops

REPO = Path(__file__).resolve().parents[1]
PARTS = ("steps", "modules", "kernels", "products")


@dataclass(frozen=True)
class Setup:
    """Where and how large."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool
    kernels: str
    repeats: int


FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
SLICES = {  # preset, what is changed
    "mixtral-8x7b": ("mixtral-8x7b", ["--num-layers", "2"]),
    "mixtral-8x7b, FP8": ("mixtral-8x7b", ["--num-layers", "2", *FP8]),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", ["--num-layers", "4", "--moe-layer-freq", "1"]),
    "qwen3-30b-a3b, FP8": ("qwen3-30b-a3b", ["--num-layers", "4", "--moe-layer-freq", "1", *FP8]),
}
TINY = {
    "--hidden-size": 64,
    "--num-attention-heads": 4,
    "--num-query-groups": 2,
    "--kv-channels": 16,
    "--moe-ffn-hidden-size": 32,
    "--num-experts": 8,
    "--vocab-size": 128,
    "--seq-length": 32,
}


def seconds(setup: Setup, run: Callable[[], Any]) -> float:
    """Median time of a call, the device waited for."""
    for _ in range(1 if setup.tiny else 3):
        run()
    times = []
    for _ in range(setup.repeats):
        wait(setup.device)
        start = time.perf_counter()
        run()
        wait(setup.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    """Until the device has done all."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slice_config(name: str, setup: Setup) -> Config:
    """A few layers of a model of configs/models."""
    preset, changes = SLICES[name]
    flags = ["--config", str(REPO / "configs" / "models" / f"{preset}.yaml"), *changes, "--kernels", setup.kernels]
    flags += ["--params-dtype", str(setup.dtype).removeprefix("torch."), "--micro-batch-size", "1"]
    return configured(flags + [str(word) for pair in TINY.items() for word in pair] * setup.tiny, 1)


def slices(setup: Setup) -> Iterator[tuple[str, Machine]]:
    """The machines one after the other; each is gone before the next is built."""
    for name in SLICES:
        yield name, build_machine(slice_config(name, setup), ParallelContext.single(setup.device))


def mfu(flops: float, time_s: float, peak: float | None) -> str:
    """Share of the peak, or a dash where no peak is known."""
    return f"{flops / time_s / (peak * 1e12):.3f}" if peak else "-"


def step_rows(setup: Setup, peak: float | None) -> list[dict[str, Any]]:
    """Whole steps."""
    return [step_row(name, here, setup, peak) for name, here in slices(setup)]


def step_row(name: str, here: Machine, setup: Setup, peak: float | None) -> dict[str, Any]:
    """Time, rate, MFU and memory of the steps of a slice."""
    batches, count = random_batches(here.config, 0, 1, 0), iter(range(1, 1 << 30))
    if setup.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    time_s = seconds(setup, lambda: train_step(here, batches, next(count), 1e-5))
    tokens = here.config.data.seq_length
    memory = torch.cuda.max_memory_allocated() / 2**30 if setup.device.type == "cuda" else 0.0
    return {
        "slice": name,
        "layers": here.config.model.num_layers,
        "step ms": f"{1e3 * time_s:.1f}",
        "tokens/s": round(tokens / time_s),
        "MFU": mfu(training_flops_per_token(here.config) * tokens, time_s, peak),
        "peak GiB": f"{memory:.1f}",
    }


def module_rows(setup: Setup, peak: float | None) -> list[dict[str, Any]]:
    """Parts of one layer, and the output layer, forward and backward, each alone."""
    rows = []
    for name, here in slices(setup):
        here.stages[0].reducer.begin_step(1)
        num_tokens = here.config.data.seq_length
        for part, (flops_per_token, forward) in modules(here, setup).items():
            time_s = seconds(setup, partial(forward_and_backward, forward))
            rate = mfu(3 * flops_per_token * num_tokens, time_s, peak)
            rows.append({"slice": name, "module": part, "ms": f"{1e3 * time_s:.2f}", "MFU": rate})
    return rows


def modules(here: Machine, setup: Setup) -> dict[str, tuple[float, Callable[[], Tensor]]]:
    """(forward FLOPs per token, forward pass) of each part."""
    config, decoder = here.config, here.stages[0].module
    model, moe = config.model, config.moe
    tokens = token_batches(random_batches(config, 0, 1, 0), here, 1, training=True)[0]
    num_tokens, hidden, num_experts = config.data.seq_length, model.hidden_size, moe.num_experts or 1
    num_rows = num_tokens * moe.moe_router_topk
    like = {"dtype": setup.dtype, "device": setup.device, "requires_grad": True}
    x_SBD, rows_RD = torch.randn(num_tokens, 1, hidden, **like), torch.randn(num_rows, hidden, **like)
    counts_L = torch.full((num_experts,), num_rows // num_experts, device=setup.device)
    weights_R = torch.rand(num_rows, device=setup.device)
    flops, block = ForwardFlops.of(config), decoder.layers["0"]
    experts = 6.0 * hidden * (moe.moe_ffn_hidden_size or model.dense_ffn_size) * moe.moe_router_topk
    routed = experts + 2.0 * hidden * num_experts
    return {
        "attention": (flops.layers[0] - routed, lambda: block.attention(x_SBD, tokens)),
        "MoE layer": (routed, lambda: block.moe(x_SBD, tokens)),
        "routed experts": (experts, lambda: block.moe.experts(rows_RD, weights_R, counts_L)),
        "output layer": (flops.head, lambda: decoder.output(x_SBD)),
    }


def forward_and_backward(forward: Callable[[], Tensor]) -> None:
    """With a gradient of one everywhere."""
    y = forward()
    y.backward(torch.ones_like(y))


def kernel_rows(setup: Setup) -> list[dict[str, Any]]:
    """Each fused operation by PyTorch and by Triton: difference of outputs and gradients, GB/s of what must move."""
    problem = missing("triton", setup.device.type)
    if problem is not None:
        return [{"kernel": "all", "result": problem}]
    rows = []
    for name, (num_bytes, leaves, run) in kernel_cases(setup).items():
        found = {kernels: outputs_and_gradients(run, leaves, kernels) for kernels in ("torch", "triton")}
        times = {name: seconds(setup, partial(outputs_and_gradients, run, leaves, name)) for name in found}
        worst = max(relative(a, b) for a, b in zip(found["triton"], found["torch"], strict=True))
        rows.append(
            {
                "kernel": name,
                "difference": f"{worst:.1e}",
                **{f"{kernels} us": f"{1e6 * time_s:.0f}" for kernels, time_s in times.items()},
                "triton GB/s": f"{num_bytes / times['triton'] / 1e9:.0f}",
                "ratio": f"{times['torch'] / times['triton']:.2f}",
            }
        )
    return rows


Case = tuple[int, list[Tensor], Callable[..., Sequence[Tensor]]]


def kernel_cases(setup: Setup) -> dict[str, Case]:
    """(bytes that forward and backward must move, differentiable inputs, function of inputs and kernels' name)."""
    tokens, hidden, width, vocab, experts, slots = (8192, 2048, 768, 32768, 128, 8)
    if setup.tiny:
        tokens, hidden, width, vocab, experts, slots = (6, 8, 8, 16, 4, 2)
    rows = tokens * slots

    def random(*shape: int, dtype: torch.dtype = setup.dtype) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=setup.device)

    rule = ScoringRule(slots, sigmoid=False, normalised=True, scale=1.0)
    ids_R = torch.randint(tokens, (rows,), device=setup.device)
    labels_N = torch.randint(vocab, (tokens,), device=setup.device)
    item = setup.dtype.itemsize

    def score(logits_TE: Tensor, kernels: str) -> list[Tensor]:
        scored = score_topk(logits_TE, None, rule, kernels=kernels)
        return [scored.weights_TK, scored.scores_TE]

    def cross_entropy(logits_NV: Tensor, kernels: str) -> list[Tensor]:
        module = functions("cross_entropy", kernels)
        kept_NV, peak_N, sum_N, label_N = module.shard_statistics(logits_NV.detach().clone(), labels_N, vocab)
        ones_N = torch.ones_like(sum_N)
        grad_NV = module.shard_gradient(kept_NV, labels_N, vocab, peak_N, 1 / sum_N, ones_N, logits_NV.dtype)
        return [peak_N + sum_N.log() - label_N, grad_NV]

    copied = (rows + tokens) * hidden * item
    return {
        "scoring": (4 * 5 * tokens * experts, [random(tokens, experts, dtype=torch.float32)], score),
        "permute": (2 * copied, [random(tokens, hidden)], lambda x, k: [copy_rows(x, Copies.of(ids_R, tokens, k))]),
        "unpermute": (2 * copied, [random(rows, hidden)], lambda y, k: [add_rows(y, Copies.of(ids_R, tokens, k))]),
        "biases of experts, weighed": (
            3 * rows * hidden * item,
            [random(experts, hidden), random(rows)],
            lambda x, weights, k: [copy_rows(x, Copies.of(ids_R % experts, experts, k), weights)],
        ),
        "SwiGLU, weighed": (
            8 * rows * width * item,
            [random(rows, 2, width), random(rows, 1)],
            lambda x, weights, k: [swiglu(x, weights, k)],
        ),
        "cross-entropy": (5 * tokens * vocab * item, [random(tokens, vocab)], cross_entropy),
    }


def outputs_and_gradients(run: Callable[..., Sequence[Tensor]], leaves: list[Tensor], kernels: str) -> list[Tensor]:
    """Of gradients that are random, the same at every call."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    outputs = run(*leaves, kernels)
    differentiable = [y for y in outputs if y.requires_grad]
    if differentiable:
        generator = torch.Generator(differentiable[0].device).manual_seed(1)
        grads = [torch.randn(y.shape, generator=generator, dtype=y.dtype, device=y.device) for y in differentiable]
        torch.autograd.backward(differentiable, grads)
    return [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest number."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))


def product_rows(setup: Setup) -> list[dict[str, Any]]:
    """The grouped product and the loop, at the expert shapes of the slices; balanced, and half of the rows to one."""
    shapes = {"mixtral-8x7b": (8, 4096, 14336, 8192), "qwen3-30b-a3b": (128, 2048, 768, 32768)}
    if setup.tiny:
        shapes = {"tiny": (4, 16, 32, 64)}
    rows = []
    for name, (experts, hidden, width, num_rows) in shapes.items():
        x_RD = torch.randn(num_rows, hidden, dtype=setup.dtype, device=setup.device)
        weight_LFD = torch.randn(experts, 2 * width, hidden, dtype=setup.dtype, device=setup.device) / hidden**0.5
        even_L = torch.full((experts,), num_rows // experts, device=setup.device)
        skewed_L = torch.full((experts,), num_rows // 2 // (experts - 1), device=setup.device)
        skewed_L[0] = num_rows - skewed_L[1:].sum()
        for load, counts_L in (("even", even_L), ("half to one", skewed_L)):
            row: dict[str, Any] = {"shape": name, "load": load}
            for backend in ("loop", "grouped_mm"):
                time_s = seconds(setup, partial(three_products, x_RD, weight_LFD, counts_L, backend))
                row[f"{backend} TFLOP/s"] = f"{12 * num_rows * hidden * width / time_s / 1e12:.4f}"
            rows.append(row)
    return rows


def three_products(x_RD: Tensor, weight_LFD: Tensor, counts_L: Tensor, backend: str) -> None:
    """Forward, gradient of the rows, gradient of the weights."""
    groups = grouped.Groups(counts_L, x_RD.device)
    y_RF = grouped.grouped_product(x_RD, weight_LFD, groups, backend)
    grouped.grouped_product_transposed(y_RF, weight_LFD, groups, backend)
    grouped.add_grouped_outer_product(torch.empty_like(weight_LFD), y_RF, x_RD, groups, backend, 0.0)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--kernels", default="auto", help="of steps and modules, as pretrain_moe.py takes it")
    parser.add_argument("--repeats", type=int, default=10, help="timed calls of which the median counts")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args(argv)
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("error: there is no GPU; try TRITON_INTERPRET=1 ... --device cpu --tiny", file=sys.stderr)
        return 2
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    setup = Setup(device, dtype, arguments.tiny, arguments.kernels, 1 if arguments.tiny else arguments.repeats)
    peak = device_peak_tflops(device, dtype)
    print(choose(setup.kernels, device, dtype).line(), flush=True)
    print(choose_fp8(setup.kernels, "e4m3", device, dtype).line("e4m3", "blockwise"), flush=True)
    made: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "steps": lambda: step_rows(setup, peak),
        "modules": lambda: module_rows(setup, peak),
        "kernels": lambda: kernel_rows(setup),
        "products": lambda: product_rows(setup),
    }
    figures: dict[str, Any] = {"machine": machine(), "peak_tflops": peak, "dtype": str(dtype)}
    for part in arguments.parts:
        figures[part] = made[part]()
        print(f"\n## {part}\n\n{markdown(figures[part])}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
