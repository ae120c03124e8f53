"""Progress for people: a live line on a terminal, plain lines elsewhere.

    iter 120/400 | loss 4.8123 | lr 9.51e-04 | grad norm 0.83 | 5.2k tok/s | load 1.7x | 3:12 left
    evaluation at 120: valid loss 4.9011, perplexity 134.4

`load` is the busiest expert's share over the mean share, in the worst layer: 1.0x is perfect balance.
`Progress` is a sink like those of sinks.py.
"""

import sys
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_moe.training.records import Record, max_over_mean

_SMOOTHING = 0.1  # weight of the newest step in the mean step time, from which the time left is told


class Progress:
    """Shows records as they come; `total_iterations` and `start_iteration` are those of the run."""

    def __init__(self, total_iterations: int, start_iteration: int = 0, stream: TextIO | None = None) -> None:
        self.total_iterations = total_iterations
        self.start_iteration = start_iteration
        self._stream = stream or sys.stdout
        self._mean_step_seconds: float | None = None
        self._live: Live | None = None
        if self._stream.isatty():
            # No thread of its own: the line changes when a record comes. Other output appears above it.
            console = Console(file=self._stream, highlight=False)
            live = Live(console=console, auto_refresh=False, transient=False)
            live.start()
            self._live = live

    def write(self, record: Record) -> None:
        """Show one record: training records replace the live line, evaluations stay."""
        if record.get("evaluation"):
            self._print(evaluation_line(record))
            return
        if record.get("event"):
            self._print(f"{record['event']} at {record['iteration']}: {record['text']}")
            return
        line = training_line(record, self.total_iterations, self._seconds_left(record))
        if self._live is None:
            self._print(line)
        else:
            done = record["iteration"] / max(self.total_iterations, 1)
            self._live.update(_with_bar(line, done, self._live.console.width), refresh=True)

    def close(self) -> None:
        """Leave the live line as it is and give the terminal back."""
        if self._live is not None:
            self._live.stop()

    def _print(self, line: str) -> None:
        if self._live is None:
            print(line, file=self._stream, flush=True)
        else:
            self._live.console.print(line, markup=False, soft_wrap=True)

    def _seconds_left(self, record: Record) -> float | None:
        step_seconds = record.get("step_seconds")
        if step_seconds is None:
            return None
        if self._mean_step_seconds is None:
            self._mean_step_seconds = step_seconds
        elif record["iteration"] == self.start_iteration + 2:
            # The first step warms up (allocation, compilation): forget it.
            self._mean_step_seconds = step_seconds
        else:
            self._mean_step_seconds += _SMOOTHING * (step_seconds - self._mean_step_seconds)
        return (self.total_iterations - record["iteration"]) * self._mean_step_seconds


def training_line(record: Record, total_iterations: int, seconds_left: float | None) -> str:
    """One line for a training record; parts whose key is missing or null are left out."""
    parts = [f"iter {record['iteration']}/{total_iterations}"]
    if record.get("lm_loss") is not None:
        parts.append(f"loss {record['lm_loss']:.4f}")
    if record.get("learning_rate") is not None:
        parts.append(f"lr {record['learning_rate']:.2e}")
    if record.get("grad_norm") is not None:
        parts.append(f"grad norm {record['grad_norm']:.2f}")
    if record.get("tokens_per_second") is not None:
        parts.append(f"{short_number(record['tokens_per_second'])} tok/s")
    if record.get("mfu") is not None:
        parts.append(f"MFU {record['mfu']:.1%}")
    balance = balance_summary(record)
    if balance:
        parts.append(balance)
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return " | ".join(parts)


def evaluation_line(record: Record) -> str:
    """One line for an evaluation record, of whichever split it is."""
    split = next(key.removesuffix("_loss") for key in record if key.endswith("_loss"))
    line = f"evaluation at {record['iteration']}: {split} loss {record[f'{split}_loss']:.4f}"
    if record.get(f"{split}_ppl") is not None:
        line += f", perplexity {record[f'{split}_ppl']:.1f}"
    return line


def balance_summary(record: Record) -> str:
    """Busiest expert over the mean, in the worst layer, and the share of dropped copies; '' without both."""
    parts = []
    ratios = [max_over_mean(shares) for shares in (record.get("expert_load") or {}).values()]
    if ratios:
        parts.append(f"load {max(ratios):.1f}x")
    if record.get("dropped_share") is not None:
        parts.append(f"dropped {record['dropped_share']:.1%}")
    return ", ".join(parts)


def short_number(value: float) -> str:
    """1234567.0 -> '1.2M'."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss, or m:ss below an hour; days in front where there are any."""
    minutes, secs = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}:{minutes:02}:{secs:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def _with_bar(line: str, done: float, width: int) -> Text:
    room = min(24, width - len(line) - 3)
    if room < 8:
        return Text(line, no_wrap=True, overflow="ellipsis")
    filled = round(min(done, 1.0) * room)
    bar = (("━" * filled, "green"), ("━" * (room - filled), "bright_black"))
    return Text.assemble(*bar, "  ", line, no_wrap=True, overflow="ellipsis")
