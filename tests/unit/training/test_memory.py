"""What a CPU run takes besides its tensors: no compiler that it does not use, no blocks that fall to pieces."""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys
from megatron_moe.training.memory import keep_freed_memory, restart_for_cpu
from tests.helpers.running import tiny_run

if __name__ == "__main__":
    print("started", os.getpid(), *sys.argv[1:], flush=True)
    restart_for_cpu()
    assert keep_freed_memory()
    tiny_run(sys.argv[1], "--train-iters 1").train()
    print("tunables", os.environ.get("GLIBC_TUNABLES"))
    print("compiler", "torch._dynamo" in sys.modules)
"""


def test_a_run_starts_again_once_and_loads_no_compiler(tmp_path: Path) -> None:
    program, save = tmp_path / "program.py", str(tmp_path / "run")
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}
    done = subprocess.run(
        [sys.executable, program, save, "two words"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = [line.split(" ", 2) for line in done.stdout.splitlines()]
    starts = [line for line in said if line[0] == "started"]
    gpu = torch.cuda.is_available()
    assert len(starts) == (1 if gpu else 2)
    assert starts[0] == starts[-1] and starts[0][2] == f"{save} two words", "the same process with the same arguments"
    tunables = "glibc.malloc.arena_max=4" + ("" if gpu else ":glibc.malloc.tcache_count=0")
    assert ["tunables", tunables] in said
    assert ["compiler", "False"] in said
