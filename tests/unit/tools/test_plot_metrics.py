"""plot_metrics draws what is in metrics.jsonl, and says what is wrong with a folder that has none."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from tools.plot_metrics import main, plot, read_run, smoothed


def write_run(folder: Path, layers: tuple[int, ...]) -> Path:
    folder.mkdir()
    lines = []
    for iteration in range(1, 61):
        record = {"iteration": iteration, "lm_loss": 6.0, "learning_rate": 1e-3, "grad_norm": 0.5}
        if layers:
            record["expert_load"] = {f"layer {layer}": [0.75, 0.25] for layer in layers}
        lines.append(json.dumps(record))
    lines.append(json.dumps({"iteration": 60, "evaluation": True, "valid_loss": 6.5}))
    lines.append(json.dumps({"iteration": 60, "evaluation": True, "test_loss": 6.6}))
    lines.append(json.dumps({"iteration": 60, "event": "skip", "message": "skipped the batch"}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_png_of_two_runs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "moe", (1, 3)), write_run(tmp_path / "dense", ())]
    output = tmp_path / "pictures" / "both.png"
    assert main([*map(str, runs), "--output", str(output), "--reference-loss", "7"]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_panels_show_the_records(tmp_path: Path) -> None:
    figure = plot([read_run(write_run(tmp_path / "run", (1, 11, 3)))], 7.1, "unigram entropy")
    panels = {ax.get_title(loc="left"): ax for ax in figure.axes}
    heat_maps = [title for title in panels if title.startswith("Experts' load")]
    assert heat_maps == [f"Experts' load, layer {layer}" for layer in (1, 3, 11)]
    colours = panels["Experts' load, layer 3"].collections[0].get_array()
    assert colours is not None and np.allclose(np.asarray(colours)[:, 0], [1.5, 0.5])
    legend = panels["Loss"].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "training",
        "validation",
        "unigram entropy 7.10",
    ]
    plt.close(figure)


def test_dense_run_has_no_load_panels(tmp_path: Path) -> None:
    figure = plot([read_run(write_run(tmp_path / "run", ()))], None, "")
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["Loss", "Learning rate", "Gradient norm"]
    plt.close(figure)


def test_deep_model_is_drawn_in_eight_heat_maps(tmp_path: Path) -> None:
    figure = plot([read_run(write_run(tmp_path / "run", tuple(range(30))))], None, "")
    titles = [ax.get_title(loc="left") for ax in figure.axes if "load, layer" in ax.get_title(loc="left")]
    assert len(titles) == 8
    assert titles[0].endswith("layer 0") and titles[-1].endswith("layer 29")
    plt.close(figure)


@pytest.mark.parametrize(("text", "message"), [(None, "does not exist"), ("", "no training record")])
def test_folder_without_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main([str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_smoothing_keeps_a_line_and_a_mean() -> None:
    line = np.linspace(0.0, 1.0, 301)
    assert np.allclose(smoothed(line.tolist())[3:-3], line[3:-3])
    assert np.allclose(smoothed([2.0] * 7), 2.0)
