"""Random kills over a run: never a lost checkpoint, never a different curve. ``python -m tests.faults.random_kills``.

    whole    ── ── ── ── ── ── ── ── ── ──     once, undisturbed
    killed   ── ──x  ── x  ──── x   ── ──     killed at random moments, one rank or all, and started again each time

A moment is a step, or the middle of a save, found by the folder it writes in. After each kill every checkpoint there
must be whole and at least as new as the last one that was there before; at the end both runs must have written the same
records. When a run reaches its end before all kills have struck, it begins anew.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron_moe.checkpoint import checkpoint_path, find_latest, saved_iterations
from megatron_moe.checkpoint.checksums import damage
from tests.faults.test_kills_of_ranks import TINY, iterations, losses, ranks_of, start

WAIT_SECONDS = 120.0
EXTRA = ("--async-save",)


def wait_for_moment(save: Path, process: object, during_save: bool, chance: random.Random) -> bool:
    """Until a random later iteration is reported, or a save is under way; False if the run ended first."""
    poll, deadline = process.poll, time.monotonic() + WAIT_SECONDS  # type: ignore[attr-defined]
    target = iterations(save) + chance.randrange(1, 8)
    while poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{save}: nothing happens")
        saving = during_save and save.is_dir() and any(".tmp-" in n or ".replaced" in n for n in os.listdir(save))
        if saving or (not during_save and iterations(save) >= target):
            time.sleep(chance.random() * (0.005 if saving else 0.02))
            return poll() is None
        time.sleep(0.0005 if during_save else 0.002)
    return False


def check_checkpoints(save: Path, before: int | None) -> int | None:
    """All checkpoints are whole, and the latest is no older than before."""
    latest = find_latest(save)
    assert before is None or (latest is not None and latest >= before), f"{save}: {latest} after {before}"
    for iteration in saved_iterations(save):
        assert not damage(checkpoint_path(save, iteration)), f"{save}: iteration {iteration} is damaged"
    return latest


def strike(save: Path, chance: random.Random, extra: Sequence[str], log: Counter[str]) -> bool:
    """Start the run, kill at one random moment, look at what is left. Whether the run ended by itself instead."""
    during_save, everyone = chance.random() < 0.5, chance.random() < 0.5
    before = find_latest(save) if save.is_dir() else None
    agent = start(save, *extra)
    if not wait_for_moment(save, agent, during_save, chance):
        said = agent.communicate(timeout=WAIT_SECONDS)[0]
        assert agent.returncode == 0, said
        return True
    ranks = ranks_of(agent)
    for pid in [*ranks, agent.pid] if everyone else [chance.choice(ranks)] if ranks else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    said = agent.communicate(timeout=WAIT_SECONDS)[0]
    kind = f"{'all ranks' if everyone else 'one rank'}, {'during a save' if during_save else 'during steps'}"
    if agent.returncode == 0:  # it was about to end
        return True
    latest = check_checkpoints(save, before) if save.is_dir() else None
    log[kind] += 1
    print(f"kill {sum(log.values())}: {kind}, at iteration {iterations(save)}; resumes from {latest}", flush=True)
    return False


def finish(save: Path, extra: Sequence[str]) -> None:
    """Let the run go to its end."""
    agent = start(save, *extra)
    said = agent.communicate(timeout=WAIT_SECONDS)[0]
    assert agent.returncode == 0, said


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if nothing was lost and no curve differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    chance, log, runs, begin = random.Random(arguments.seed), Counter[str](), 0, time.monotonic()
    print(f"flags: {' '.join([TINY, *EXTRA])}")
    with tempfile.TemporaryDirectory() as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        finish(whole, EXTRA)
        while sum(log.values()) < arguments.kills:
            ended = strike(killed, chance, EXTRA, log)
            if sum(log.values()) >= arguments.kills and not ended:
                finish(killed, EXTRA)
                ended = True
            if ended:
                runs += 1
                assert losses(killed) == losses(whole), "the curve differs"
                shutil.rmtree(killed)
    print(f"{sum(log.values())} kills over {runs} runs in {time.monotonic() - begin:.0f} s, seed {arguments.seed}:")
    for kind, count in sorted(log.items()):
        print(f"  {count:4} {kind}")
    print("no checkpoint was lost, no curve differs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
