"""The memory of a CPU run: keep what a step frees for the next one, in as few pieces as possible.

glibc gives large blocks back to the system as soon as they are freed, and the system hands out pages one by one, each
cleared at its first touch. A training step frees and takes the same activations over and over: kept inside the
process, they cost nothing.

    | tensor |.| tensor |.| tensor |      . crumbs: torch wants blocks at multiples of 64, glibc's are at those of 16
    |                     | tensor |      with crumbs that join what is free beside them: room for the next tensor
    |        |.|        |.| tensor |      with crumbs kept apart, to be handed out again: just too small for it

What is kept must not fall to pieces. glibc keeps small blocks that were freed apart, by thread, and the heap then grows
for dozens of steps, to several times what is alive. That can be turned off for a new process alone.
"""

import ctypes
import multiprocessing
import os
import platform
import sys

import torch

_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_MAX = 1, -1, -4  # malloc.h
_VARIABLE, _WITHOUT_CACHES = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"


def keep_freed_memory() -> bool:
    """From now on blocks come from the heap and stay there; returns whether this C library can do it."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    wanted = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1, _M_MXFAST: 0}
    return all([bool(libc.mallopt(name, value)) for name, value in wanted.items()])


def restart_for_cpu() -> None:
    """Start this program once more, in this process, with freed blocks that join; for the first line of a program.

    Nothing happens on a machine with a GPU, where the host's small blocks should be quick and tensors are elsewhere;
    where glibc.malloc.tcache_count is chosen already in ``GLIBC_TUNABLES``; and in a fork, which has no command line.
    """
    chosen = os.environ.get(_VARIABLE, "")
    forked = multiprocessing.parent_process() is not None
    if forked or "tcache_count" in chosen or torch.cuda.is_available() or platform.libc_ver()[0] != "glibc":
        return
    os.environ[_VARIABLE] = ":".join(filter(None, (chosen, _WITHOUT_CACHES)))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
