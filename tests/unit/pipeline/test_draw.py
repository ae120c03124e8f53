"""Drawing, the recorded form of timelines, the command line, and that the pictures in the docs are fresh."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from megatron_moe.pipeline.draw import digest, draw_text, profile_lines, read_profile
from megatron_moe.pipeline.schedules import SCHEDULES, ScheduleSpec, Times, make_schedule
from megatron_moe.pipeline.simulate import Durations, per_rank_durations, simulate
from tools.draw_schedule import main

ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "docs" / "images" / "schedules"


def test_text_of_1f1b() -> None:
    assert draw_text(simulate(make_schedule("1f1b", 2, 3))).splitlines() == [
        "rank 0  F0 F1 ......B0    F2 B1    ...B2    ",
        "rank 1  ...F0 B0    F1 B1    F2 B2    ......",
    ]


def test_text_names_stages_where_a_rank_has_several_and_stays_within_its_width() -> None:
    timeline = simulate(make_schedule("dualpipe-v", 2, 4))
    assert "0F3;3B1" in draw_text(timeline)
    narrow = draw_text(timeline, max_width=60).splitlines()
    assert {len(line) for line in narrow} == {60 + len("rank 0  ")}


def test_profiles_round_trip(tmp_path: Path) -> None:
    timeline = simulate(make_schedule("dualpipe-v", 2, 4), Durations(comm=0.25))
    path = tmp_path / "profile.jsonl"
    path.write_text("\n".join(profile_lines(timeline)))
    assert read_profile(path) == timeline


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"rank": 0, "action": "0F0", "start": 0, "end": 1}', "{"], "line 2: not a recorded action"),
        (['{"rank": 0, "action": "F0", "start": 0, "end": 1}'], "line 1: .*'F0' is not an action"),
        (['{"rank": 0, "action": "0F0", "start": 0}'], "line 1: .*end"),
        (['{"rank": 0, "action": "0F0", "start": 2, "end": 1}'], "line 1: an action must not end before"),
        ([], "no recorded actions"),
    ],
)
def test_bad_profiles_are_refused_with_their_line(tmp_path: Path, lines: list[str], message: str) -> None:
    path = tmp_path / "profile.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        read_profile(path)


def test_tool_reports_bubble_closed_form_and_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", "interleaved-1f1b", "--pp", "4", "--microbatches", "8", "--virtual", "2", "--text"]) == 0
    out = capsys.readouterr().out
    assert "interleaved-1f1b: 4 ranks, 8 micro-batches, 2 stages per rank" in out
    assert "bubble of the step   4.5 of 28.5 (15.8%)" in out
    assert "closed form          of the step: (p-1)(F+B+W)/v = 4.5" in out
    assert [line.split()[-1] for line in out.splitlines() if re.match(r" +\d ", line)] == [
        "5.5",
        "4.5",
        "3.5",
        "2.5",
    ]
    assert "7F0 7B0" in out


def test_tool_draws_a_recorded_run_with_communication(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sending is not computing: each rank is idle for 1 s of 3."""
    records = [
        (0, "0F0", 5, 6),
        (0, "0SEND_F0", 6, 6.1),
        (0, "0B0", 7, 8),
        (1, "1F0", 6, 6.5),
        (1, "1B0", 6.5, 8),
    ]
    path, picture = tmp_path / "run.jsonl", tmp_path / "run.png"
    path.write_text(
        "\n".join(json.dumps(dict(zip(["rank", "action", "start", "end"], r, strict=True))) for r in records)
    )
    assert main(["--profile", str(path), "--text", "--output", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["0", "2", "1", "1"]
    assert lines[-1].split() == ["1", "2", "1", "0"]
    assert picture.stat().st_size > 5000


def test_tool_prints_timelines_that_it_can_draw_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedule", "zb-v", "--pp", "2", "--microbatches", "4", "--json"]) == 0
    path = tmp_path / "timeline.jsonl"
    path.write_text(capsys.readouterr().out)
    assert read_profile(path) == simulate(make_schedule("zb-v", 2, 4), per_rank_durations(Times(), 2))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--schedule", "dualpipe-v", "--pp", "4", "--microbatches", "4"],
            "needs at least 2 micro-batches per",
        ),
        (["--schedule", "1f1b", "--forward", "-1"], "--forward is a time and must not be negative"),
        (["--profile", "does/not/exist.jsonl"], "does/not/exist.jsonl"),
    ],
)
def test_tool_refuses_with_a_sentence(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", SCHEDULES)
def test_pictures_in_the_docs_are_fresh(name: str) -> None:
    """Each picture carries the fingerprint of the timeline that it shows."""
    schedule = make_schedule(name, 4, 8)
    shown = Image.open(PICTURES / f"{name}.png").info["Description"]
    assert shown == digest(simulate(schedule, per_rank_durations(Times(), schedule.chunks_per_rank)))
    assert f"images/schedules/{name}.png" in (ROOT / "docs" / "schedules.md").read_text()


def test_the_worked_example_in_the_docs() -> None:
    """ZB-H2, as the docs add it: no bubble within a span if F = B = W, and 2p-1 micro-batches of memory."""
    page = (ROOT / "docs" / "schedules.md").read_text()
    names: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)
    spec = names["ZB_H2"]
    assert isinstance(spec, ScheduleSpec)
    timeline = simulate(spec.build(4, 12, 1))
    assert timeline.span_bubble == (0.0,) * 4
    unequal = simulate(spec.build(4, 12, 1), Durations(1.0, 1.5, 1.0))
    form = spec.closed_form(4, 12, 1, Times(1.0, 1.5, 1.0))
    assert form is not None
    assert max(unequal.span_bubble) == pytest.approx(form.value)
