"""The launch scripts with stand-ins for the cluster: preemption saves and requeues, two nodes meet."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.faults.test_kills_of_ranks import ROOT, TINY, iterations

SRUN = """#!/usr/bin/env bash
# Two tasks on this machine; like srun, hands signals on to them.
while [ "${1#--}" != "$1" ]; do shift; done
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & pids+=($!); done
trap 'kill -USR1 "${pids[@]}"' USR1
for pid in "${pids[@]}"; do while kill -0 "$pid" 2>/dev/null; do wait "$pid" || true; done; done
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$*" >>"$REQUEUED"; fi
"""


def environment(tmp_path: Path, **more: object) -> dict[str, str]:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (bin_dir / name).write_text(text)
        (bin_dir / name).chmod(0o755)
    path = f"{bin_dir}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    base = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return base | {name: str(value) for name, value in more.items()}


def test_a_preempted_job_saves_and_is_queued_again(tmp_path: Path) -> None:
    (tmp_path / "pretrain_moe.py").symlink_to(ROOT / "pretrain_moe.py")
    save, requeued = tmp_path / "run", tmp_path / "requeued"
    env = environment(
        tmp_path,
        SLURM_JOB_ID=os.getpid(),
        SLURM_JOB_NODELIST="here",
        SLURM_NTASKS=2,
        SLURM_SUBMIT_DIR=tmp_path,
        REQUEUED=requeued,
    )
    command = ["bash", str(ROOT / "launch" / "slurm.sbatch"), *TINY.split(), "--save", str(save)]
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 60
    while iterations(save) < 3:
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    said = job.communicate(timeout=60)[0]
    assert job.returncode == 0 and "signal SIGUSR1" in said, said
    assert requeued.read_text() == f"requeue {os.getpid()}\n"
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and "done: iteration 40 of 40" in again.stdout, again.stdout + again.stderr
    assert requeued.read_text().count("requeue") == 1
    assert (tmp_path / "runs" / f"slurm-{os.getpid()}" / "rank-1.log").exists()


def test_two_nodes_meet(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    nodes = []
    for node in range(2):
        env = environment(
            tmp_path, NODES=2, NODE_RANK=node, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANKS_PER_NODE=1
        )
        command = ["bash", "launch/torchrun.sh", *TINY.split(), "--train-iters", "4", "--save", str(tmp_path / "run")]
        nodes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    said = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert iterations(tmp_path / "run") == 4
