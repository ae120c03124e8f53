"""The parts of an MoE layer, each alone: route, permute, expert products, combine; forward and backward.

    python benchmarks/bench_moe_layer.py                        # E 64, k 6, h 1024, f 512, T 8192
    python benchmarks/bench_moe_layer.py --sweep                # E 8 to 256, k 1 to 8, balanced and skewed
    python benchmarks/bench_moe_layer.py --einsum               # also GShard's dense one-hot form
    torchrun --nproc-per-node 2 benchmarks/bench_moe_layer.py   # experts shared out: dispatch and combine travel

``overhead`` is all that is not an expert product over the expert products. GShard's einsums move tokens by products
with one-hot tensors [groups, tokens, experts, slots] (arXiv:2006.16668, Algorithm 2), here in groups of 1,024 tokens
with room for the fullest expert; ``einsum`` compares its dispatch and combine with ours.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measure import machine, markdown
from torch import Tensor

from megatron_moe.config.schema import ModelConfig, MoEConfig
from megatron_moe.moe.layer import MoELayer
from megatron_moe.moe.reference import combine_tensor
from megatron_moe.moe.routing import Choice, flatten
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.parallel.sharding import initialise, name_parameters
from megatron_moe.parallel.tokens import SequenceLayout, StepInfo, TokenBatch
from megatron_moe.training.memory import keep_freed_memory


class Shape(NamedTuple):
    """Sizes of a layer and its tokens; ``skew`` is the load of expert 0 over the mean load."""

    experts: int = 64
    topk: int = 6
    hidden: int = 1024
    width: int = 512
    tokens: int = 8192
    skew: float = 1.0


def build(shape: Shape, ctx: ParallelContext) -> tuple[MoELayer, Tensor, TokenBatch]:
    """A layer with random weights and a micro-batch of one sequence for it."""
    model = ModelConfig(num_layers=1, hidden_size=shape.hidden, num_attention_heads=1)
    moe = MoEConfig(
        num_experts=shape.experts,
        moe_router_topk=shape.topk,
        moe_ffn_hidden_size=shape.width,
        moe_router_load_balancing_type=("aux_loss",),
        moe_aux_loss_coeff=(0.01,),
    )
    if shape.skew > 1:
        moe = replace(moe, moe_router="force_skewed", moe_router_force_skew=shape.skew)
    layer = MoELayer(model, moe, 0, ctx, torch.float32, output_std=0.02)
    name_parameters(layer)
    initialise(layer, ctx, seed=1)
    ids_SB = torch.zeros(shape.tokens, 1, dtype=torch.int64)
    tokens = TokenBatch(
        ids_SB=ids_SB,
        labels_SB=ids_SB,
        loss_mask_SB=torch.ones_like(ids_SB, dtype=torch.bool),
        positions_SB=torch.arange(shape.tokens).unsqueeze(1),
        documents_SB=None,
        padding_SB=None,
        sample_ids_B=torch.zeros(1, dtype=torch.int64),
        microbatch=0,
        layout=SequenceLayout(shape.tokens, ctx, False),
        step=StepInfo(1, 1, True, float(shape.tokens), float(shape.tokens)),
    )
    generator = torch.Generator().manual_seed(ctx.rank)
    return layer, torch.randn(shape.tokens, 1, shape.hidden, generator=generator).requires_grad_(), tokens


def timed(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds."""
    run()
    times = []
    for _ in range(repeats):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def both_ways(make: Callable[[], Tensor], repeats: int) -> float:
    """Seconds of a part's forward and backward pass; its inputs must be leaves, its output's gradient is random."""
    grad = torch.randn_like(make())
    return timed(lambda: make().backward(grad), repeats)


def parts(shape: Shape, ctx: ParallelContext, repeats: int) -> dict[str, float]:
    """Seconds of each part, forward and backward."""
    layer, x_SBD, tokens = build(shape, ctx)
    x_TD = x_SBD.detach().flatten(0, 1).requires_grad_()
    choice, _ = layer.gate(x_SBD, tokens)
    routing = flatten(choice, False)
    routing = routing._replace(weights_N=routing.weights_N.detach().requires_grad_())
    there = layer.dispatcher.dispatch(x_TD, routing)()
    rows_RD, weights_R = (t.detach().requires_grad_() for t in (there.rows_RD, there.weights_R))

    def route() -> Tensor:
        made, loss = layer.gate(x_SBD, tokens)
        return made.weights_GTK if loss is None else made.weights_GTK + loss

    return {
        "route": both_ways(route, repeats),
        "permute": both_ways(lambda: layer.dispatcher.dispatch(x_TD, routing)().rows_RD, repeats),
        "experts": both_ways(lambda: layer.experts(rows_RD, weights_R, there.counts_L), repeats),
        "combine": both_ways(lambda: layer.dispatcher.combine(rows_RD, there)(), repeats),
        "layer": both_ways(lambda: layer(x_SBD, tokens), repeats),
    }


def einsum_seconds(shape: Shape, repeats: int, group: int = 1024) -> float:
    """Seconds of GShard's dispatch and combine einsums, forward and backward, without the experts."""
    layer, x_SBD, tokens = build(shape, ParallelContext.single())
    choice: Choice = layer.gate(x_SBD, tokens)[0]
    grouped = Choice(*(None if t is None else t.detach().unflatten(1, (-1, group)).flatten(0, 1) for t in choice))
    counts = torch.zeros(len(grouped.expert_ids_GTK), shape.experts, dtype=torch.int64)
    ids_GN = grouped.expert_ids_GTK.flatten(1)
    slots = int(counts.scatter_add_(1, ids_GN, torch.ones_like(ids_GN)).max())
    combine_GTEC, dispatch_GTEC = combine_tensor(grouped, slots)
    x_GTD = x_SBD.detach().view(-1, group, shape.hidden).requires_grad_()
    combine_GTEC.requires_grad_()

    def there_and_back() -> Tensor:
        rows_EGCD = torch.einsum("gtec,gtd->egcd", dispatch_GTEC, x_GTD)
        return torch.einsum("gtec,egcd->gtd", combine_GTEC, rows_EGCD)

    return both_ways(there_and_back, repeats)


def row(shape: Shape, ctx: ParallelContext, repeats: int, einsum: bool) -> dict[str, Any]:
    """One line of the table: milliseconds, and ratios to the expert products."""
    seconds = parts(shape, ctx, repeats)
    moving = seconds["permute"] + seconds["combine"]
    rows = shape.tokens * shape.topk
    found: dict[str, Any] = dict(zip(("E", "k", "h", "f", "T", "skew"), shape, strict=True))
    found |= {name: f"{value * 1e3:.1f}" for name, value in seconds.items()}
    found["overhead"] = f"{(seconds['route'] + moving) / seconds['experts']:.3f}"
    found["GFLOP/s"] = f"{3 * 2 * rows * 3 * shape.hidden * shape.width / seconds['experts'] / 1e9:.0f}"
    if einsum:
        found["einsum"] = f"{einsum_seconds(shape, 1) / moving:.1f} x"
    return found


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in Shape()._asdict().items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--einsum", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args(argv)
    keep_freed_memory()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(arguments.threads or max(1, 2 // world))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    ctx = ParallelContext.create(MeshSizes(dp=world, ep=world), rank=rank, device="cpu")
    given = Shape(*(getattr(arguments, name) for name in Shape._fields))
    shapes = [given]
    if arguments.sweep:
        shapes = [given._replace(experts=e, topk=k, tokens=2048) for e in (8, 64, 256) for k in (1, 2, 8)]
        shapes += [s._replace(skew=min(4.0, s.experts / s.topk)) for s in shapes if s.topk == 2]
    rows = [row(shape, ctx, arguments.repeats, arguments.einsum and world == 1) for shape in shapes]
    if rank == 0:
        print(markdown(rows))
        print(json.dumps({"what": "moe-layer", "unit": "milliseconds", "rows": rows, **machine()}))
    if world > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
