"""The launcher as a user meets it: one clear message for each bad input, exit status 0 only when all is done."""

import json
from pathlib import Path

import numpy as np
import pytest

import pretrain_moe
from megatron_moe.data.indexed_builder import IndexedDatasetBuilder
from megatron_moe.plan.cluster import read_cluster
from tests.helpers.forked import torchrun

TINY = [
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "4",
    "--num-experts",
    "4",
    "--moe-ffn-hidden-size",
    "32",
    "--seq-length",
    "16",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "4",
    "--train-iters",
    "4",
    "--eval-interval",
    "0",
    "--lr",
    "1e-2",
    "--peak-tflops",
    "1",
]
MOCK = ["--mock-data", "--vocab-size", "300"]


def run(*arguments: str) -> int:
    return pretrain_moe.main([*TINY, *arguments])


def losses(save: Path) -> list[float]:
    lines = (save / "metrics.jsonl").read_text().splitlines()
    return [record["lm_loss"] for record in map(json.loads, lines) if "lm_loss" in record]


def make_data(prefix: Path, vocab_size: int = 250, num_tokens: int = 4000) -> str:
    generator = np.random.default_rng(0)
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for _ in range(40):
            builder.add_document(generator.integers(0, vocab_size, num_tokens // 40))
        builder.finalize()
    return str(prefix)


BAD = [
    (["--micro-batchsize", "2"], ["--micro-batchsize", "did you mean", "--micro-batch-size"]),
    (["--lr", "fast"], ["--lr", "fast", "a number"]),
    (["--num-attention-heads", "5", *MOCK], ["--num-attention-heads 5"]),
    (["--expert-model-parallel-size", "3", *MOCK], ["--expert-model-parallel-size 3"]),
    (["--tensor-model-parallel-size", "2", *MOCK], ["--tensor-model-parallel-size 2"]),
    (["--moe-router-topk", "9", *MOCK], ["--moe-router-topk 9", "--num-experts 4"]),
    (["--moe-aux-loss-coeff", "0", *MOCK], ["--moe-aux-loss-coeff"]),
    (["--pipeline-schedule", "zb-z"], ["zb-z", "zb-v"]),
    ([], ["--data-path"]),
    (["--data-path", "nowhere/tokens"], ["nowhere/tokens"]),
    (["--load", "nowhere", *MOCK], ["--load nowhere", "no checkpoint"]),
    (["--vocab-size", "100", "--mock-data"], ["--vocab-size 100", "257"]),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD, ids=[" ".join(a)[:40] or "no data" for a, _ in BAD])
def test_bad_input_is_told_once_and_clearly(
    arguments: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = run(*arguments)
    except SystemExit as exit_:
        status = exit_.code
    said = capsys.readouterr().err
    assert status == 2
    for words in expected:
        assert words in said
    assert "Traceback" not in said


def test_unknown_key_names_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("lr: 1.0e-3\nhiden_size: 64\n")
    assert run("--config", str(tmp_path / "a.yaml")) == 2
    said = capsys.readouterr().err
    assert "a.yaml:2" in said and "hiden_size" in said and "hidden_size" in said


def test_truncated_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = make_data(tmp_path / "tokens")
    binary = tmp_path / "tokens.bin"
    binary.write_bytes(binary.read_bytes()[:-100])
    with pytest.raises(SystemExit) as exit_:
        run("--data-path", prefix)
    assert exit_.value.code == 2
    assert "tokens.bin" in capsys.readouterr().err


def test_data_of_another_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = make_data(tmp_path / "tokens", vocab_size=5000)
    assert run("--data-path", prefix) == 1
    said = capsys.readouterr().err
    assert "wrong tokenizer" in said and "257" in said


def test_training_learns_and_resumes_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stopped after every second iteration and started again with the same command: the same losses, bit for bit."""
    data = ["--data-path", make_data(tmp_path / "tokens"), "--train-iters", "6", "--eval-interval", "3"]
    data += ["--eval-iters", "1"]
    assert run(*data, "--save", str(tmp_path / "whole")) == 0
    cut = [*data, "--save", str(tmp_path / "cut"), "--exit-interval", "2"]
    for _ in range(3):
        assert run(*cut) == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "cut")) == 6
    capsys.readouterr()
    assert run(*cut) == 0
    assert "nothing is left to do" in capsys.readouterr().out


def test_resume_with_another_model_shows_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = ["--save", str(tmp_path), *MOCK]
    assert run(*save) == 0
    with pytest.raises(SystemExit) as exit_:
        run(*save, "--num-experts", "8", "--moe-router-topk", "1", "--moe-router-pre-softmax")
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "num-experts" in said and "4" in said and "8" in said and "moe-router-topk" in said


def test_nan_ends_the_run_before_it_harms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*MOCK, "--lr", "1e30", "--clip-grad", "0", "--lr-decay-style", "constant", "--save", str(tmp_path)) == 1
    said = capsys.readouterr().err
    assert "not touched" in said and "iteration" in said


def test_dump_config_is_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*MOCK, "--lr", "0.005", "--dump-config") == 0
    dumped = capsys.readouterr().out
    assert "--lr" in dumped
    (tmp_path / "dumped.yaml").write_text(dumped)
    assert pretrain_moe.main(["--config", str(tmp_path / "dumped.yaml"), "--dump-config"]) == 0
    again = capsys.readouterr().out
    assert [line.partition("#")[0].strip() for line in again.splitlines()] == [
        line.partition("#")[0].strip() for line in dumped.splitlines()
    ]


def test_topology(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--world-size", "8", "--expert-model-parallel-size", "4", "--global-batch-size", "16"]
    assert run("--print-topology", *sizes) == 0
    assert "[0, 1, 2, 3]" in capsys.readouterr().out


def test_a_measured_cluster_is_one_for_the_planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.yaml"
    assert run("--check-cluster", str(path)) == 2
    assert "one rank has none; use torchrun" in capsys.readouterr().err
    layout = ["--expert-model-parallel-size", "2", "--check-cluster"]
    status, said = torchrun(2, [*TINY, *layout, str(path)]).wait(timeout=120)
    assert status == 0 and "ep      all_to_all" in said and ("below 70%" in said or "slow " in said), said
    assert read_cluster(path).gpus_per_node == 2
    status, said = torchrun(2, [*TINY, *layout, str(tmp_path / "nowhere" / "here.yaml")]).wait(timeout=120)
    assert status != 0 and "there is no such folder" in said
