"""The vocabulary of a pipeline schedule: actions, pairs of actions, and per-rank lists of them.

A schedule is data. It says which rank does which action, in which order, and nothing about how::

    rank 0   0F0  0F1  0B0  0F2  0B1  0B2        1F0 = stage 1, Forward, micro-batch 0
    rank 1   1F0  1B0  1F1  1B1  1F2  1B2

Generators (`schedules/`) write such lists, passes (`passes.py`) insert communication, the simulator
(`simulate.py`) times them and proves that they finish, and the runtime executes them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

Placement = Literal["loop", "v"]


class ScheduleError(ValueError):
    """A schedule that cannot be made, is not valid, or does not finish."""


class Kind(Enum):
    """What an action does; the value is its spelling in the text form."""

    F = "F"  # forward
    B = "B"  # backward, for the input and for the weights
    I = "I"  # noqa: E741  backward for the input alone; its W comes later
    W = "W"  # backward for the weights alone
    SEND_F = "SEND_F"  # send this stage's output to the next stage
    RECV_F = "RECV_F"  # receive this stage's input from the previous stage
    SEND_B = "SEND_B"  # send the gradient of this stage's input to the previous stage
    RECV_B = "RECV_B"  # receive the gradient of this stage's output from the next stage
    REDUCE_GRAD = "REDUCE_GRAD"  # the weight gradients of this stage are complete: reduce them


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECVS = frozenset({Kind.RECV_F, Kind.RECV_B})

# Each communication action has its partner `stage + offset`, which does the `other` kind.
_PARTNER = {
    Kind.SEND_F: (Kind.RECV_F, +1),
    Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1),
    Kind.RECV_B: (Kind.SEND_B, +1),
}
_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)|(\d+)REDUCE_GRAD")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that one rank does for one stage and one micro-batch.

    `REDUCE_GRAD` belongs to a stage and to no micro-batch: its `microbatch` is -1.
    """

    kind: Kind
    stage: int
    microbatch: int = -1

    @property
    def parts(self) -> tuple["Action", ...]:
        return (self,)

    @property
    def partner(self) -> "Action":
        """The action at the other end of a send or a receive: `1SEND_F0` <-> `2RECV_F0`."""
        kind, offset = _PARTNER[self.kind]
        return replace(self, kind=kind, stage=self.stage + offset)

    def __str__(self) -> str:
        microbatch = "" if self.kind is Kind.REDUCE_GRAD else self.microbatch
        return f"{self.stage}{self.kind.value}{microbatch}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward of different micro-batches, run together: `(1F3;6B1)`.

    Both inputs must be there before it starts, and both results are there when it ends. In between,
    whoever executes it may let the communication of one half hide behind the computation of the other.
    """

    forward: Action
    backward: Action

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})"


Step = Action | Pair


def parse_action(text: str) -> Action:
    """The inverse of `str(action)`; raises ScheduleError on anything else."""
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ScheduleError(
            f"'{text}' is not an action; write stage, kind and micro-batch: 1F0, 2SEND_B3 or 1REDUCE_GRAD"
        )
    stage, kind, microbatch, reduced_stage = match.groups()
    if reduced_stage is not None:
        return Action(Kind.REDUCE_GRAD, int(reduced_stage))
    return Action(Kind(kind), int(stage), int(microbatch))


def parse(text: str) -> Step:
    """The inverse of `str(step)`: an action, or a pair of them in parentheses."""
    if not (text.startswith("(") and text.endswith(")")):
        return parse_action(text)
    parts = [parse_action(part) for part in text[1:-1].split(";")]
    if [part.kind for part in parts] != [Kind.F, Kind.B]:
        raise ScheduleError(f"'{text}' is not a pair; write one forward and one full backward, like (1F3;6B1)")
    return Pair(*parts)


def stage_to_rank(placement: Placement, stage: int, num_ranks: int) -> int:
    """The rank that holds a stage.

    ::

        loop   rank 0 1 2 3      v   rank 0 1 2 3
               stages 0 1 2 3        stages 0 1 2 3
                      4 5 6 7               7 6 5 4
    """
    if placement == "v" and stage >= num_ranks:
        return 2 * num_ranks - 1 - stage
    return stage % num_ranks


@dataclass(frozen=True)
class Schedule:
    """What every rank of one pipeline does in one training step, in order.

    `ranks[r]` is the list of rank r. Stage s lives on `stage_to_rank(placement, s, len(ranks))`.
    """

    name: str
    num_microbatches: int
    num_stages: int
    placement: Placement
    ranks: tuple[tuple[Step, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @property
    def chunks_per_rank(self) -> int:
        """How many stages one rank holds; a micro-batch costs a rank that many forwards."""
        return self.num_stages // self.num_ranks

    def rank_of(self, stage: int) -> int:
        return stage_to_rank(self.placement, stage, self.num_ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def actions(self, rank: int) -> Iterator[Action]:
        """The actions of a rank with its pairs taken apart."""
        for step in self.ranks[rank]:
            yield from step.parts

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, steps)) for steps in self.ranks)


def parse_schedule(text: str, name: str, num_microbatches: int, num_stages: int, placement: Placement) -> Schedule:
    """The inverse of `str(schedule)`: one line per rank, steps apart by spaces."""
    ranks = tuple(tuple(parse(word) for word in line.split()) for line in text.splitlines())
    return Schedule(name, num_microbatches, num_stages, placement, ranks)
