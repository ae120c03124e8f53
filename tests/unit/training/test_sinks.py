"""Sinks keep every record: once each in metrics.jsonl after a resume, readable in TensorBoard and wandb."""

import json
import sys
import threading
from pathlib import Path

import pytest

from megatron_moe.config.schema import LoggingConfig
from megatron_moe.training.records import max_over_mean, read_records
from megatron_moe.training.sinks import JsonlSink, TensorBoardSink, WandbSink, build_sinks, scalars


def train_record(iteration: int) -> dict:
    loads = {"layer 1": [0.5, 0.25, 0.25, 0.0]}
    return {"iteration": iteration, "lm_loss": 5.0 - iteration / 10, "mfu": None, "expert_load": loads}


def evaluation(iteration: int) -> dict:
    return {"iteration": iteration, "evaluation": True, "valid_loss": 4.5}


def write_run(path: Path, iterations: range, start_iteration: int) -> None:
    sink = JsonlSink(path, start_iteration)
    for iteration in iterations:
        sink.write(train_record(iteration))
        if iteration % 2 == 0:
            sink.write(evaluation(iteration))
    sink.close()


@pytest.mark.parametrize("cut", ["", '{"iteration": 6, "lm_lo'])
def test_resumed_file_equals_the_uninterrupted_one(tmp_path: Path, cut: str) -> None:
    whole, resumed = tmp_path / "whole.jsonl", tmp_path / "resumed.jsonl"
    write_run(whole, range(1, 9), start_iteration=0)
    write_run(resumed, range(1, 6), start_iteration=0)
    with resumed.open("a") as file:
        file.write(cut)  # killed while it wrote
    write_run(resumed, range(5, 9), start_iteration=4)  # the last checkpoint is that of iteration 4
    assert resumed.read_bytes() == whole.read_bytes()


def test_new_run_replaces_records_that_no_checkpoint_covers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_run(path, range(1, 4), start_iteration=0)
    write_run(path, range(1, 3), start_iteration=0)
    assert [record["iteration"] for record in read_records(path)] == [1, 2, 2]


def test_record_is_on_disk_before_close(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", 0)
    sink.write(train_record(1))
    assert read_records(tmp_path / "metrics.jsonl") == [train_record(1)]
    sink.close()


def test_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": \n{"iteration": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        JsonlSink(path, 3)
    assert path.read_text().startswith('{"iteration": 1}\n{"iteration": \n')  # nothing was thrown away


def test_scalars_of_a_record() -> None:
    found = dict(scalars(train_record(1)))
    assert found["train/lm_loss"] == pytest.approx(4.9)
    assert found["expert_load/layer 1/max_over_mean"] == pytest.approx(2.0)
    assert found["expert_load/layer 1/expert 1"] == 0.25
    assert "train/mfu" not in found and "train/iteration" not in found
    assert dict(scalars(evaluation(2))) == {"evaluation/valid_loss": 4.5}


def test_no_tokens_is_balanced() -> None:
    assert max_over_mean([0.0, 0.0]) == 1.0


def test_tensorboard_events_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path, {"seed": 1234}, start_iteration=0)
    for iteration in (1, 2):
        sink.write(train_record(iteration))
    sink.write(evaluation(2))
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/lm_loss")]
    assert losses == [(1, pytest.approx(4.9)), (2, pytest.approx(4.8))]
    assert [event.step for event in events.Scalars("evaluation/valid_loss")] == [2]
    assert b"1234" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_a_step_does_not_wait_for_tensorboards_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    disk, told = threading.Event(), threading.Event()
    write = RecordWriter.write

    def stuck(writer: RecordWriter, data: bytes) -> None:
        assert disk.wait(60)
        write(writer, data)

    sink = TensorBoardSink(tmp_path, {}, start_iteration=0)
    monkeypatch.setattr(RecordWriter, "write", stuck)

    def steps() -> None:
        for iteration in range(1, 40):  # more events than TensorBoard's own queue takes
            sink.write(train_record(iteration))
        told.set()

    threading.Thread(target=steps, daemon=True).start()
    ran_on = told.wait(20)
    disk.set()
    sink.close()
    assert ran_on


def test_wandb_offline_writes_a_run_and_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for _ in range(2):
        sink = WandbSink("project", "name", tmp_path, {"num_experts": 8})
        sink.write(train_record(1))
        sink.close()
    run_id = (tmp_path / "wandb_run_id.txt").read_text().strip()
    runs = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))
    assert runs and all(list(run.glob("*.wandb")) for run in runs)
    written = b"".join(file.read_bytes() for run in runs for file in run.glob("*.wandb"))
    assert b"num_experts" in written and b"train/lm_loss" in written


@pytest.mark.parametrize(
    ("module", "flags", "flag"),
    [
        ("torch.utils.tensorboard", {"tensorboard_dir": "events"}, "--tensorboard-dir"),
        ("wandb", {"wandb_project": "project"}, "--wandb-project"),
    ],
)
def test_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, flags: dict, flag: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"{flag} needs .* pip install -e '\.\["):
        build_sinks(LoggingConfig(**flags), tmp_path, {}, 0)


def test_build_sinks_follows_the_flags(tmp_path: Path) -> None:
    assert build_sinks(LoggingConfig(), None, {}, 0) == []
    logging = LoggingConfig(tensorboard_dir=str(tmp_path / "events"))
    sinks = build_sinks(logging, tmp_path / "run", {}, 0)
    assert [type(sink) for sink in sinks] == [JsonlSink, TensorBoardSink]
    for sink in sinks:
        sink.write(train_record(1))
        sink.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1]
