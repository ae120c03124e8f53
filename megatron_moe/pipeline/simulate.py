"""Runs a schedule on paper: when each action starts and ends, who waits, and how much memory lives.

Every rank does its list in order. An action starts when its rank is free and what it needs has arrived;
if no rank can go on and some are not done, the schedule deadlocks, and the error says where each one
waits. Execution on paper is thus the proof that the schedule finishes, for any durations: what an action
waits for depends on the lists alone.

The bubble of a rank is measured in two ways::

    rank 1   .....F0 F1 ..B0 ..B1 ........    . = idle
             |<----- step: 17 idle ----->|    from the start of the step to its end on the slowest rank
                  |span: 4 idle --|          between the rank's own first and last action

"step" is what one waits for when the optimizer step is synchronised over ranks (a global gradient norm
does that); "span" is what would remain if every rank went on alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_moe.pipeline.actions import COMPUTE, RECVS, SENDS, Action, Kind, Schedule, Step
from megatron_moe.pipeline.deadlock import run_lists
from megatron_moe.pipeline.schedules.spec import Times
from megatron_moe.pipeline.validate import Result, required, results, send_of, validate

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Durations:
    """Seconds (any unit) per micro-batch **of one stage**: one number for all stages, or one for each.

    A full backward takes `backward + weight`. `comm` is the time from the end of an action to the arrival
    of its result on another rank; ranks compute meanwhile.
    """

    forward: PerStage = 1.0
    backward: PerStage = 1.0
    weight: PerStage = 1.0
    comm: float = 0.0

    def of(self, step: Step) -> float:
        """A pair takes the sum of its parts: what it hides is communication, not computation."""
        return sum(self._of_action(part) for part in step.parts)

    def _of_action(self, action: Action) -> float:
        kinds = {
            Kind.F: (self.forward,),
            Kind.B: (self.backward, self.weight),
            Kind.I: (self.backward,),
            Kind.W: (self.weight,),
        }
        per_kind = kinds.get(action.kind, ())
        return sum(value if isinstance(value, float | int) else value[action.stage] for value in per_kind)


def per_rank_durations(times: Times, chunks_per_rank: int, comm: float = 0.0) -> Durations:
    """Durations of stages of equal size, from what one micro-batch costs a whole rank.

    This makes schedules with different numbers of stages comparable: the same model on the same ranks.
    """
    n = chunks_per_rank
    return Durations(times.forward / n, times.backward / n, times.weight / n, comm)


@dataclass(frozen=True, slots=True)
class Event:
    """A step and when it ran, simulated or recorded."""

    rank: int
    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When everything happened, in the order of ends.

    A simulated timeline holds compute steps; a recorded one may hold communication too, which does not
    count as busy: what a rank waits for is idle time.
    """

    num_ranks: int
    events: tuple[Event, ...]

    @cached_property
    def length(self) -> float:
        """From the first start to the last end, over all ranks."""
        return _length(self.events)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each rank computes."""
        return tuple(sum(event.end - event.start for event in events) for events in self._computation)

    @cached_property
    def span(self) -> tuple[float, ...]:
        """From the first to the last computation of each rank."""
        return tuple(_length(events) for events in self._computation)

    @cached_property
    def _computation(self) -> list[list[Event]]:
        by_rank: list[list[Event]] = [[] for _ in range(self.num_ranks)]
        for event in self.events:
            if event.step.parts[0].kind in COMPUTE:
                by_rank[event.rank].append(event)
        return by_rank

    @property
    def step_bubble(self) -> tuple[float, ...]:
        """Idle time of each rank from the start of the step to its end on the slowest rank."""
        return tuple(self.length - busy for busy in self.busy)

    @property
    def span_bubble(self) -> tuple[float, ...]:
        """Idle time of each rank between its own first and last action."""
        return tuple(span - busy for span, busy in zip(self.span, self.busy, strict=True))

    @property
    def bubble_fraction(self) -> tuple[float, ...]:
        """The share of the step that each rank is idle."""
        return tuple(bubble / self.length if self.length else 0.0 for bubble in self.step_bubble)


def _length(events: Sequence[Event]) -> float:
    return max(e.end for e in events) - min(e.start for e in events) if events else 0.0


def simulate(schedule: Schedule, durations: Durations | None = None) -> Timeline:
    """Times a schedule, with or without communication actions.

    Without them a result travels as soon as it is there. With them it travels when both its send and its
    receive have been reached, and neither holds up its rank (asynchronous sends and receives).

    Raises ScheduleError if the schedule is not valid and DeadlockError if it does not finish.
    """
    validate(schedule)
    durations = durations or Durations()
    explicit = any(action.kind in SENDS for rank in range(schedule.num_ranks) for action in schedule.actions(rank))
    ready: dict[Result, float] = {}  # when a result is there, on the rank that made it
    posted: dict[Action, float] = {}  # when a rank reached a send or a receive
    clock = [0.0] * schedule.num_ranks
    events: list[Event] = []

    def arrival(rank: int, need: Result) -> float | None:
        if schedule.rank_of(need.stage) == rank:
            return ready.get(need)
        if not explicit:
            return ready[need] + durations.comm if need in ready else None
        send = send_of(need)
        if send not in posted or send.partner not in posted:
            return None
        return max(posted[send], posted[send.partner]) + durations.comm

    def advance(rank: int, step: Step) -> bool:
        times = [arrival(rank, need) for part in step.parts for need in required(part, schedule.num_stages)]
        if None in times:
            return False
        start = max([clock[rank], *(time for time in times if time is not None)])
        for part in step.parts:
            if part.kind in SENDS | RECVS:
                posted[part] = clock[rank]
            elif part.kind in COMPUTE:
                clock[rank] = start + durations.of(step)
                ready.update(dict.fromkeys(results(part), clock[rank]))
        if step.parts[0].kind in COMPUTE:
            events.append(Event(rank, step, start, clock[rank]))
        return True

    run_lists(schedule, advance, lambda rank, need: arrival(rank, need) is not None)
    return Timeline(schedule.num_ranks, tuple(sorted(events, key=lambda event: (event.end, event.rank))))


def peak_activations(
    schedule: Schedule, held_for_input: float = 1.0, held_for_weight: float = 1.0
) -> tuple[float, ...]:
    """The most that lives on each rank at once; the unit is one micro-batch of one stage.

    A forward leaves `held_for_input` (M_B in the zero-bubble paper) until its backward; a backward for the
    input leaves `held_for_weight` (M_W: inputs of linear layers and gradients of their outputs) until the
    backward for the weights; a full backward leaves nothing. Depends on the order alone, not on durations.
    """
    peaks = []
    for rank in range(schedule.num_ranks):
        live = peak = 0.0
        for action in schedule.actions(rank):
            if action.kind is Kind.F:
                live += held_for_input
            elif action.kind is Kind.B:
                live -= held_for_input
            elif action.kind is Kind.I:
                live += held_for_weight - held_for_input
            elif action.kind is Kind.W:
                live -= held_for_weight
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)
