"""The GPU benchmark, tiny and on a CPU: it runs, and its figures are there."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_all_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("bench_gpu")
    assert bench.main(["--device", "cpu", "--tiny", "--json", str(tmp_path / "gpu.json")]) == 0
    figures = json.loads((tmp_path / "gpu.json").read_text())
    names = [name + precision for name in ("mixtral-8x7b", "qwen3-30b-a3b") for precision in ("", ", FP8")]
    assert [row["slice"] for row in figures["steps"]] == names
    assert len(figures["modules"]) == 16 and len(figures["products"]) == 2
    assert all(float(row["difference"]) < 1e-5 for row in figures["kernels"]), figures["kernels"]
    assert "| SwiGLU, weighed |" in capsys.readouterr().out


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = importlib.import_module("bench_gpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench.main([]) == 2
    assert "there is no GPU" in capsys.readouterr().err
