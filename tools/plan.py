"""Plans a run before it is paid for: memory, traffic and time of a layout at any world size, on one CPU process.

python tools/plan.py show --config configs/models/mixtral-8x7b.yaml --config configs/parallel/mixtral-8x7b-64.yaml \\
    --world-size 64 --cluster configs/clusters/h100-sxm.yaml --png plan.png
python tools/plan.py search --model configs/models/mixtral-8x7b.yaml --gpus 64 \\
    --cluster configs/clusters/h100-sxm.yaml --output found.yaml

Other flags are those of pretrain_moe.py and override the files.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_moe.config import ConfigError
from megatron_moe.plan.cluster import read_cluster
from megatron_moe.plan.configure import configured
from megatron_moe.plan.estimate import estimate
from megatron_moe.plan.main import make_plan, memory_problem
from megatron_moe.plan.report import as_json, as_text, draw
from megatron_moe.plan.search import as_yaml, search, table

EXIT_USER_ERROR = 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="what one layout costs")
    show.add_argument("--world-size", type=int, required=True, help="number of ranks")
    show.add_argument("--cluster", help="cluster file, for the time (configs/clusters)")
    show.add_argument("--skew", type=float, default=1.0, help="load of the busiest expert over the mean (default 1)")
    show.add_argument("--json", metavar="FILE", help="write all numbers here; - for the terminal")
    show.add_argument("--png", metavar="FILE", help="draw memory of the stages and parts of the time here")
    find = commands.add_parser("search", help="the best layouts for so many devices")
    find.add_argument("--model", action="append", required=True, help="YAML file of the model; may be repeated")
    find.add_argument("--cluster", required=True, help="cluster file (configs/clusters)")
    find.add_argument("--gpus", type=int, required=True, help="number of ranks")
    find.add_argument("--best", type=int, default=10, help="how many to show (default 10)")
    find.add_argument("--output", metavar="FILE", help="write the best layout here, as YAML")
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit status 0 if a plan was made that fits; 2 if the input is wrong or nothing fits."""
    arguments, rest = build_parser().parse_known_args(argv)
    try:
        return _show(arguments, rest) if arguments.command == "show" else _search(arguments, rest)
    except (ConfigError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def _show(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    cluster = read_cluster(arguments.cluster) if arguments.cluster else None
    plan = make_plan(configured(rest, arguments.world_size), arguments.world_size, arguments.skew)
    time = estimate(plan, cluster) if cluster is not None else None
    if arguments.json:
        text = json.dumps(as_json(plan, cluster, time), indent=1)
        print(text) if arguments.json == "-" else Path(arguments.json).write_text(text + "\n")
    if arguments.json != "-":
        print(as_text(plan, cluster, time), end="")
    if arguments.png:
        draw(plan, cluster, time, arguments.png)
    problem = memory_problem(plan, cluster) if cluster is not None else None
    if problem is not None:
        print(f"error: this does not fit: {problem}", file=sys.stderr)
        return EXIT_USER_ERROR
    return 0


def _search(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    cluster = read_cluster(arguments.cluster)
    files = [word for path in arguments.model for word in ("--config", path)]
    found = search([*files, *rest], arguments.gpus, cluster, arguments.best)
    print(table(found), end="")
    if arguments.output:
        Path(arguments.output).write_text(as_yaml(found[0], cluster))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
