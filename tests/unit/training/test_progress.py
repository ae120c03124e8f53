"""The progress line says what the record says, on a terminal and in a log file."""

import io

import pytest

from megatron_moe.training.progress import Progress, duration, short_number, training_line

RECORD = {
    "iteration": 120,
    "lm_loss": 4.8123,
    "learning_rate": 9.5e-4,
    "grad_norm": 0.83,
    "tokens_per_second": 5200.0,
    "step_seconds": 0.5,
    "mfu": None,
    "dropped_share": 0.25,
    "expert_load": {"layer 1": [0.25, 0.25], "layer 3": [0.4, 0.1]},
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_plain_lines_one_per_record() -> None:
    stream = io.StringIO()
    progress = Progress(total_iterations=400, stream=stream)
    progress.write(RECORD)
    progress.write({"iteration": 120, "evaluation": True, "valid_loss": 4.9, "valid_ppl": 134.3})
    progress.close()
    assert stream.getvalue() == (
        "iter 120/400 | loss 4.8123 | lr 9.50e-04 | grad norm 0.83 | 5.2k tok/s"
        " | load 1.6x, dropped 25.0% | 2:20 left\n"
        "evaluation at 120: valid loss 4.9000, perplexity 134.3\n"
    )


def test_terminal_keeps_evaluations_and_the_last_line() -> None:
    stream = Terminal()
    progress = Progress(total_iterations=400, stream=stream)
    progress.write(RECORD | {"iteration": 1})
    progress.write({"iteration": 1, "evaluation": True, "valid_loss": 4.9})
    progress.write(RECORD)
    progress.close()
    shown = stream.getvalue()
    assert "evaluation at 1: valid loss 4.9000\n" in shown
    assert shown.rindex("iter 120/400") > shown.index("evaluation at 1")


def test_dense_model_has_no_balance_and_mfu_shows() -> None:
    record = {"iteration": 3, "lm_loss": 2.0, "mfu": 0.314}
    assert training_line(record, 9, None) == "iter 3/9 | loss 2.0000 | MFU 31.4%"


def test_time_left_forgets_the_first_step() -> None:
    stream = io.StringIO()
    progress = Progress(total_iterations=12, start_iteration=0, stream=stream)
    progress.write({"iteration": 1, "step_seconds": 100.0})
    progress.write({"iteration": 2, "step_seconds": 1.0})
    assert stream.getvalue().splitlines()[1] == "iter 2/12 | 0:10 left"


@pytest.mark.parametrize(("seconds", "text"), [(59.6, "1:00"), (3725, "1:02:05"), (90061, "1d 1:01:01"), (-1, "0:00")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(999, "999"), (1500, "1.5k"), (2.5e6, "2.5M"), (3e9, "3.0G")])
def test_short_number(value: float, text: str) -> None:
    assert short_number(value) == text
