"""From a collapsed router back to balance: how long each balancing method takes, and what becomes of the loss.

    python benchmarks/balance_from_collapse.py [--data-path PREFIX] [--tokenizer-model FILE]

Every run starts from the same weights, in which all tokens go to expert 0 of every MoE layer:

    norm before the router   bias = 1 1 1 ...               its output without bias has the mean 0 (LayerNorm), so
    router, row of expert 0  lead / D of 1 1 1 ...          logit 0 is --lead for every token, the others' about 0

Without balancing nothing brings the other experts back: they get no token, so no gradient makes them better. Prints a
table in Markdown and draws the load of the busiest expert over the steps. Load is that of the busiest expert over
the mean, of the last ten steps together, in the worst layer; at the end: the mean over the last 50 steps.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from megatron_moe.config import check, normalise
from megatron_moe.config.schema import Config
from megatron_moe.data.batch import CollateOptions
from megatron_moe.data.build import build_datasets
from megatron_moe.data.loader import StepLoader
from megatron_moe.data.tokenizer import build_tokenizer
from megatron_moe.model.block import Block
from megatron_moe.optim.learning_rate import LearningRate
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training import registries
from megatron_moe.training.build import Machine, build_machine
from megatron_moe.training.shrink import vary
from megatron_moe.training.statistics import collect
from megatron_moe.training.step import train_step

NUM_DEVICES, BALANCED, WINDOW = 4, 1.3, 10
BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "normalization": "LayerNorm",
    "num_attention_heads": 4,
    "num_experts": 8,
    "moe_layer_freq": "1",
    "moe_ffn_hidden_size": 64,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_router_init_std": 0.1,
    "moe_router_load_balancing_type": ("none",),
    "seq_length": 128,
    "micro_batch_size": 8,
    "global_batch_size": 8,
    "weight_decay": 0.0,
    "lr": 1e-3,
}


def _loss(name: str, coefficient: float, **others: Any) -> dict[str, Any]:
    return {"moe_router_load_balancing_type": (name,), "moe_aux_loss_coeff": (coefficient,), **others}


METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "aux_loss": _loss("aux_loss", 0.05, moe_group_size="1024"),  # the batch; a sequence is seq_aux_loss
    "gshard": _loss("gshard", 3.2, moe_group_size="1024"),  # E squared times as much, see docs/routing.md
    "seq_aux_loss": _loss("seq_aux_loss", 0.05),
    "global_aux_loss": _loss("global_aux_loss", 0.05),
    "deepseek_device": _loss("deepseek_device", 0.05, moe_router_num_groups=NUM_DEVICES),
    "expert bias": {
        "moe_router_topk": 2,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.005,
    },
    "expert_choice": {
        "moe_router": "expert_choice",
        "moe_router_pre_softmax": False,
        "moe_allow_acausal_routing": True,
    },
    "sinkhorn": {"moe_router": "sinkhorn", "moe_router_pre_softmax": False},
}
BY_DEVICE = frozenset({"deepseek_device"})  # these balance devices, and leave the experts of one to themselves


@dataclass(frozen=True)
class Outcome:
    """Loads of experts (or devices) [steps, layers, X] and losses of a run."""

    loads_SLX: Tensor
    losses: list[float]

    def imbalance(self, window: int) -> list[float]:
        """After each step, busiest over mean load of the last ``window`` steps; the largest of all layers."""
        sums_SLX = self.loads_SLX.cumsum(0)
        sums_SLX[window:] -= sums_SLX[:-window].clone()
        return (sums_SLX.amax(2) / sums_SLX.mean(2)).amax(1).tolist()

    def steps_until_balanced(self) -> int | None:
        """The first step after which the last WINDOW steps were balanced; None if there is none."""
        found = self.imbalance(WINDOW)
        return next((step for step in range(WINDOW, len(found) + 1) if found[step - 1] < BALANCED), None)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@torch.no_grad()
def collapse(machine: Machine, lead: float) -> None:
    """Send every token to expert 0 of every layer: its logit is ``lead``, the others' about 0."""
    for block in machine.stages[0].module.modules():
        if isinstance(block, Block) and block.moe is not None:
            assert block.feed_forward_norm.bias is not None
            block.feed_forward_norm.bias.fill_(1.0)
            block.moe.gate.weight[0] = lead / machine.config.model.hidden_size


def run(method: str, config: Config, eod_id: int, steps: int, lead: float) -> Outcome:
    """Train from the collapse with one balancing method."""
    assert config.model.vocab_size is not None and config.training.global_batch_size is not None
    machine = build_machine(config, ParallelContext.single())
    collapse(machine, lead)
    data, batch = config.data, config.training.global_batch_size
    source = build_datasets(data, seed=config.training.seed, vocab_size=config.model.vocab_size).train
    loader = StepLoader(
        source,
        CollateOptions(config.model.vocab_size, eod_id, False, False, False),
        batch_size_at=lambda _: batch,
        micro_batch_size=config.training.micro_batch_size,
        dp_rank=0,
        dp_size=1,
        num_workers=0,
    )
    rate = LearningRate.of(config.optim, steps * batch, batch)
    loads, losses = [], []
    for iteration, batches in zip(range(1, steps + 1), loader.steps(0), strict=False):
        losses.append(train_step(machine, batches, iteration, rate.at(iteration * batch)).loss)
        loads.append(collect(machine).chosen_LE.double())
    loads_SLE = torch.stack(loads)
    by_device = method in BY_DEVICE
    return Outcome(loads_SLE.unflatten(2, (NUM_DEVICES, -1)).sum(3) if by_device else loads_SLE, losses)


def table(outcomes: dict[str, Outcome]) -> str:
    """One row a method, in Markdown."""
    lines = [
        f"| method | load at first | steps until < {BALANCED} | load at the end | in single steps | loss at the end |",
        "|---|---|---|---|---|---|",
    ]
    for name, outcome in outcomes.items():
        shown, reached = name + " (devices)" * (name in BY_DEVICE), outcome.steps_until_balanced() or "never"
        single, last = outcome.imbalance(1), _mean(outcome.imbalance(WINDOW)[-5 * WINDOW :])
        ends = f"{last:.2f} | {_mean(single[-5 * WINDOW :]):.2f} | {_mean(outcome.losses[-5 * WINDOW :]):.3f}"
        lines.append(f"| {shown} | {single[0]:.2f} | {reached} | {ends} |")
    return "\n".join(lines)


def draw(outcomes: dict[str, Outcome], path: Path) -> None:
    """Busiest over mean and loss over the steps, every method a line."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for number, (name, outcome) in enumerate(outcomes.items()):
        style: dict[str, Any] = {"color": f"C{number}", "linewidth": 1.4, "label": name}
        left.plot(range(1, len(outcome.losses) + 1), outcome.imbalance(WINDOW), **style)
        smooth = [_mean(outcome.losses[max(0, i - WINDOW) : i + 1]) for i in range(len(outcome.losses))]
        right.plot(range(1, len(smooth) + 1), smooth, **style)
    left.axhline(BALANCED, color="grey", linestyle=":", linewidth=1)
    left.set(title=f"busiest over mean load of {WINDOW} steps", xlabel="step", yscale="log")
    left.set_yticks([1, 1.3, 2, 4, 8], ["1", "1.3", "2", "4", "8"])
    left.minorticks_off()
    right.set(title=f"loss, mean of {WINDOW} steps", xlabel="step")
    right.legend(frameon=False, fontsize=8, ncols=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-path", default="data/quickstart/tokens", help="prefix of the .bin/.idx pair")
    parser.add_argument("--tokenizer-type", default="SentencePieceTokenizer")
    parser.add_argument("--tokenizer-model", default="data/quickstart/tokenizer.model")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each run")
    parser.add_argument("--lead", type=float, default=6.0, help="logit of expert 0 above the others at first")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument(
        "--output", type=Path, default=Path("docs/images/balance_from_collapse.png"), help="the picture"
    )
    arguments = parser.parse_args(argv)
    model = None if arguments.tokenizer_type == "ByteTokenizer" else arguments.tokenizer_model
    tokenizer = build_tokenizer(arguments.tokenizer_type, model)
    base = vary(
        Config(),
        **BASE,
        data_path=(arguments.data_path,),
        tokenizer_type=arguments.tokenizer_type,
        tokenizer_model=model,
        vocab_size=tokenizer.vocab_size,
        train_iters=arguments.steps,
    )
    outcomes = {}
    for method in arguments.methods:
        config, _ = normalise(vary(base, **METHODS[method]), 1)
        problems = check(config, 1, registries.CHOICES, registries.RULES)
        if problems:
            raise SystemExit("\n".join(problems))
        started = time.monotonic()
        outcomes[method] = run(method, config, tokenizer.eod_id, arguments.steps, arguments.lead)
        print(f"{method}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    print(table(outcomes))
    draw(outcomes, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
