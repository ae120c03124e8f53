"""Draws timelines, simulated or recorded, as text and as PNG: one row per rank, time to the right.

::

    rank 0  F0 F1 ......B0    F2 B1    F3 B2    ...B3
    rank 1  ...F0 B0    F1 B1    F2 B2    F3 B3    ......

A recorded run is a file of JSON lines, one per action, in any order and any unit of time::

    {"rank": 0, "action": "1F0", "start": 0.125, "end": 0.250}

`profile_lines` writes simulated timelines in the same form.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_moe.pipeline.actions import COMPUTE, Action, Kind, Pair, Step, parse
from megatron_moe.pipeline.simulate import Event, Timeline

# Colours that stay apart for colour-blind readers and on grey paper: blue, green, turquoise, amber.
_COLOURS = {
    Kind.F: "#2f6db5",
    Kind.B: "#2e8b57",
    Kind.I: "#35b0a7",
    Kind.W: "#e6a532",
    Kind.REDUCE_GRAD: "#a4508b",
}
_COMMUNICATION = "#777777"
_MEANINGS = {
    Kind.F: "F forward",
    Kind.B: "B backward (input and weights)",
    Kind.I: "I backward, input",
    Kind.W: "W backward, weights",
    Kind.REDUCE_GRAD: "gradient reduction",
}


def profile_lines(timeline: Timeline) -> Iterator[str]:
    """The timeline as JSON lines, as `read_profile` reads them."""
    for event in timeline.events:
        record = {"rank": event.rank, "action": str(event.step), "start": event.start, "end": event.end}
        yield json.dumps(record)


def read_profile(path: str | Path) -> Timeline:
    """Reads a recorded run; its time starts at 0. Raises ValueError that names file and line."""
    events = []
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            event = Event(int(record["rank"]), parse(record["action"]), float(record["start"]), float(record["end"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: not a recorded action ({error!r}); expected an object like "
                '{"rank": 0, "action": "1F0", "start": 0.125, "end": 0.25}'
            ) from error
        if event.end < event.start or event.rank < 0:
            raise ValueError(
                f"{path}, line {number}: an action must not end before it starts, nor its rank be negative"
            )
        events.append(event)
    if not events:
        raise ValueError(f"{path}: no recorded actions in it")
    first = min(event.start for event in events)
    shifted = [Event(e.rank, e.step, e.start - first, e.end - first) for e in events]
    shifted.sort(key=lambda event: (event.end, event.rank))
    return Timeline(1 + max(event.rank for event in events), tuple(shifted))


def digest(timeline: Timeline) -> str:
    """A fingerprint of a timeline; each PNG carries that of what it shows."""
    return hashlib.sha256("\n".join(profile_lines(timeline)).encode()).hexdigest()


def draw_text(timeline: Timeline, max_width: int = 2000) -> str:
    """A text grid: cells as wide as their time, idle time as dots, at most max_width columns."""
    events = [event for event in timeline.events if event.step.parts[0].kind in COMPUTE and event.end > event.start]
    chunks = _chunks(events)
    several = any(chunk > 0 for chunk in chunks.values())
    labels = [_label(event.step, several) for event in events]
    length = max((event.end for event in events), default=0.0)
    widest = max(((len(text) + 1) / (e.end - e.start) for text, e in zip(labels, events, strict=True)), default=1.0)
    scale = min(widest, max_width / length) if length else 1.0

    rows = [["."] * round(length * scale) for _ in range(timeline.num_ranks)]
    for label, event in zip(labels, events, strict=True):
        start, end = round(event.start * scale), round(event.end * scale)
        rows[event.rank][start:end] = label.ljust(end - start)[: end - start]
    margin = len(f"rank {timeline.num_ranks - 1}")
    return "\n".join(f"{f'rank {rank}'.ljust(margin)}  {''.join(row)}" for rank, row in enumerate(rows))


def _label(step: Step, with_stage: bool) -> str:
    stage_of = (
        (lambda action: str(action)) if with_stage else (lambda action: f"{action.kind.value}{action.microbatch}")
    )
    return ";".join(stage_of(part) for part in step.parts)


def _chunks(events: Iterable[Event]) -> dict[tuple[int, int], int]:
    """(rank, stage) -> which of the stages of its rank it is, in the order of a forward."""
    stages: dict[int, set[int]] = {}
    for event in events:
        stages.setdefault(event.rank, set()).update(part.stage for part in event.step.parts)
    return {(rank, stage): i for rank, held in stages.items() for i, stage in enumerate(sorted(held))}


def draw_png(timeline: Timeline, path: str | Path, title: str = "") -> None:
    """Writes a picture: colours are kinds, lighter shades later stages of a rank, numbers micro-batches.

    Needs matplotlib. A pair is drawn as two bars, the forward above the backward. Hatched is idle.
    """
    from matplotlib.figure import Figure  # Heavy, and only drawing needs it.

    num_slots = timeline.length / _shortest(timeline)
    width = min(max(8.0, 1.6 + 0.27 * num_slots), 40.0)
    figure = Figure(figsize=(width, 1.5 + 0.5 * timeline.num_ranks), layout="constrained")
    axes = figure.add_subplot()
    axes.barh(
        range(timeline.num_ranks),
        timeline.length,
        height=0.86,
        color="#f2f2f2",
        edgecolor="#d0d0d0",
        hatch="////",
        lw=0,
    )
    chunks = _chunks(timeline.events)
    num_chunks = 1 + max(chunks.values(), default=0)
    inches_per_time = (width - 1.2) / timeline.length if timeline.length else 1.0
    for event in timeline.events:
        _draw_event(axes, event, chunks, num_chunks, inches_per_time)

    axes.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axes.set_ylim(timeline.num_ranks - 0.45, -0.55)
    axes.set_xlim(0, timeline.length)
    axes.set_xlabel("time")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(title, loc="left", fontsize=11)
    _draw_legend(axes, timeline, num_chunks)
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None, "Description": digest(timeline)})


def _shortest(timeline: Timeline) -> float:
    """The time that a cell with a number in it should have room for; recorded outliers do not count."""
    times = sorted(e.end - e.start for e in timeline.events if e.step.parts[0].kind in COMPUTE and e.end > e.start)
    return times[len(times) // 10] if times else 1.0


def _draw_event(
    axes, event: Event, chunks: dict[tuple[int, int], int], num_chunks: int, inches_per_time: float
) -> None:
    parts = event.step.parts
    height = 0.86 / len(parts) if parts[0].kind in COMPUTE else 0.2
    for i, part in enumerate(parts):
        shade = _shade(part, chunks[event.rank, part.stage], num_chunks)
        middle = event.rank - 0.43 + height * (i + 0.5)
        length = event.end - event.start
        above = 3 if part.kind in COMPUTE else 4  # Communication goes on under computation: draw it on top.
        axes.barh(
            middle,
            length,
            left=event.start,
            height=height,
            color=shade,
            edgecolor="white",
            lw=0.8,
            zorder=above,
        )
        room = length * inches_per_time
        if part.kind in COMPUTE and room > 0.07 * len(str(part.microbatch)):
            dark_text = part.kind is Kind.W or chunks[event.rank, part.stage] > 0
            axes.text(
                event.start + length / 2,
                middle,
                str(part.microbatch),
                ha="center",
                va="center_baseline",
                zorder=5,
                fontsize=9 if isinstance(event.step, Action) else 7.5,
                color="#111111" if dark_text else "white",
            )


def _shade(action: Action, chunk: int, num_chunks: int) -> tuple[float, float, float]:
    from matplotlib.colors import to_rgb

    base = to_rgb(_COLOURS.get(action.kind, _COMMUNICATION))
    towards_white = 0.6 * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    red, green, blue = (channel + (1 - channel) * towards_white for channel in base)
    return (red, green, blue)


def _draw_legend(axes, timeline: Timeline, num_chunks: int) -> None:
    from matplotlib.patches import Patch

    kinds = {part.kind for event in timeline.events for part in event.step.parts}
    handles = [Patch(color=_COLOURS[kind], label=text) for kind, text in _MEANINGS.items() if kind in kinds]
    if not kinds <= set(_MEANINGS):
        handles.append(Patch(color=_COMMUNICATION, label="send or receive"))
    handles.append(Patch(facecolor="#f2f2f2", edgecolor="#d0d0d0", hatch="////", label="idle"))
    if num_chunks > 1:
        handles.append(Patch(facecolor="none", edgecolor="none", label="lighter: a later stage of the rank"))
    if any(isinstance(event.step, Pair) for event in timeline.events):
        handles.append(Patch(facecolor="none", edgecolor="none", label="stacked: an overlapped pair"))
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
    )
