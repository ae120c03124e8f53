"""Sinks: where the records of a run go.

The loop makes one flat record per logged iteration and one per evaluation; every sink gets every record.

    record ──┬── JsonlSink         SAVE/metrics.jsonl, always
             ├── TensorBoardSink   --tensorboard-dir
             └── WandbSink         --wandb-project

Only rank 0 builds sinks. A new sink is a class with `write` and `close`, and one line in `SINKS`.
"""

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron_moe.config.schema import LoggingConfig
from megatron_moe.training.records import Record, max_over_mean, read_records


class Sink(Protocol):
    """Takes the records of a run, one after another."""

    def write(self, record: Record) -> None:
        """Keep one record."""
        ...

    def close(self) -> None:
        """Finish; no record comes after this."""
        ...


@dataclass(frozen=True)
class SinkRequest:
    """What a sink is built from; `start_iteration` is the last iteration that is done."""

    logging: LoggingConfig
    save_dir: Path | None
    config: Mapping[str, Any]
    start_iteration: int


# --------------------------------------------------------------------------- metrics.jsonl


class JsonlSink:
    """Appends each record to a file, one JSON object per line, flushed at once.

    A run that resumes from iteration `start_iteration` writes the iterations after it again; records of those
    that an interrupted run left behind are removed first, so that the file holds each iteration once.
    """

    def __init__(self, path: str | Path, start_iteration: int) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._forget_after(start_iteration)
        self._file = self.path.open("a", encoding="utf-8")

    def _forget_after(self, iteration: int) -> None:
        kept = [record for record in read_records(self.path) if record["iteration"] <= iteration]
        # Written beside and moved over: a crash here leaves either the old file or the new one.
        beside = self.path.with_name(self.path.name + ".tmp")
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(_line(record) for record in kept)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)

    def write(self, record: Record) -> None:
        """Append one record."""
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


# --------------------------------------------------------------------------- TensorBoard, Weights & Biases


def scalars(record: Record) -> Iterator[tuple[str, float]]:
    """The numbers of a record as (tag, value); of `expert_load` max over mean and every share, of `moe_layers` all."""
    if record.get("event"):
        return
    prefix = "evaluation" if record.get("evaluation") else "train"
    for name, value in record.items():
        if name == "expert_load":
            for layer, shares in value.items():
                yield f"expert_load/{layer}/max_over_mean", max_over_mean(shares)
                for expert, share in enumerate(shares):
                    yield f"expert_load/{layer}/expert {expert}", share
        elif name == "moe_layers":
            for layer, numbers in value.items():
                yield from ((f"moe/{layer}/{kind}", float(number)) for kind, number in numbers.items())
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name != "iteration":
            yield f"{prefix}/{name}", float(value)


class TensorBoardSink:
    """Writes scalars to TensorBoard event files; the configuration as text.

    A thread of TensorBoard's writes, at most so many seconds later; a step never waits for the disk.
    """

    _FLUSH_SECONDS, _QUEUE = 10, 1_000_000  # events; a queue that is full would make a step wait

    def __init__(self, log_dir: str | Path, config: Mapping[str, Any], start_iteration: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(_missing("--tensorboard-dir", "tensorboard")) from error
        # TensorBoard hides earlier events of the iterations that are about to be written again.
        purge_step = start_iteration + 1 if start_iteration else None
        self._writer = SummaryWriter(
            str(log_dir), purge_step=purge_step, max_queue=self._QUEUE, flush_secs=self._FLUSH_SECONDS
        )
        shown = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", f"```json\n{shown}\n```", start_iteration)

    def write(self, record: Record) -> None:
        """Add the record's scalars at its iteration."""
        for tag, value in scalars(record):
            self._writer.add_scalar(tag, value, record["iteration"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """Logs scalars and the configuration to Weights & Biases; WANDB_MODE=offline writes to disk alone.

    The run's id is kept in `folder`, so that a resumed run continues the same curves.
    """

    def __init__(self, project: str, name: str | None, folder: str | Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(_missing("--wandb-project", "wandb")) from error
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(folder),
            config=dict(config),
            id=_kept_id(folder / "wandb_run_id.txt"),
            resume="allow",
        )
        # An axis of our own: wandb's step must grow, and a resumed run writes some iterations again.
        self._run.define_metric("*", step_metric="iteration")

    def write(self, record: Record) -> None:
        """Log the record's scalars against its iteration."""
        self._run.log({"iteration": record["iteration"], **dict(scalars(record))})

    def close(self) -> None:
        """Finish the run; waits for the upload, if there is one."""
        self._run.finish()


def _kept_id(path: Path) -> str:
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def _missing(flag: str, package: str) -> str:
    return f"{flag} needs the package {package}, which is not installed: pip install -e '.[{package}]'."


# --------------------------------------------------------------------------- which of them a run has


def _jsonl(request: SinkRequest) -> Sink | None:
    if request.save_dir is None:
        return None
    return JsonlSink(request.save_dir / "metrics.jsonl", request.start_iteration)


def _tensorboard(request: SinkRequest) -> Sink | None:
    if request.logging.tensorboard_dir is None:
        return None
    return TensorBoardSink(request.logging.tensorboard_dir, request.config, request.start_iteration)


def _wandb(request: SinkRequest) -> Sink | None:
    project = request.logging.wandb_project
    if project is None:
        return None
    folder = request.logging.wandb_save_dir or request.save_dir or "."
    return WandbSink(project, request.logging.wandb_exp_name, folder, request.config)


SINKS: dict[str, Callable[[SinkRequest], Sink | None]] = {
    "jsonl": _jsonl,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


def build_sinks(
    logging: LoggingConfig,
    save_dir: str | Path | None,
    config_dict: Mapping[str, Any],
    start_iteration: int,
) -> list[Sink]:
    """The sinks that the flags ask for; to be called on rank 0 alone.

    `start_iteration` is the last iteration that is done (0 for a new run, else the checkpoint's).
    Raises ValueError where a package is missing or an existing metrics.jsonl is damaged.
    """
    request = SinkRequest(logging, Path(save_dir) if save_dir else None, config_dict, start_iteration)
    return [sink for build in SINKS.values() if (sink := build(request)) is not None]
