"""Ranks of a later start meet each other, whatever earlier starts left in the store."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_moe.training.meeting import fresh_store

SOON = timedelta(seconds=20)


def start(num_ranks: int, late: int | None = None) -> list[str]:
    """All ranks of a start; rank ``late`` never comes. What rank 0 wrote, as each reads it."""
    found = [""] * num_ranks

    def rank(i: int) -> None:
        store = fresh_store(i, num_ranks, SOON)
        if i == 0:
            store.set("address", f"of {id(found)}")
        found[i] = store.get("address").decode()

    threads = [threading.Thread(target=rank, args=(i,)) for i in reversed(range(num_ranks)) if i != late]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_start_has_a_part_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    for num_ranks in (4, 4, 2, 3):
        found = start(num_ranks)
        assert len(set(found)) == 1 and found[0].startswith("of "), found
    with pytest.raises(RuntimeError, match=r"rank 1, 2, 3 did not come within 0\.01 minutes"):
        fresh_store(0, 4, timedelta(minutes=0.01))  # words of ranks 1 to 3 are there from before, the ranks are not
