"""Steps that must not count: skipped, rolled back or the end of the run; the same after a resume."""

import shutil
from pathlib import Path

import pytest
import torch

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training.faults import FEWEST, MOST_IN_A_ROW, FaultGuard, SharedError
from megatron_moe.training.loop import Run
from tests.helpers.running import events, losses, tiny_run
from tools.show_samples import main as show_samples


def poison(run: Run, faults: dict[int, float]) -> Run:
    """In these iterations the loss is multiplied by these numbers."""
    real = run.machine.runtime.run

    def poisoned(*arguments: object) -> torch.Tensor:
        return real(*arguments) * faults.get(run.position.iteration + 1, 1.0)  # type: ignore[arg-type]

    run.machine.runtime.run = poisoned  # type: ignore[method-assign]
    return run


def weights(run: Run) -> dict[str, torch.Tensor]:
    """Copies of everything that a step changes."""
    found = {name: parameter.detach().clone() for name, parameter in run.machine.parameters.items()}
    for i, piece in enumerate(run.machine.pieces):
        found |= {f"{piece.parameter.spec.name}.{k}": t.clone() for k, t in run.machine.optimizer.tensors(i).items()}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_stop_leaves_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = poison(tiny_run(tmp_path, "--exit-interval 6"), {7: float("nan")})
    run.train()
    before = weights(run)
    with pytest.raises(SharedError, match=r"iteration 7: loss nan, .*samples 24\.\.27"):
        poison(run := tiny_run(tmp_path), {7: float("nan")}).train()
    assert same(weights(run), before)
    (event,) = events(tmp_path)
    assert event["event"] == "stop" and event["iteration"] == 7 and event["samples"] == [24, 27]
    capsys.readouterr()
    assert show_samples([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("--- sample ") == 4 and "--- sample 27: 17 tokens" in shown and "stop: loss nan" in shown


def test_skip_and_the_check_that_is_switched_off(tmp_path: Path) -> None:
    run = poison(tiny_run(tmp_path, "--on-nonfinite skip --exit-interval 6"), {7: float("inf")})
    run.train()
    before, steps = weights(run), run.machine.optimizer.num_steps
    run = poison(tiny_run(tmp_path, "--on-nonfinite skip --exit-interval 7"), {7: float("inf")})
    run.train()
    assert same(weights(run), before) and run.machine.optimizer.num_steps == steps == 6
    assert run.position.iteration == 7 and run.position.consumed_samples == 28
    assert 7 not in losses(tmp_path) and events(tmp_path)[0]["event"] == "skip"
    run = poison(tiny_run(tmp_path, "--no-check-for-nan-in-loss-and-grad --exit-interval 8"), {8: float("nan")})
    run.train()
    assert run.machine.optimizer.num_steps == 7 and not same(weights(run), before)


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_spike_is_mended_the_same_after_a_resume(action: str, tmp_path: Path) -> None:
    flags, spikes = f"--save-interval 5 --loss-spike-factor 3 --on-spike {action}", {12: 100.0, 18: 50.0}
    run = poison(tiny_run(tmp_path, flags), spikes)
    run.train()
    first, happened, final = losses(tmp_path), events(tmp_path), weights(run)
    assert [(e["iteration"], e["event"]) for e in happened] == [(12, action), (18, action)]
    assert [e.get("restored_iteration") for e in happened] == ([10, 15] if action == "rollback" else [None, None])
    assert sorted(first) == [i for i in range(1, 21) if i not in spikes]
    for later in (15, 20):  # as if killed before them
        shutil.rmtree(tmp_path / f"iter_{later:07d}")
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    run = poison(tiny_run(tmp_path, flags), spikes)
    assert run.position.iteration == 10
    run.train()
    assert losses(tmp_path) == first and events(tmp_path) == happened and same(weights(run), final)


def test_rollback_restores_a_checkpoint_and_passes_over_the_batch(tmp_path: Path) -> None:
    saved = tiny_run(tmp_path, "--exit-interval 9")
    saved.train()
    run = poison(tiny_run(tmp_path, "--on-nonfinite rollback --exit-interval 11"), {11: float("nan")})
    run.train()
    assert same(weights(run), weights(saved)) and run.position.consumed_samples == 44
    assert run.machine.optimizer.num_steps == 9


def test_rollback_without_a_checkpoint_ends(tmp_path: Path) -> None:
    with pytest.raises(SharedError, match="no checkpoint yet to roll back to"):
        poison(tiny_run(tmp_path, "--on-nonfinite rollback"), {3: float("nan")}).train()


def test_endless_faults_end(tmp_path: Path) -> None:
    with pytest.raises(SharedError, match=f"{MOST_IN_A_ROW + 1} steps in a row were refused"):
        poison(tiny_run(tmp_path, "--on-nonfinite skip"), dict.fromkeys(range(3, 99), float("nan"))).train()


def test_spikes_stand_out_from_the_median(tmp_path: Path) -> None:
    config = tiny_run(tmp_path, "--loss-spike-factor 2 --grad-norm-spike-factor 5 --on-spike stop").config
    guard = FaultGuard(config, ParallelContext.single())
    for i in range(FEWEST):
        assert guard.accept(1000.0 if i == 0 else 2.0, 1.0), "too few steps to know what is usual"
    assert guard.accept(3.9, 4.9)
    assert not guard.accept(4.1, 1.0) and guard.fault is not None
    assert guard.fault.action == "stop" and guard.fault.reason.startswith("loss 4.1, more than 2 times the median 2 ")
    assert not guard.accept(2.0, 5.1) and guard.fault.reason.startswith("gradient norm 5.1")
    other = FaultGuard(config, ParallelContext.single())
    other.load_state(guard.state())
    assert not other.accept(4.1, 1.0) and other.state() == {**guard.state(), "in_a_row": 3}
