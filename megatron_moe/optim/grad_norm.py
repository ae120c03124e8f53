"""Global gradient norm and clipping: every logical element counted once, whatever its replication.

Each rank adds the squares of what its optimizer owns, divided by the number of ranks that own the same; the sum over
the world is the squared norm of the logical gradient. There is no second rule for experts, norms or tensor parallel.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_moe.parallel import collectives
from megatron_moe.parallel.buckets import Piece
from megatron_moe.parallel.context import ParallelContext


def squared_sums(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    """[] float64: this rank's share of the squared norm."""
    total, by_replicas = torch.zeros((), dtype=torch.float64, device=device), dict[int, list[Tensor]]()
    for piece in pieces:
        if not piece.parameter.spec.copy:
            by_replicas.setdefault(piece.replicas, []).append(piece.grad)
    for replicas, grads in by_replicas.items():  # numbers of the host stay there: to send them would be to wait
        total += torch.stack(torch._foreach_norm(grads)).double().square().sum() / replicas
    return total


def gradient_norm(pieces: Sequence[Piece], ctx: ParallelContext) -> float:
    """L2 norm of the whole model's gradient, the same on every rank."""
    return float(collectives.sum_(squared_sums(pieces, ctx.device), ctx.world).sqrt())


def clip(pieces: Sequence[Piece], norm: float, max_norm: float) -> None:
    """Scale all gradients so that the global norm is at most ``max_norm`` (as Megatron: 1e-6 in the divisor)."""
    coefficient = max_norm / (norm + 1e-6)
    if pieces and coefficient < 1.0:  # _foreach_mul_ refuses an empty list
        torch._foreach_mul_([p.grad for p in pieces], coefficient)
