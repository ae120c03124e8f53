"""What the registry knows about a schedule, and the writer its generator is built on."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_moe.pipeline.actions import Action, Kind, Pair, Placement, Schedule, Step, stage_to_rank


@dataclass(frozen=True)
class Times:
    """Seconds (any unit) that one micro-batch costs one rank, over all the stages it holds.

    `backward` is for the input and `weight` for the weights; a full backward costs their sum.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True)
class ClosedForm:
    """A published formula for the bubble, where one holds.

    `of` says what it measures: "step", the idle time of a rank between the start of the step and its
    end on the slowest rank; or "span", the idle time between a rank's own first and last action.
    """

    text: str
    value: float
    of: Literal["step", "span"] = "step"


@dataclass(frozen=True)
class ScheduleSpec:
    """One row of the registry: how to make a schedule and what to say about it.

    generate    (pp, num_microbatches, num_virtual) -> the list of each rank
    placement   where stages live
    chunks      stages per rank: a number, or None where the user chooses (`num_virtual`)
    problems    (pp, num_microbatches, num_virtual) -> why it cannot be made, as full sentences;
                sizes below 1 and a num_virtual that contradicts `chunks` are found by the registry
    closed_form (pp, num_microbatches, num_virtual, times) -> the formula for the bubble, or None
                where none is published for these numbers
    """

    name: str
    summary: str
    generate: Callable[[int, int, int], list[list[Step]]]
    placement: Placement
    chunks: int | None
    problems: Callable[[int, int, int], list[str]]
    closed_form: Callable[[int, int, int, Times], ClosedForm | None]

    def build(self, pp: int, num_microbatches: int, num_virtual: int) -> Schedule:
        ranks = tuple(tuple(steps) for steps in self.generate(pp, num_microbatches, num_virtual))
        return Schedule(self.name, num_microbatches, pp * num_virtual, self.placement, ranks)


def no_problems(pp: int, num_microbatches: int, num_virtual: int) -> list[str]:
    """For schedules that admit every number of ranks and of micro-batches."""
    return []


def local_stages(placement: Placement, rank: int, pp: int, num_virtual: int) -> list[int]:
    """The stages of a rank in the order in which a micro-batch visits them."""
    return [stage for stage in range(pp * num_virtual) if stage_to_rank(placement, stage, pp) == rank]


class RankWriter:
    """Writes the list of one rank; every stage sees its micro-batches in order 0, 1, 2, ...

    A generator says only *what comes next on which stage*; the writer counts. `input` leaves its weight
    gradient in a queue, and `weight` takes the oldest one out of it (of one stage, if one is named).
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._next: dict[tuple[Kind, int], int] = {}
        self._deferred: deque[Action] = deque()

    def done(self, kind: Kind, stage: int) -> int:
        """How many forwards (F) or backwards (B: full and for the input together) a stage has had."""
        return self._next.get((kind, stage), 0)

    def forward(self, stage: int) -> None:
        self.steps.append(self._count(Kind.F, Kind.F, stage))

    def backward(self, stage: int) -> None:
        self.steps.append(self._count(Kind.B, Kind.B, stage))

    def input(self, stage: int) -> None:
        action = self._count(Kind.I, Kind.B, stage)
        self.steps.append(action)
        self._deferred.append(Action(Kind.W, stage, action.microbatch))

    def weight(self, stage: int | None = None) -> None:
        waiting = (action for action in self._deferred if stage in (None, action.stage))
        oldest = next(waiting)
        self._deferred.remove(oldest)
        self.steps.append(oldest)

    def overlap(self, forward_stage: int, backward_stage: int) -> None:
        forward = self._count(Kind.F, Kind.F, forward_stage)
        self.steps.append(Pair(forward, self._count(Kind.B, Kind.B, backward_stage)))

    def all_weights(self) -> None:
        """Every weight gradient that still waits, the oldest first."""
        while self._deferred:
            self.weight()

    def _count(self, kind: Kind, counted_as: Kind, stage: int) -> Action:
        microbatch = self._next.get((counted_as, stage), 0)
        self._next[counted_as, stage] = microbatch + 1
        return Action(kind, stage, microbatch)
