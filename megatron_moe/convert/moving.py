"""Tensors on their way: plans of both directions, and the streams that follow them, one piece in memory at a time.

plan_import   every tensor of ours from some of theirs, every tensor of theirs used once
plan_export   the same the other way
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.checkpoint.streaming import Piece
from megatron_moe.checkpoint.tensor_files import CODES, DTYPES, Described
from megatron_moe.convert.errors import ConversionError, listed
from megatron_moe.convert.family import Family
from megatron_moe.convert.quantised import Source
from megatron_moe.convert.table import SAME, Step, check_shapes, form_in, form_to_write, meta, steps_for, variables


@dataclass(frozen=True)
class Copies:
    """A tensor of theirs that must be, or will be, another name's tensor again."""

    theirs: str
    ours: str


@dataclass(frozen=True)
class Plan:
    """Steps in the order of the target's files (wide types first), and the copies beside them."""

    steps: tuple[Step, ...]
    copies: tuple[Copies, ...]


def plan_import(
    family: Family,
    source: Source,
    ours: Mapping[str, Described],
    num_layers: int,
    *,
    drop_predictions: bool = False,
) -> Plan:
    """How a model of ours is filled from files of theirs.

    Args:
        ours: the tensors that the converted configuration asks for.
        drop_predictions: leave layers after the last one out (multi-token prediction).

    Raises:
        ConversionError: lists all tensors that are missing, left over, or not of the configuration's shape.
    """
    there = source.tensors
    steps = steps_for(family.rules, ours, {"num_layers": num_layers}, form_in(there))
    used = Counter(piece for step in steps for piece in step.theirs)
    assert all(count == 1 for count in used.values()), "the table uses a tensor twice"
    copies = [copy for copy in _copies(family, ours, num_layers) if copy.theirs in there]
    spare = {piece.name for piece in used} | {copy.theirs for copy in copies}
    left = [n for n in there if n not in spare and not _ignored(family, n, num_layers, drop_predictions)]
    missing = sorted({piece.name for piece in used if piece.name not in there})
    problems = [listed("missing", missing), listed("not expected", sorted(left))]
    if any(problems):
        hint = ""
        if any(re.match(rf"model\.layers\.{num_layers}\.", name) for name in (*missing, *left)):
            hint = " (tensors of layers after the last are multi-token prediction: --mtp keep or drop)"
        raise ConversionError("the tensors do not fit the configuration: " + "; ".join(filter(None, problems)) + hint)
    wrong = check_shapes(steps, ours, there)
    if wrong:
        raise ConversionError("the tensors do not fit the configuration: " + "; ".join(wrong[:10]))
    ordered = sorted(steps, key=lambda step: -ours[step.ours.name].dtype.itemsize)
    return Plan(tuple(ordered), tuple(copies))


def plan_export(family: Family, ours: Mapping[str, Described], num_layers: int, *, fused_experts: bool) -> Plan:
    """How files of theirs are made from a checkpoint of ours.

    Raises:
        ConversionError: the family has no place for some of our tensors.
    """
    steps = steps_for(family.rules, ours, {"num_layers": num_layers}, form_to_write(fused_experts))
    used = Counter(piece for step in steps for piece in step.theirs)
    assert all(count == 1 for count in used.values()), "the table fills a tensor twice"
    copies = tuple(copy for copy in _copies(family, ours, num_layers) if "lm_head" not in copy.theirs)
    return Plan(tuple(steps), copies)


def _copies(family: Family, ours: Mapping[str, Described], num_layers: int) -> Iterator[Copies]:
    depths = sum(1 for name in ours if re.fullmatch(r"mtp\.\d+\.norm\.weight", name))
    for pattern, name in family.copies:
        for depth in range(depths):
            original = name if name in ours else "embedding.weight"  # a tied output layer
            yield Copies(pattern.format(**variables({"depth": depth}, {"num_layers": num_layers})), original)
    if "output.weight" not in ours:
        yield Copies("lm_head.weight", "embedding.weight")


def _ignored(family: Family, name: str, num_layers: int, drop_predictions: bool) -> bool:
    if any(re.fullmatch(pattern, name) for pattern in family.ignored):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return drop_predictions and layer is not None and int(layer[1]) >= num_layers


def widest(plan: Plan, source: Source, ours: Mapping[str, Described]) -> torch.dtype:
    """The narrowest --params-dtype that loses nothing: over the tensors that a bfloat16 model holds in bfloat16."""
    found = torch.bfloat16
    for step in plan.steps:
        if ours[step.ours.name].dtype == torch.bfloat16:
            for piece in step.theirs:
                dtype = source.tensors[piece.name].dtype
                found = torch.promote_types(found, torch.float32 if dtype == torch.float16 else dtype)
    return found


def check_copies(plan: Plan, source: Source) -> None:
    """Compare what their files hold twice.

    Raises:
        ConversionError: a tensor that should be a copy of another differs from it.
    """
    originals = {step.ours.name: step.theirs[0].name for step in plan.steps if step.operation is SAME}
    for copy in plan.copies:
        if not torch.equal(source.read(copy.theirs), source.read(originals[copy.ours])):
            raise ConversionError(
                f"{copy.theirs} should be the same as {originals[copy.ours]}, as the model shares the two, but is not "
                "(tie_word_embeddings in config.json, or --mtp drop)."
            )


def import_pieces(plan: Plan, source: Source, ours: Mapping[str, Described]) -> Iterator[tuple[Piece, Tensor]]:
    """The pieces of our checkpoint in the order of the plan."""
    for step in plan.steps:
        tensors = [source.read(piece.name, piece.row) for piece in step.theirs]
        yield step.ours, step.operation.to_ours(tensors).to(ours[step.ours.name].dtype)


def dtypes_of(plan: Plan, source: Source) -> dict[str, str]:
    """The type of each tensor of theirs by name, so that a way back can give it again."""
    names = [piece.name for step in plan.steps for piece in step.theirs] + [copy.theirs for copy in plan.copies]
    return {name: CODES[source.tensors[name].dtype] for name in dict.fromkeys(names)}


class Exported:
    """Files of theirs as a checkpoint of ours would give them: described at once, read piece by piece.

    Args:
        dtypes: types by name of theirs, from :func:`dtypes_of`; others keep the type of ours.
        dtype: for all tensors that ours holds in the model's own type, instead.
    """

    def __init__(
        self,
        plan: Plan,
        ours: Mapping[str, Described],
        checkpoint: Source,
        dtypes: Mapping[str, str],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._checkpoint, self._ours = checkpoint, ours
        model_dtype = ours["embedding.weight"].dtype
        copies = [Step(Piece(copy.ours), (Piece(copy.theirs),), SAME) for copy in plan.copies]
        described: dict[str, Described] = {}
        for step in (*plan.steps, *copies):
            mine = ours[step.ours.name]
            pieces = step.operation.to_theirs(meta(mine, step.ours.row))
            for piece, value in zip(step.theirs, pieces, strict=True):
                kept = DTYPES[dtypes[piece.name]] if piece.name in dtypes else mine.dtype
                shape = tuple(value.shape) if piece.row is None else (mine.shape[0], *value.shape)
                described[piece.name] = Described(shape, dtype if dtype and mine.dtype == model_dtype else kept)
        self._steps = sorted((*plan.steps, *copies), key=lambda s: -described[s.theirs[0].name].dtype.itemsize)
        order = dict.fromkeys(piece.name for step in self._steps for piece in step.theirs)
        self.tensors = {name: described[name] for name in order}

    def pieces(self) -> Iterator[tuple[Piece, Tensor]]:
        """(name and row of theirs, values) in the order of ``tensors``."""
        for step in self._steps:
            ours = self._checkpoint.read(step.ours.name, step.ours.row)
            for piece, tensor in zip(step.theirs, step.operation.to_theirs(ours), strict=True):
                yield piece, tensor.to(self.tensors[piece.name].dtype).contiguous()
