"""Runs of the launcher that start in a moment: forked from a process that has torch and the launcher loaded.

    forkserver ──fork──> torchrun's agent ──fork──> rank 0, rank 1, ...
                └─fork──> a rank alone, started by a test, or by a script that calls ``python``

A new interpreter and ``import torch`` cost seconds of CPU time for the agent and for each rank, and prove nothing here.
All else is torchrun's: its command line, its agent, its store, its signals, its restarts, and ranks that are processes.
"""

import json
import multiprocessing as mp
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

ROOT = Path(__file__).parents[2]
CONTEXT = mp.get_context("forkserver")
PRELOADED = ["torch", "torch.distributed.run", "megatron_moe.training.parity", "tests.faults.inject"]


class Forked:
    """A process whose output is kept; somewhat like ``subprocess.Popen``."""

    def __init__(self, function: Callable[..., int | None], *arguments: Any) -> None:
        _preload()
        handle, name = tempfile.mkstemp(prefix="forked")
        os.close(handle)
        self._output = Path(name)
        self._process = CONTEXT.Process(target=_talk_into, args=(name, function, *arguments), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Exit status, once it has ended."""
        return self._process.exitcode

    def said(self) -> str:
        """Its output, and that of its children, until now."""
        return self._output.read_text(errors="replace")

    def wait(self, timeout: float) -> tuple[int, str]:
        """Exit status and output.

        Raises:
            TimeoutError: it did not end in time, and has been killed.
        """
        self._process.join(timeout)
        status, said = self.poll(), self.said()
        if status is None:
            for pid in [*self.ranks(), self.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.join()
        self._output.unlink()
        if status is None:
            raise TimeoutError(f"no end after {timeout:g} s; it said:\n{said}")
        return status, said

    def ranks(self) -> list[int]:
        """Process ids of an agent's ranks."""
        try:
            pids = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            return [int(pid) for pid in pids if Path(f"/proc/{pid}/comm").read_text().startswith("rank ")]
        except FileNotFoundError:  # one of them, or the agent, has just ended
            return self.ranks() if self.poll() is None else []

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> None:
        """Until something is true; an error if the process ends before, or if it takes too long."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.002)


def torchrun(num_ranks: int, argv: Sequence[str], *faults: str, restarts: int = 0) -> Forked:
    """``torchrun --standalone --nproc-per-node N --max-restarts R tests/faults/inject.py [faults] [flags]``."""
    words = ["--standalone", "--nproc-per-node", str(num_ranks), "--max-restarts", str(restarts)]
    return Forked(_agent, [*words, "tests/faults/inject.py", *faults, *argv])


def rank_alone(argv: Sequence[str], environment: Mapping[str, object]) -> Forked:
    """One rank as a launcher without an agent starts it: it finds the others by its environment."""
    variables = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    return Forked(_rank, ["pretrain_moe.py", *argv], variables)


def _preload() -> None:
    """What the server loads before its first fork; without effect where it runs already, for the pool of ranks."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    CONTEXT.set_forkserver_preload(PRELOADED)


STAND_IN = """#!{python} -SE
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
ask = [os.getpid(), os.getcwd(), sys.argv[1:], dict(os.environ)]
server.sendall(json.dumps(ask).encode() + b"\\n")
answers = server.makefile()
pid = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
sys.exit(int(answers.readline()))
"""


def serve_python(folder: Path) -> None:
    """Put a ``python`` into a folder, for scripts to start: it hands its words on, and signals, to a forked process."""
    _preload()
    address = str(folder / "socket")
    (folder / "python").write_text(STAND_IN.format(python=sys.executable, address=address))
    (folder / "python").chmod(0o755)
    listener = socket.create_server(address, family=socket.AF_UNIX)

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as talk:
            process = CONTEXT.Process(target=_stand_for, args=json.loads(talk.readline()), daemon=True)
            process.start()
            print(process.pid, file=talk, flush=True)
            process.join()
            print(process.exitcode, file=talk, flush=True)

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def _stand_for(pid: int, folder: str, words: list[str], environment: dict[str, str]) -> None:
    for number in (1, 2):
        os.dup2(os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_APPEND), number)
    os.chdir(folder)
    _rank(words, environment)


def _talk_into(output: str, function: Callable[..., int | None], *arguments: Any) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(ROOT)
    sys.exit(function(*arguments))


def _agent(words: list[str]) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda self, args, env: _ForkedRank(args, env=env)  # type: ignore[method-assign]
    run.main(words)


class _ForkedRank(Popen):
    """``python -u script words ...``, forked instead of executed."""

    def _execute_child(self, args: Sequence[str], executable: Any, preexec: Any, close_fds: Any, *more: Any) -> None:
        env = more[2]
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            return
        status = 1
        try:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)  # those of the agent
            _rank(list(args[args.index("-u") + 1 :]), env)
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)


def _rank(words: list[str], environment: dict[str, str]) -> None:
    """A script of this repository as the program of this process; ends with its exit status."""
    os.environ.clear()
    os.environ.update(environment)
    Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
