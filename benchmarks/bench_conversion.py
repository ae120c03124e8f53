"""Memory of a conversion: a Mixtral-like folder of some gigabytes is imported and exported, in a process each.

    python benchmarks/bench_conversion.py --folder /mnt/scratch --gigabytes 4

Peak is the largest resident size of the process, the interpreter and torch included, which alone are the first row; the
second number of memory is the peak above that. It is what the process itself reads from /proc at its end (VmHWM): the
``ru_maxrss`` of a child is never less than what its parent held. Three copies of the model are on the disk at a time.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.config.schema import Config, ModelConfig, MoEConfig, TrainingConfig
from megatron_moe.convert.configuration import write_config
from megatron_moe.convert.exporting import Export, export_folder
from megatron_moe.convert.families import FAMILIES
from megatron_moe.convert.moving import Exported, plan_export
from megatron_moe.model.size import logical_tensors

TOOL = Path(__file__).parent.parent / "tools/convert_checkpoint.py"
LIMIT_MIB = 1000


def model_of(num_bytes: int) -> Config:
    """A bfloat16 Mixtral of about so many bytes: 8 experts a layer, as many layers as it takes."""
    hidden, ffn, experts, vocab = 2048, 3584, 8, 32000
    layer = 3 * hidden * ffn * experts + 5 * hidden * hidden // 2
    num_layers = max(1, round((num_bytes / 2 - 2 * vocab * hidden) / layer))
    model = ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden,
        num_attention_heads=16,
        num_query_groups=4,
        vocab_size=vocab,
        untie_embeddings_and_output_weights=True,
    )
    moe = MoEConfig(num_experts=experts, moe_layer_freq="1", moe_ffn_hidden_size=ffn)
    return Config(model=model, moe=moe, training=TrainingConfig(params_dtype="bfloat16"))


class RandomWeights:
    """Tensors that are drawn when they are read."""

    def __init__(self, tensors: Mapping[str, Described]) -> None:
        self.tensors = tensors

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one row of it."""
        described = self.tensors[name]
        shape = described.shape if row is None else described.shape[1:]
        return torch.empty(shape, dtype=described.dtype).uniform_(-0.1, 0.1)


def make_folder(folder: Path, num_bytes: int, shard_bytes: int) -> int:
    """Write config.json, index and shards; the bytes of all tensors."""
    config, family = model_of(num_bytes), FAMILIES["mixtral"]
    ours = {name: Described(*value) for name, value in logical_tensors(config).items()}
    plan = plan_export(family, ours, config.model.num_layers, fused_experts=False)
    exported = Exported(plan, ours, RandomWeights(ours), {}, torch.bfloat16)
    theirs = write_config(family, config, "bfloat16", {})
    export_folder(Export(family, config, theirs, exported, ()), folder, shard_bytes)
    return sum(tensor.num_bytes for tensor in exported.tensors.values())


_REPORT = """
import atexit, runpy, sys
peak = lambda: next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
atexit.register(lambda: print("peak", peak()))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def measured(command: Sequence[str | Path]) -> tuple[float, float]:
    """Seconds and peak resident MiB of a child process.

    Raises:
        RuntimeError: it failed.
    """
    start = time.perf_counter()
    child = subprocess.run([sys.executable, "-c", _REPORT, *map(str, command)], stdout=subprocess.PIPE, text=True)
    if child.returncode != 0:
        raise RuntimeError(f"{command} ended with {child.returncode}")
    return time.perf_counter() - start, int(child.stdout.split()[-1]) / 1024


def measure(folder: Path, num_bytes: int, shard_bytes: int) -> dict[str, dict[str, float]]:
    """Each command's seconds and memory."""
    size = make_folder(folder / "theirs", num_bytes, shard_bytes)
    commands: dict[str, list[str | Path]] = {
        "start alone": [TOOL, "--help"],
        "import": [TOOL, "import", folder / "theirs", folder / "ours"],
        "export": [TOOL, "export", folder / "ours", folder / "back"],
        "verify --tensors-only": [TOOL, "verify", folder / "back", folder / "ours", "--tensors-only"],
    }
    rows: dict[str, dict[str, float]] = {}
    for name, command in commands.items():
        seconds, peak = measured(command)
        base = rows["start alone"]["peak_mib"] if rows else peak
        rows[name] = {"gigabytes": size / 1e9, "seconds": seconds, "peak_mib": peak, "above_start_mib": peak - base}
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table and a JSON object; exit status 1 where a peak is above the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on a disk with room for three models")
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--shard-gigabytes", type=float, default=1.0)
    arguments = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        rows = measure(folder, int(arguments.gigabytes * 1e9), int(arguments.shard_gigabytes * 1e9))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{'':22} {'seconds':>8} {'peak MiB':>9} {'above start':>12}")
    for name, row in rows.items():
        print(f"{name:22} {row['seconds']:8.1f} {row['peak_mib']:9.0f} {row['above_start_mib']:12.0f}")
    print(json.dumps({name: {key: round(value, 2) for key, value in row.items()} for name, row in rows.items()}))
    return int(max(row["peak_mib"] for row in rows.values()) > LIMIT_MIB)


if __name__ == "__main__":
    sys.exit(main())
