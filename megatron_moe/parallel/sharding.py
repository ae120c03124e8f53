"""Placement declared once: the ``ShardSpec`` of a parameter is the only fact about where its pieces live.

Initialisation, gradient reduction, gradient norm, checkpoint and conversion all read it; none of them knows a module.

    logical tensor  --slices-->  this rank's piece  --sum over spec.sum_axis-->  gradient of the piece
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.random import hash_key


@dataclass(frozen=True)
class Initial:
    """Distribution of a logical tensor's initial values: ``normal`` with a standard deviation, or a constant."""

    kind: str = "normal"
    value: float = 0.02

    def draw(self, shape: tuple[int, ...], key: int) -> Tensor:
        """Values [shape] in float32, a function of the key alone."""
        if self.kind == "constant":
            return torch.full(shape, self.value)
        generator = torch.Generator().manual_seed(key)
        return torch.empty(shape).normal_(0.0, self.value, generator=generator)


@dataclass(frozen=True)
class ShardSpec:
    """Placement of one logical tensor.

    Attributes:
        shape: logical shape; padding of storage is not part of it.
        shards: (axis, dim) pairs: the axis cuts the dim into equal pieces of the padded shape.
        padded: storage shape over all shards; default: the logical shape.
        expert: the expert view of the mesh rules (replicas on ``edp``), not the dense one (``cp`` x ``dp``).
        partial_tp: replicated over tp, yet each rank's gradient covers only its own tokens or heads. Not for experts.
        initial: distribution of the initial values.
        stacked: draw each index of dim 0 on its own (experts), so that a rank draws only what it keeps.
        decay: whether weight decay applies.
        name: logical name, e.g. ``layers.3.attention.query.weight``; given when the model is complete.
        tied: another stage holds this tensor too (tied embedding): gradients are summed over ``ends``.
        copy: this is the second of the two: not counted, not stored.
    """

    shape: tuple[int, ...]
    shards: tuple[tuple[str, int], ...] = ()
    padded: tuple[int, ...] | None = None
    expert: bool = False
    partial_tp: bool = False
    initial: Initial = Initial()
    stacked: bool = False
    decay: bool = True
    name: str = ""
    tied: bool = False
    copy: bool = False

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """Shape over all shards, padding included."""
        return self.padded or self.shape

    @property
    def sum_axis(self) -> str:
        """Axis of the ranks whose partial gradients add up to this piece's gradient."""
        if self.expert:
            return "edp"
        return "stage" if self.partial_tp else "dp_cp"

    def local_shape(self, ctx: ParallelContext) -> tuple[int, ...]:
        """Shape of this rank's piece, padding included."""
        return tuple(s.stop - s.start for s in self.storage_slices(ctx))

    def storage_slices(self, ctx: ParallelContext) -> tuple[slice, ...]:
        """This rank's piece of the padded tensor."""
        slices = [slice(0, size) for size in self.storage_shape]
        for axis_name, dim in self.shards:
            axis = ctx.axis(axis_name)
            piece, start = slices[dim].stop - slices[dim].start, slices[dim].start
            assert piece % axis.size == 0, f"{axis_name} {axis.size} does not cut dim {dim} of {self.name} {self.shape}"
            piece //= axis.size
            slices[dim] = slice(start + axis.rank * piece, start + (axis.rank + 1) * piece)
        return tuple(slices)

    def logical_slices(self, ctx: ParallelContext) -> tuple[slice, ...]:
        """This rank's piece of the logical tensor: without padding, possibly empty."""
        return tuple(
            slice(min(s.start, size), min(s.stop, size))
            for s, size in zip(self.storage_slices(ctx), self.shape, strict=True)
        )

    def num_replicas(self, ctx: ParallelContext) -> int:
        """How many ranks of the pipeline stage hold this same piece."""
        return ctx.stage.size // prod(ctx.axis(axis).size for axis, _ in self.shards)


GradientWriter = Callable[[Tensor, float], None]
"""``write(out, beta)``: out = beta out + gradient, of the parameter's shape; with beta 0 ``out`` may hold anything."""


class ShardedParameter(nn.Parameter):
    """A parameter that knows its placement.

    Attributes:
        main_grad: this piece's accumulated gradient, float32 or float64; garbage until the step's first one is there.
        accumulate: lets the gradient of so many uses be written into it, ``write(main_grad, beta)``, where beta 0
            overwrites and beta 1 adds; may begin the reduction of the bucket it completes. None where nobody collects
            gradients.
        passes_per_microbatch: how many backward passes of a micro-batch reach it; two for a tied embedding whose
            output layer is another stage on the same rank.
        uses_per_pass: how often a pass uses it, in parts of the micro-batch. Each use accumulates its gradient where
            the operation does it; else autograd adds them up, and all come at once.
    """

    spec: ShardSpec
    main_grad: Tensor
    accumulate: Callable[[GradientWriter, int], None] | None
    passes_per_microbatch: int
    uses_per_pass: int

    def __new__(cls, data: Tensor, spec: ShardSpec) -> "ShardedParameter":
        parameter = torch.Tensor._make_subclass(cls, data, True)
        parameter.spec = spec
        parameter.accumulate = None
        parameter.passes_per_microbatch = parameter.uses_per_pass = 1
        return parameter

    def __init__(self, data: Tensor, spec: ShardSpec) -> None:
        """Everything is done in ``__new__``."""

    def logical(self, tensor: Tensor, ctx: ParallelContext) -> Tensor:
        """The part of a tensor of this piece's shape that is not padding (a view)."""
        sizes = [s.stop - s.start for s in self.spec.logical_slices(ctx)]
        return tensor[tuple(slice(0, size) for size in sizes)]


def empty_parameter(spec: ShardSpec, ctx: ParallelContext, dtype: torch.dtype) -> ShardedParameter:
    """Storage for this rank's piece; :func:`initialise` gives it values once names are known."""
    return ShardedParameter(torch.empty(spec.local_shape(ctx), dtype=dtype, device=ctx.device), spec)


def sharded_parameters(module: nn.Module) -> dict[str, ShardedParameter]:
    """All parameters by logical name, each once."""
    parameters = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, ShardedParameter), f"{name} has no ShardSpec"
        parameters[name] = parameter
    return parameters


def name_parameters(module: nn.Module) -> None:
    """Write the logical name of each parameter, its path in the module, into its spec."""
    for name, parameter in sharded_parameters(module).items():
        if not parameter.spec.copy:  # a copy has the name of its original
            parameter.spec = replace(parameter.spec, name=name)


@torch.no_grad()
def initialise(module: nn.Module, ctx: ParallelContext, seed: int | None) -> None:
    """Give every parameter its initial values: a function of (seed, logical name, logical shape) alone.

    Without a seed all are zero: weights that are loaded next need not be drawn, which takes minutes for large models.
    """
    if ctx.device.type == "meta":
        return  # a dry run: shapes without data
    for parameter in sharded_parameters(module).values():
        spec, slices = parameter.spec, parameter.spec.logical_slices(ctx)
        parameter.zero_()  # padding stays zero
        if seed is None:
            continue
        kept = parameter.logical(parameter.data, ctx)
        if spec.stacked:
            for row, index in enumerate(range(slices[0].start, slices[0].stop)):
                drawn = spec.initial.draw(spec.shape[1:], hash_key(seed, spec.name, index))
                kept[row].copy_(drawn[slices[1:]])
        else:
            kept.copy_(spec.initial.draw(spec.shape, hash_key(seed, spec.name))[slices])
