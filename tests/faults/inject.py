"""Train with faults at chosen moments: pretrain_moe.py, and what real machines do to it.

    torchrun ... tests/faults/inject.py "kill rank=1 iteration=7" --config configs/quickstart.yaml ...

    kill    the rank ends without a word                     hang    its main thread waits for ever
    stop    the rank stands still (SIGSTOP)                  delay   `seconds` more in every step from then on
    flip    one bit of its first weight changes              full    its files cannot grow any more (a full disk)

A fault strikes before the step of its iteration, and under torchrun's --max-restarts only the first time.
"""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from megatron_moe.training.loop import Run
from pretrain_moe import main

Fault = Callable[[Run, dict[str, float]], Any]


def _flip(run: Run, how: dict[str, float]) -> None:
    run.machine.pieces[0].parameter.data.view(-1).view(torch.uint8)[0] ^= 1


def _full(run: Run, how: dict[str, float]) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


FAULTS: dict[str, Fault] = {
    "kill": lambda run, how: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda run, how: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda run, how: threading.Event().wait(),
    "delay": lambda run, how: time.sleep(how["seconds"]),
    "flip": _flip,
    "full": _full,
}


def inject(text: str) -> None:
    """Make every run of this process meet a fault, described as ``kind key=number ...``."""
    kind, *words = text.split()
    how = {key: float(number) for key, number in (word.split("=") for word in words)}
    if int(os.environ.get("RANK", "0")) != how["rank"] or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    one_iteration = Run._one_iteration

    def faulty(run: Run, steps: Any) -> None:
        iteration = run.position.iteration + 1
        if iteration == how["iteration"] or (kind == "delay" and iteration > how["iteration"]):
            FAULTS[kind](run, how)
        one_iteration(run, steps)

    Run._one_iteration = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    words = sys.argv[1:]
    while words and not words[0].startswith("-"):
        inject(words.pop(0))
    sys.exit(main(words))
