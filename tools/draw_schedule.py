"""Simulates and draws a pipeline schedule, or draws what a run recorded.

python tools/draw_schedule.py --schedule zb-v --pp 4 --microbatches 8 --text
python tools/draw_schedule.py --schedule dualpipe-v --pp 4 --microbatches 8 --output dualpipe-v.png
python tools/draw_schedule.py --profile schedule_profile.jsonl --output run.png
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_moe.pipeline.draw import draw_png, draw_text, profile_lines, read_profile
from megatron_moe.pipeline.schedules import SCHEDULES, Times, make_schedule
from megatron_moe.pipeline.simulate import Timeline, peak_activations, per_rank_durations, simulate


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(SCHEDULES)}")
    source.add_argument("--profile", metavar="FILE.jsonl", help="what a run recorded with --profile-schedule")
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks (default 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches per step (default 8)")
    parser.add_argument("--virtual", type=int, help="stages per rank, where the schedule leaves it free (default 2)")
    times = parser.add_argument_group("time that one micro-batch costs one rank, over all its stages")
    times.add_argument("--forward", type=float, default=1.0)
    times.add_argument("--backward", type=float, default=1.0, help="for the input alone")
    times.add_argument("--weight", type=float, default=1.0, help="for the weights alone")
    times.add_argument("--comm", type=float, default=0.0, help="from one rank to another, per message (default 0)")
    parser.add_argument(
        "--weight-memory",
        type=float,
        default=1.0,
        help="what a deferred weight gradient keeps alive, as a share of what a forward does (default 1)",
    )
    parser.add_argument("--output", metavar="FILE.png", help="write a picture")
    parser.add_argument("--text", action="store_true", help="draw as text")
    parser.add_argument("--json", action="store_true", help="print the timeline as JSON lines, and nothing else")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        timeline, title, report = _recorded(args) if args.profile else _simulated(args)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print("\n".join(profile_lines(timeline)))
    else:
        print(title)
        if args.text:
            print(draw_text(timeline))
        print(report)
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        draw_png(timeline, args.output, title)
    return 0


def _recorded(args: argparse.Namespace) -> tuple[Timeline, str, str]:
    timeline = read_profile(args.profile)
    return timeline, f"{args.profile}: {timeline.num_ranks} ranks", _table(timeline, None)


def _simulated(args: argparse.Namespace) -> tuple[Timeline, str, str]:
    times = Times(args.forward, args.backward, args.weight)
    negative = [name for name in ("forward", "backward", "weight", "comm") if getattr(args, name) < 0]
    if negative:
        raise ValueError(f"--{negative[0]} is a time and must not be negative, but it is {getattr(args, negative[0])}")
    schedule = make_schedule(args.schedule, args.pp, args.microbatches, args.virtual)
    chunks = schedule.chunks_per_rank
    timeline = simulate(schedule, per_rank_durations(times, chunks, args.comm))
    peaks = [peak / chunks for peak in peak_activations(schedule, held_for_weight=args.weight_memory)]
    per_rank = f", {chunks} stages per rank" if chunks > 1 else ""
    title = f"{schedule.name}: {args.pp} ranks, {args.microbatches} micro-batches{per_rank}"
    lines = [_table(timeline, peaks), ""]
    lines.append(
        f"bubble of the step   {max(timeline.step_bubble):.6g} of {timeline.length:.6g} "
        f"({max(timeline.bubble_fraction):.1%})"
    )
    lines.append(f"bubble within a span {max(timeline.span_bubble):.6g}")
    closed_form = SCHEDULES[args.schedule].closed_form(args.pp, args.microbatches, chunks, times)
    if closed_form is None:
        lines.append("closed form          none for these numbers")
    else:
        which = "of the step" if closed_form.of == "step" else "within a span"
        free = " (with free communication)" if args.comm else ""
        lines.append(f"closed form          {which}: {closed_form.text} = {closed_form.value:.6g}{free}")
    return timeline, title, "\n".join(lines)


def _table(timeline: Timeline, peaks: Sequence[float] | None) -> str:
    """Per rank: busy time, both bubbles, and peak activations in micro-batches of a whole rank."""
    peak_header = "  peak activations" if peaks else ""
    rows = [f"{'rank':>4}  {'busy':>9}  {'step bubble':>11}  {'span bubble':>11}{peak_header}"]
    for rank in range(timeline.num_ranks):
        peak = f"  {peaks[rank]:>16.6g}" if peaks else ""
        rows.append(
            f"{rank:>4}  {timeline.busy[rank]:>9.6g}  {timeline.step_bubble[rank]:>11.6g}  "
            f"{timeline.span_bubble[rank]:>11.6g}{peak}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
