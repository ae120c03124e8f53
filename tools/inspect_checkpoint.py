"""Looks into checkpoints: lists, verifies, compares, prints. One process, whatever layout wrote them.

    python tools/inspect_checkpoint.py list runs/quickstart
    python tools/inspect_checkpoint.py verify runs/quickstart
    python tools/inspect_checkpoint.py compare runs/a runs/b/iter_0000100
    python tools/inspect_checkpoint.py print runs/quickstart model.layers.0.moe.gate.weight

A folder is one checkpoint (iter_...), or the --save folder of a run: then its latest is meant, and `verify` and `list`
mean all. Exit status 1: something is damaged, or the two differ.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_moe.checkpoint import Checkpoint, CheckpointError, checkpoint_path, find_latest, saved_iterations
from megatron_moe.checkpoint.checksums import damage
from megatron_moe.checkpoint.index import INDEX_FILE
from megatron_moe.checkpoint.offline import read_run


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser(
        "list", help="iterations, when and under which layout they were saved, and their size"
    )
    verify = commands.add_parser("verify", help="compare the checksums of all files")
    compare = commands.add_parser("compare", help="two checkpoints, tensor by tensor, the largest differences first")
    show = commands.add_parser("print", help="one tensor: shape, type, statistics, values")
    for command in (listing, verify, show):
        command.add_argument("folder", type=Path)
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    compare.add_argument("--top", type=int, default=20, help="how many tensors to show (default 20)")
    show.add_argument("name", help="logical name; part of one lists the names that contain it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if args.command == "list":
            return list_checkpoints(args.folder)
        if args.command == "verify":
            return verify_checkpoints(args.folder)
        if args.command == "compare":
            return compare_checkpoints(Checkpoint(one(args.a)), Checkpoint(one(args.b)), args.top)
        return print_tensor(Checkpoint(one(args.folder)), args.name)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2


def several(folder: Path) -> list[Path]:
    """The checkpoint that a folder is, or all that it holds."""
    if (folder / INDEX_FILE).exists():
        return [folder]
    found = [checkpoint_path(folder, iteration) for iteration in saved_iterations(folder)]
    if not found:
        raise CheckpointError(f"{folder} is no checkpoint and holds none.")
    return found


def one(folder: Path) -> Path:
    """The checkpoint that a folder is, or the latest that it holds."""
    if (folder / INDEX_FILE).exists():
        return folder
    iteration = find_latest(folder)
    if iteration is None:
        raise CheckpointError(f"{folder} is no checkpoint and holds none.")
    return checkpoint_path(folder, iteration)


def list_checkpoints(folder: Path) -> int:
    """A line a checkpoint; an arrow at the one that a run would resume from."""
    paths = several(folder)
    latest = paths[0] if paths == [folder] else one(folder)
    print(f"   {'iteration':>9}  {'saved at (UTC)':20}  {'MB':>10}  layout")
    for path in paths:
        run = read_run(path)
        size = sum(file.stat().st_size for file in path.iterdir())
        layout = " ".join(f"{axis} {n}" for axis, n in run["layout"].items() if n > 1) or "one process"
        arrow = "->" if path == latest else "  "
        print(f"{arrow} {run['iteration']:>9}  {run['saved_at']:20}  {size / 1e6:>10.1f}  {layout}")
    return 0


def verify_checkpoints(folder: Path) -> int:
    """A line a checkpoint, and one for each damaged file."""
    found = {path: damage(path) for path in several(folder)}
    for path, problems in found.items():
        print(f"{path}: {'damaged' if problems else 'whole'}")
        for problem in problems:
            print(f"    {problem}")
    return int(any(found.values()))


def compare_checkpoints(a: Checkpoint, b: Checkpoint, top: int) -> int:
    """Names, shapes and types that differ; then values: largest difference, also relative to the largest value."""
    lines = [f"only in {x.path}: {name}" for x, y in ((a, b), (b, a)) for name in sorted(set(x.names) - set(y.names))]
    differences: list[tuple[float, float, str]] = []
    num_equal = 0
    for name in sorted(set(a.names) & set(b.names)):
        if a.describe(name) != b.describe(name):
            lines.append(f"{name}: {_described(a, name)} against {_described(b, name)}")
            continue
        x, y = a.read(name), b.read(name)
        if torch.equal(x.view(torch.uint8), y.view(torch.uint8)) if x.dim() else torch.equal(x, y):
            num_equal += 1
            continue
        x, y = x.double(), y.double()
        largest = float((x - y).abs().nan_to_num(nan=float("inf")).max())
        scale = max(float(x.abs().max()), float(y.abs().max()), sys.float_info.min)
        differences.append((largest / scale, largest, name))
    differences.sort(reverse=True)
    print("\n".join([*lines, f"{num_equal} tensors are equal, bit for bit; {len(differences)} differ."]))
    if differences:
        print(f"{'relative':>10}  {'absolute':>10}  tensor")
    for relative, largest, name in differences[:top]:
        print(f"{relative:>10.3g}  {largest:>10.3g}  {name}")
    return int(bool(lines or differences))


def print_tensor(checkpoint: Checkpoint, name: str) -> int:
    """One tensor, or the names that contain the text."""
    if name not in checkpoint.names:
        near = [other for other in checkpoint.names if name in other]
        if not near:
            raise CheckpointError(f"{checkpoint.path} holds no tensor whose name contains {name!r}.")
        print("\n".join(f"{other}  {_described(checkpoint, other)}" for other in near))
        return 0
    tensor = checkpoint.read(name)
    values = tensor.double()
    print(f"{name}  {_described(checkpoint, name)}")
    print(
        f"mean {values.mean():.6g}  std {values.std(correction=0):.6g}  min {values.min():.6g}  max {values.max():.6g}"
    )
    print(tensor)
    return 0


def _described(checkpoint: Checkpoint, name: str) -> str:
    shape, dtype = checkpoint.describe(name)
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


if __name__ == "__main__":
    sys.exit(main())
