"""Plans a run before it is paid for: memory, traffic and time of a layout at any world size, on one CPU process.

python tools/plan.py show --config configs/models/mixtral-8x7b.yaml --config configs/parallel/mixtral-8x7b-64.yaml \\
    --world-size 64 --cluster configs/clusters/h100-sxm.yaml --png plan.png
python tools/plan.py search --model configs/models/mixtral-8x7b.yaml --gpus 64 \\
    --cluster configs/clusters/h100-sxm.yaml --output found.yaml
python tools/plan.py published

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
from megatron_moe.plan.found import as_yaml, difference, table
from megatron_moe.plan.main import make_plan, memory_problem
from megatron_moe.plan.published import as_markdown, compare, read_rows
from megatron_moe.plan.report import as_json, as_text, draw
from megatron_moe.plan.search import search

EXIT_USER_ERROR = 2
CONFIGS = Path(__file__).parents[1] / "configs"


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
    find.add_argument("--cluster", required=True, help="cluster file, or the name of one in configs/clusters")
    find.add_argument("--gpus", type=int, required=True, help="number of ranks")
    find.add_argument("--best", type=int, default=10, help="how many to show (default 10)")
    find.add_argument("--beside", metavar="FILE", help="YAML file of a layout to dry-run too, and to compare with")
    find.add_argument("--output", metavar="FILE", help="write the best layout here, as YAML")
    rows = commands.add_parser("published", help="estimates beside published throughputs, as a Markdown table")
    rows.add_argument("--cluster", default=str(CONFIGS / "clusters/h100-sxm.yaml"), help="cluster file")
    rows.add_argument("--rows", default=str(CONFIGS / "published.yaml"), help="what was published")
    return parser


def main(argv: Sequence[str]) -> int:
    """Exit status 0 if a plan was made that fits; 2 if the input is wrong or nothing fits."""
    arguments, rest = build_parser().parse_known_args(argv)
    try:
        if arguments.command == "published":
            return _published(arguments)
        return _show(arguments, rest) if arguments.command == "show" else _search(arguments, rest)
    except (ConfigError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def _cluster_file(name: str) -> str:
    """The file of that path, or of that name among ours."""
    ours = CONFIGS / "clusters" / f"{name}.yaml"
    return str(ours) if ours.exists() and not Path(name).exists() else name


def _show(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    cluster = read_cluster(_cluster_file(arguments.cluster)) if arguments.cluster else None
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


def _published(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    cluster, rows = read_cluster(_cluster_file(arguments.cluster)), read_rows(Path(arguments.rows))
    found = [compare(row, CONFIGS / "models", cluster) for row in tqdm(rows, desc="dry runs", unit="row", leave=False)]
    print(*as_markdown(found), sep="\n")
    return 0


def _search(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    cluster = read_cluster(_cluster_file(arguments.cluster))
    files = [word for path in arguments.model for word in ("--config", path)]
    beside = ["--config", arguments.beside] if arguments.beside else None
    result = search([*files, *rest], arguments.gpus, cluster, arguments.best, beside)
    training = result.base.training
    print(
        f"{result.guessed:,} layouts of {arguments.gpus} ranks fit by a guess; the best by dry runs, with "
        f"--global-batch-size {training.global_batch_size} and --params-dtype {training.params_dtype}:"
    )
    print(table(result), end="")
    if result.beside is not None:
        print(difference(result.found[0], result.beside))
    if arguments.output:
        Path(arguments.output).write_text(as_yaml(result.found[0], cluster))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
