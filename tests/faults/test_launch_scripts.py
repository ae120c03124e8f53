"""The launch scripts with stand-ins for the cluster: preemption saves and requeues, two nodes meet."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tests.faults.test_kills_of_ranks import TINY, iterations
from tests.helpers.forked import ROOT, serve_python

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
    serve_python(tmp_path / "bin")
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


def pod(index: int, folders: dict[str, Path], replaced: dict[str, object]) -> tuple[list[str], dict[str, str]]:
    """Command and variables of a pod of launch/kubernetes.yaml as the kubelet would start it, volumes in folders."""
    job_set = yaml.safe_load((ROOT / "launch" / "kubernetes.yaml").read_text())
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job, name = replicated["template"]["spec"], job_set["metadata"]["name"]
    (container,) = job["template"]["spec"]["containers"]
    given = {item["name"]: item for item in container["env"]}
    index_field = given.pop("NODE_RANK")["valueFrom"]["fieldRef"]["fieldPath"]
    env = {key: item["value"] for key, item in given.items()}
    assert index_field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert job["completionMode"] == "Indexed" and replicated["replicas"] == 1
    assert int(env["NODES"]) == job["completions"] == job["parallelism"] == 2
    assert int(env["RANKS_PER_NODE"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert env["MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}"
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert {mount["name"] for mount in mounts.values()} == {v["name"] for v in job["template"]["spec"]["volumes"]}
    words = list(container["command"] + container["args"])
    for i, word in enumerate(words):
        if word.startswith("/"):
            mount = "/" + word.split("/")[1]
            assert mounts[mount].get("readOnly", False) == (words[i - 1] != "--save")
            words[i] = word.replace(mount, str(folders[mount]), 1)
    return words, env | {"NODE_RANK": str(index)} | {key: str(value) for key, value in replaced.items()}


def test_two_nodes_meet(tmp_path: Path) -> None:
    """Two pods of launch/kubernetes.yaml run launch/torchrun.sh, with a rank each, on loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    nodes, folders = [], {"/data": tmp_path / "data", "/checkpoints": tmp_path / "checkpoints"}
    for index in range(2):
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANKS_PER_NODE": 1}
        words, env = pod(index, folders, here)
        command = [*words, *TINY.split(), "--data-path", "none", "--tokenizer-type", "ByteTokenizer"]
        command += ["--train-iters", "4", "--eval-interval", "0", "--tokenizer-model", "none", "--lr-warmup-iters", "0"]
        env = environment(tmp_path, **env)
        nodes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    said = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert iterations(tmp_path / "checkpoints" / "moe") == 4
