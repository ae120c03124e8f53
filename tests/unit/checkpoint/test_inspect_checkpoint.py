"""The tool that looks into checkpoints."""

from pathlib import Path

import pytest

from tests.unit.checkpoint.small import save, state
from tests.unit.checkpoint.test_save_and_load import flip
from tools.inspect_checkpoint import main


def test_list_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1, state(1.0))
    second = save(tmp_path, 2, state(2.0))
    assert main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[0] == "1" and lines[2].split()[:2] == ["->", "2"] and lines[2].endswith("one process")
    assert main(["verify", str(tmp_path)]) == 0
    flip(second / "rank_00000.safetensors", -1)
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "iter_0000001: whole" in out and "rank_00000.safetensors is damaged: checksum" in out


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = state(1.0)
    other["model.a"][2, 3] = 1.5
    other["optimizer.exp_avg.a"][0, 0] = float("nan")
    del other["model.scalar"]
    save(tmp_path / "a", 1, state(1.0))
    path = save(tmp_path / "b", 1, other)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "a"), str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("only in") and lines[0].endswith("model.scalar")
    assert lines[1] == "1 tensors are equal, bit for bit; 2 differ."
    assert [line.split()[-1] for line in lines[3:]] == ["optimizer.exp_avg.a", "model.a"]
    assert lines[4].split()[:2] == ["0.333", "0.5"]


def test_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1, state(1.0))
    assert main(["print", str(tmp_path), "model.a"]) == 0
    assert capsys.readouterr().out.startswith("model.a  float64 [4, 6]\nmean 1  std 0  min 1  max 1\n")
    assert main(["print", str(tmp_path), "model."]) == 0
    assert "model.b  bfloat16 [3]" in capsys.readouterr().out
    assert main(["print", str(tmp_path), "nothing"]) == 2
    assert main(["print", str(tmp_path / "none"), "model.a"]) == 2
    assert "is no checkpoint and holds none" in capsys.readouterr().err
