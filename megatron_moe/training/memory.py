"""The memory of a CPU run: keep what a step frees for the next one.

glibc gives large blocks back to the system as soon as they are freed, and the system hands out pages one by one, each
cleared at its first touch. A training step frees and takes the same activations over and over: kept inside the
process, they cost nothing.
"""

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def keep_freed_memory() -> bool:
    """From now on blocks come from the heap and stay there; returns whether this C library can do it."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
