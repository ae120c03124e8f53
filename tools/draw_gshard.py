"""Draws what a device holds and sends when experts grow with devices, as in GShard (arXiv:2006.16668): docs/gshard.md.

python tools/draw_gshard.py docs/images/gshard.png
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_moe.plan.configure import configured
from megatron_moe.plan.dry_run import Plan, dry_run

CONFIGS = Path(__file__).parents[1] / "configs"
EXPERTS = (128, 256, 512, 1024, 2048)


def plan_of(num_experts: int, num_layers: int = 12) -> Plan:
    """GShard's model of so many experts, one of each layer on a device, two sequences of 1,024 tokens a device."""
    model, layout = CONFIGS / "models/gshard-12l-128e-decoder.yaml", CONFIGS / "parallel/gshard-600b-2048.yaml"
    argv = ["--config", str(model), "--config", str(layout), "--num-layers", str(num_layers)]
    argv += ["--num-experts", str(num_experts), "--expert-model-parallel-size", str(num_experts)]
    return dry_run(configured([*argv, "--global-batch-size", str(2 * num_experts)], num_experts), num_experts)


def dispatched(plan: Plan) -> int:
    """Bytes that a device sends in a step to bring tokens to experts and back, forward and backward."""
    return plan.ranks[0].traffic["ep", "all_to_all"][1]


def draw(plans: dict[int, Plan], path: str) -> None:
    """Memory of a device, stacked; bytes of dispatch and combine, of a device and of all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    names = [str(num) for num in plans]
    base = [0.0] * len(names)
    for part in next(iter(plans.values())).memory(0):
        heights = [plan.memory(0)[part] / 1e9 for plan in plans.values()]
        left.bar(names, heights, bottom=base, label=part)
        base = [a + b for a, b in zip(base, heights, strict=True)]
    left.set(xlabel="experts of a layer = devices", ylabel="GB of a device", title="What a device holds")
    left.legend(loc="lower right", fontsize=8)
    right.plot(list(plans), [dispatched(p) * p.sizes.world / 1e9 for p in plans.values()], "o-", label="all devices")
    right.plot(list(plans), [dispatched(plan) / 1e9 for plan in plans.values()], "s-", label="one device")
    right.set(xscale="log", yscale="log", xlabel="experts of a layer = devices", ylabel="GB sent in a step")
    right.set_title("Dispatch and combine")
    right.set_xticks(list(plans), names)
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: Sequence[str]) -> int:
    """Print the numbers as a Markdown table, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("png", help="where to draw")
    arguments = parser.parse_args(argv)
    plans = {num: plan_of(num) for num in EXPERTS}
    print(
        "| experts = devices | parameters | a device's weights, gradients, optimizer | activations | sent by a device |"
    )
    print("|---|---|---|---|---|")
    for num, plan in plans.items():
        memory, state = plan.memory(0), plan.ranks[0].state.total
        active = memory["activations"] + memory["communication"]
        row = f"{plan.num_parameters / 1e9:.1f}B | {state / 1e9:.3f} GB | {active / 1e9:.3f} GB"
        print(f"| {num:,} | {row} | {dispatched(plan) / 1e6:.1f} MB |")
    draw(plans, arguments.png)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
