"""Random kills over a run: never a lost checkpoint, never a different curve. ``python -m tests.faults.random_kills``.

    whole    ── ── ── ── ── ── ── ── ── ──     once, undisturbed
    killed   ── ──x  ── x  ──── x   ── ──     killed at random moments, one rank or all, and started again each time

A moment is a step, or the middle of a save, found by the folder it writes in. After each kill every checkpoint there
must be whole and at least as new as the last one that was there before; at the end both runs must have written the same
records. When a run reaches its end before all kills have struck, it begins anew.

With ``--folder`` both runs and a log of the kills (kills.jsonl) stay, and the same command goes on where it stopped.
"""

import argparse
import json
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
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_moe.checkpoint import checkpoint_path, find_latest, saved_iterations
from megatron_moe.checkpoint.checksums import damage
from tests.faults.test_kills_of_ranks import TINY, iterations, losses
from tests.helpers.forked import Forked, torchrun

WAIT_SECONDS = 300.0
SIZES = {
    "tiny": TINY,
    "quickstart": "--config configs/quickstart.yaml --data-path none --mock-data --tokenizer-type ByteTokenizer "
    "--seq-length 64 --save-interval 3",  # its model, iterations and checkpoints; shorter sequences, more saves
}


@dataclass(frozen=True)
class Kill:
    """One kill: who and when, and what was there afterwards."""

    kind: str
    iteration: int
    resumes_from: int | None
    seconds: float


def unfinished(save: Path) -> set[str]:
    """Names of the folders that saves are writing, or that killed saves have left behind."""
    return {n for n in os.listdir(save) if ".tmp-" in n or ".replaced" in n} if save.is_dir() else set()


def wait_for_moment(save: Path, process: Forked, during_save: bool, chance: random.Random) -> bool:
    """Until a random later iteration is reported, or a new save is under way; False if the run ended first."""
    deadline, target = time.monotonic() + WAIT_SECONDS, iterations(save) + chance.randrange(1, 8)
    left_over = unfinished(save)
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{save}: nothing happens")
        saving = during_save and unfinished(save) - left_over
        if saving or (not during_save and iterations(save) >= target):
            time.sleep(chance.random() * (0.005 if saving else 0.02))
            return process.poll() is None
        time.sleep(0.0005 if during_save else 0.002)
    return False


def check_checkpoints(save: Path, before: int | None) -> int | None:
    """All checkpoints are whole, and the latest is no older than before."""
    latest = find_latest(save)
    assert before is None or (latest is not None and latest >= before), f"{save}: {latest} after {before}"
    for iteration in saved_iterations(save):
        assert not damage(checkpoint_path(save, iteration)), f"{save}: iteration {iteration} is damaged"
    return latest


def strike(save: Path, flags: Sequence[str], chance: random.Random) -> Kill | None:
    """Start the run, kill at one random moment, look at what is left; None if the run ended by itself instead."""
    begin = time.monotonic()
    during_save, everyone = chance.random() < 0.5, chance.random() < 0.5
    before = find_latest(save) if save.is_dir() else None
    agent = torchrun(2, [*flags, "--save", str(save)])
    struck = wait_for_moment(save, agent, during_save, chance)
    ranks = agent.ranks() if struck else []
    for pid in [*ranks, agent.pid] if struck and everyone else [chance.choice(ranks)] if ranks else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    status, said = agent.wait(WAIT_SECONDS)
    assert struck or status == 0, said
    if status == 0:  # it ended, or was about to
        return None
    latest = check_checkpoints(save, before) if save.is_dir() else None
    kind = f"{'all ranks' if everyone else 'one rank'}, {'during a save' if during_save else 'during steps'}"
    return Kill(kind, iterations(save), latest, round(time.monotonic() - begin, 2))


def finish(save: Path, flags: Sequence[str]) -> None:
    """Let the run go to its end."""
    status, said = torchrun(2, [*flags, "--save", str(save)]).wait(10 * WAIT_SECONDS)
    assert status == 0, said


def kill_again_and_again(folder: Path, flags: Sequence[str], seed: int, number: int) -> list[Kill]:
    """Go on from what the folder holds until there were so many kills and the last run is over; all kills."""
    whole, killed, log = folder / "whole", folder / "killed", folder / "kills.jsonl"
    kills = [Kill(**json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []
    finish(whole, flags)
    ended = len(kills) >= number and not killed.exists()
    while not ended:
        attempt = random.Random(f"{seed} {len(kills)} {iterations(killed)}")
        kill = strike(killed, flags, attempt) if len(kills) < number else finish(killed, flags)
        if kill is not None:
            kills.append(kill)
            with log.open("a") as file:
                file.write(json.dumps(asdict(kill)) + "\n")
            print(f"kill {len(kills)}: {kill}", flush=True)
            continue
        assert losses(killed) == losses(whole), "the curve differs"
        print(f"a run is over after {len(kills)} kills: no curve differs", flush=True)
        shutil.rmtree(killed)
        ended = len(kills) >= number
    return kills


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if nothing was lost and no curve differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model and the run")
    parser.add_argument("--folder", type=Path, help="where both runs and the log stay; default: a temporary one")
    arguments = parser.parse_args(argv)
    flags = [*SIZES[arguments.size].split(), "--async-save"]
    print(f"flags: {' '.join(flags)}")
    with tempfile.TemporaryDirectory() as name:
        kills = kill_again_and_again(arguments.folder or Path(name), flags, arguments.seed, arguments.kills)
    seconds = sum(kill.seconds for kill in kills)
    print(f"{len(kills)} kills in {seconds:.0f} s, size {arguments.size}, seed {arguments.seed}:")
    for kind, count in sorted(Counter(kill.kind for kill in kills).items()):
        print(f"  {count:4} {kind}")
    print("no checkpoint was lost, no curve differs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
