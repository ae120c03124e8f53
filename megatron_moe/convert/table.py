"""A family's tensors as a table that is read in both directions.

    Rule("layers.{layer}.attention.query.weight", One("model.layers.{layer}.self_attn.q_proj.weight"))
    Rule("layers.{layer}.moe.experts.fc1", PerExpert("...experts.{expert}.gate_proj.weight", "...up_proj.weight"),
                                           Fused("...experts.gate_up_proj", HALVES))

A rule names one logical tensor of ours and every form in which files of theirs hold it. An operation makes ours of
theirs and carries its own inverse, so that a table cannot say one thing on the way in and another on the way out.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.checkpoint.streaming import Piece
from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.convert.errors import ConversionError, listed


@dataclass(frozen=True)
class Operation:
    """Tensors of theirs -> one of ours, and back."""

    to_ours: Callable[[Sequence[Tensor]], Tensor]
    to_theirs: Callable[[Tensor], Sequence[Tensor]]


SAME = Operation(lambda theirs: theirs[0], lambda ours: [ours])
STACK = Operation(lambda theirs: torch.stack(list(theirs)), lambda ours: list(ours.unbind()))
"""gate [F, D], up [F, D] <-> [2, F, D]."""
HALVES = Operation(lambda theirs: theirs[0].unflatten(0, (2, -1)), lambda ours: [ours.flatten(0, 1)])
"""[2 F, ...], gate first <-> [2, F, ...]."""
TRANSPOSED = Operation(lambda theirs: theirs[0].T, lambda ours: [ours.T])
ALTERNATING = Operation(
    lambda theirs: theirs[0].unflatten(0, (-1, 2)).transpose(0, 1), lambda ours: [ours.transpose(0, 1).flatten(0, 1)]
)
"""[2 F], gate and up by turns <-> [2, F]."""
TRANSPOSED_ALTERNATING = Operation(
    lambda theirs: theirs[0].T.unflatten(0, (-1, 2)).transpose(0, 1),
    lambda ours: [ours.transpose(0, 1).flatten(0, 1).T],
)
"""[D, 2 F], columns of gate and up by turns (GPT-OSS) <-> [2, F, D]."""


@dataclass(frozen=True)
class Form:
    """One way in which their files hold a tensor of ours.

    Attributes:
        names: patterns of their names, in the order that the operation takes.
        rows: they, or ours, come expert by expert: the operation acts on one row (dim 0).
        fused: theirs are stacked as ours are; else a name has an ``{expert}``.
        newer: not the form that is written by default.
    """

    names: tuple[str, ...]
    operation: Operation
    rows: bool = False
    fused: bool = False
    newer: bool = False


def one(name: str, operation: Operation = SAME, *, newer: bool = False) -> Form:
    """One tensor for one."""
    return Form((name,), operation, newer=newer)


def pair(gate: str, up: str) -> Form:
    """Two matrices that we stack."""
    return Form((gate, up), STACK)


def per_expert(*names: str, operation: Operation | None = None) -> Form:
    """Tensors with an ``{expert}`` in their names: one, or two that we stack."""
    return Form(names, operation or (SAME if len(names) == 1 else STACK), rows=True)


def fused(name: str, operation: Operation = SAME, *, newer: bool = True) -> Form:
    """A tensor of all experts; the operation is that of one expert."""
    return Form((name,), operation, rows=True, fused=True, newer=newer)


class Rule:
    """A tensor of ours, by a pattern of its name, and the forms of theirs."""

    def __init__(self, ours: str, *forms: Form) -> None:
        self.ours, self.forms = ours, forms
        self._expression = re.compile(re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(ours)))

    def match(self, name: str) -> dict[str, int] | None:
        """The numbers in the name, if it is one of this rule's."""
        found = self._expression.fullmatch(name)
        return None if found is None else {key: int(value) for key, value in found.groupdict().items()}


@dataclass(frozen=True)
class Step:
    """One operation on named tensors: what conversion does, one after the other."""

    ours: Piece
    theirs: tuple[Piece, ...]
    operation: Operation


Choose = Callable[[Rule, Mapping[str, int]], Form]


def steps_for(
    rules: Iterable[Rule], tensors: Mapping[str, Described], numbers: Mapping[str, int], choose: Choose
) -> list[Step]:
    """All steps for the tensors of a model of ours, in their order.

    Args:
        numbers: further numbers that names of theirs hold, as ``num_layers``; see :func:`variables`.
        choose: the form to use for a rule and the numbers in the name.

    Raises:
        ConversionError: a tensor of ours has no rule: this family has no such part.
    """
    steps, without_rule = [], []
    rules = list(rules)
    for name, described in tensors.items():
        found = [(rule, match) for rule in rules if (match := rule.match(name)) is not None]
        assert len(found) < 2, f"{name} has {len(found)} rules"
        if not found:
            without_rule.append(name)
            continue
        rule, match = found[0]
        values = variables(match, numbers)
        form = choose(rule, values)
        if not form.rows:
            steps.append(Step(Piece(name), tuple(Piece(n.format(**values)) for n in form.names), form.operation))
            continue
        for row in range(described.shape[0]):
            theirs = (n.format(**values, expert=row) for n in form.names)
            pieces = tuple(Piece(n, row if form.fused else None) for n in theirs)
            steps.append(Step(Piece(name, row), pieces, form.operation))
    if without_rule:
        raise ConversionError(
            listed("this family's files have no place for", without_rule) + ". Choose another family with --family."
        )
    return steps


def variables(match: Mapping[str, int], numbers: Mapping[str, int]) -> dict[str, int]:
    """What patterns of theirs may name: the numbers of the name, and the layer that holds a prediction module."""
    values = dict(match)
    if "depth" in match:
        values["layer"] = numbers["num_layers"] + match["depth"]  # modules follow the layers (DeepSeek-V3)
    return values


def form_in(names: Iterable[str]) -> Choose:
    """Choose the form of which a file holds at least one tensor; the first where it holds none."""
    present = set(names)

    def choose(rule: Rule, values: Mapping[str, int]) -> Form:
        for form in rule.forms:
            experts = range(_MOST_EXPERTS) if form.rows and not form.fused else (0,)
            if any(n.format(**values, expert=e) in present for e in experts for n in form.names):
                return form
        return rule.forms[0]

    return choose


_MOST_EXPERTS = 4  # of a form by experts one of the first few names is there, unless the file lacks nearly all


def form_to_write(fused_experts: bool) -> Choose:
    """Choose the form that transformers 4 reads too, or the fused one of transformers 5."""

    def choose(rule: Rule, values: Mapping[str, int]) -> Form:
        return next((form for form in rule.forms if form.newer == fused_experts), rule.forms[0])

    return choose


def check_shapes(steps: Iterable[Step], ours: Mapping[str, Described], theirs: Mapping[str, Described]) -> list[str]:
    """For each step whose tensors do not have the shapes that the configuration asks for, a line."""
    problems = []
    for step in steps:
        target = ours[step.ours.name].shape
        target = target if step.ours.row is None else target[1:]
        sources = [meta(theirs[piece.name], piece.row) for piece in step.theirs]
        try:
            found = tuple(step.operation.to_ours(sources).shape)
        except (RuntimeError, ValueError):
            found = None
        too_many = [
            p.name
            for p in step.theirs
            if p.row is not None and theirs[p.name].shape[0] != ours[step.ours.name].shape[0]
        ]
        if found != target or too_many:
            shapes = ", ".join(f"{p.name} {list(theirs[p.name].shape)}" for p in step.theirs)
            problems.append(
                f"{shapes}: the configuration asks for {list(ours[step.ours.name].shape)} as {step.ours.name}"
            )
    return list(dict.fromkeys(problems))


def meta(described: Described, row: int | None) -> Tensor:
    """A tensor without values; one row of it."""
    shape = described.shape if row is None else described.shape[1:]
    return torch.empty(shape, dtype=described.dtype, device="meta")
