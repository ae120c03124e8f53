"""Where ranks meet when torchrun starts them again: a part of its store that no earlier start has written to.

torchrun keeps one store for all its starts of a run (``--max-restarts``, nodes that come and go), and its count of
restarts need not be the same on all nodes. A rank that joins would find the addresses of ranks that are dead. So rank 0
gives this start a name of its own, and tells it only to ranks that ask now:

    rank r   asked/r := a random word      waits for  told/<that word>            seen/<name>/r := 1
    rank 0   reads all asked/*, answers each word once, until  seen/<name>/*  is complete
"""

import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

_POLL_SECONDS = 0.05


def keeps_its_store() -> bool:
    """Whether the launcher's store outlives this start."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of torchrun's store that belongs to this start; call it on all ranks.

    Raises:
        RuntimeError: not all ranks came in time.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore("meeting", dist.TCPStore(host, port, is_master=False, timeout=timeout))
    name = _give_name(store, world_size, timeout) if rank == 0 else _ask_name(store, rank)
    return dist.PrefixStore(name, store)


def _ask_name(store: dist.Store, rank: int) -> str:
    word = secrets.token_hex(8)
    store.set(f"asked/{rank}", word)
    try:
        name = store.get(f"told/{word}").decode()
    except dist.DistError as error:
        raise RuntimeError(f"rank 0 did not come in time ({error})") from error
    store.set(f"seen/{name}/{rank}", "1")
    return name


def _give_name(store: dist.Store, world_size: int, timeout: timedelta) -> str:
    name, told, deadline = secrets.token_hex(8), set[str](), time.monotonic() + timeout.total_seconds()
    missing = set(range(1, world_size))
    while missing:
        for rank in sorted(missing):
            if store.check([f"asked/{rank}"]):
                word = store.get(f"asked/{rank}").decode()
                if word not in told:
                    store.set(f"told/{word}", name)
                    told.add(word)
            if store.check([f"seen/{name}/{rank}"]):
                missing.discard(rank)
        if missing and time.monotonic() > deadline:
            shown = ", ".join(map(str, sorted(missing)[:16]))
            raise RuntimeError(f"rank {shown} did not come within {timeout.total_seconds() / 60:g} minutes")
        time.sleep(_POLL_SECONDS if missing else 0)
    return name
