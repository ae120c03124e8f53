"""The grouped matrix product of experts: rows of expert l are multiplied by matrix l.

    rows_RI   [ rows of expert 0 | rows of expert 1 | ... ]   groups say where those of each are, some have none
    weight_LOI, product_RO[r] = weight[l(r)] @ rows[r]

``loop`` runs one product per expert into slices of one output; ``grouped_mm`` is torch's fused product
(float32, bfloat16, float16; row strides in multiples of 16 bytes); ``transformer-engine`` is that library's.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels.selection import functions, missing


class Groups:
    """Where the rows of each expert are: forms of it for the products of a layer, each made once, at first need.

    Args:
        counts_L: rows of each expert, on the host or on the device.
        device: of the rows.
    """

    def __init__(self, counts_L: Tensor, device: torch.device) -> None:
        self._counts_L, self._device = counts_L, device

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """(expert, first row, end row) of the experts that have rows. Waits where the device knows the counts."""
        found, start = [], 0
        for expert, count in enumerate(self._counts_L.tolist()):
            if count:
                found.append((expert, start, start + count))
            start += count
        return found

    @cached_property
    def ends_L(self) -> Tensor:
        """int32 [L] on the device: where each expert's rows end. Waits where the host knows the counts."""
        return self._counts_L.to(self._device).cumsum(0, dtype=torch.int32)


def choose_backend(requested: str, dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...]) -> str:
    """The implementation behind ``--moe-expert-backend auto``.

    On CUDA (and without data, in a plan for it) the fused product, which needs no host copy of the counts; on CPU the
    loop, which was never slower there for bfloat16 and float64 is not supported by the fused one at all.

    Args:
        sizes: lengths of the matrices' rows; the fused product wants multiples of 16 bytes.

    Raises:
        ValueError: what was asked for has no such type or size, or is not installed.
    """
    if requested == "transformer-engine":
        if device.type == "meta":  # a dry run has no libraries
            return choose_backend("auto", dtype, device, sizes)
        problem = missing(requested, device.type)
        if problem is None and dtype == torch.float64:
            problem = "Transformer Engine has no float64; use --moe-expert-backend auto."
        if problem is not None:
            raise ValueError(f"--moe-expert-backend {requested}: {problem}")
    aligned = all(size * dtype.itemsize % 16 == 0 for size in sizes)
    if requested == "auto":
        return "grouped_mm" if device.type in ("cuda", "meta") and dtype == torch.bfloat16 and aligned else "loop"
    if requested == "grouped_mm" and (dtype == torch.float64 or not aligned):
        raise ValueError(
            f"--moe-expert-backend grouped_mm supports float32 and bfloat16, and rows of multiples of 16 bytes; here "
            f"they have {' and '.join(map(str, sizes))} numbers of {dtype}. Use loop (or auto)."
        )
    return requested


class GroupedProduct(Protocol):
    """How experts multiply, forward and for the gradient of their rows."""

    @property
    def backend(self) -> str:
        """The implementation of the weights' gradient."""
        ...

    def forward(self, rows_RI: Tensor, weight_LOI: Tensor, groups: Groups) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[R, I] x [L, O, I] -> [R, O], and what is kept of the rows for the weights' gradient."""
        ...

    def input_gradient(self, grad_RO: Tensor, weight_LOI: Tensor, groups: Groups) -> Tensor:
        """[R, O] x [L, O, I] -> [R, I]."""
        ...

    def rows(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """What was kept, as the factor [R, I] of the weights' gradient."""
        ...


@dataclass(frozen=True)
class PlainGroupedProduct:
    """In the type of the numbers."""

    backend: str

    def forward(self, rows_RI: Tensor, weight_LOI: Tensor, groups: Groups) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :class:`GroupedProduct`."""
        return grouped_product(rows_RI, weight_LOI, groups, self.backend), (rows_RI,)

    def input_gradient(self, grad_RO: Tensor, weight_LOI: Tensor, groups: Groups) -> Tensor:
        """See :class:`GroupedProduct`."""
        return grouped_product_transposed(grad_RO, weight_LOI, groups, self.backend)

    def rows(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """See :class:`GroupedProduct`."""
        return kept[0]


def grouped_product(rows_RI: Tensor, weight_LOI: Tensor, groups: Groups, backend: str) -> Tensor:
    """[R, I] x [L, O, I] -> [R, O]."""
    if backend == "grouped_mm":
        return F.grouped_mm(rows_RI, weight_LOI.transpose(1, 2), offs=groups.ends_L)
    if backend == "transformer-engine":
        return functions("grouped", backend).grouped_product(rows_RI, weight_LOI, groups.runs)
    out_RO = rows_RI.new_empty(rows_RI.shape[0], weight_LOI.shape[1])
    for expert, start, stop in groups.runs:
        torch.mm(rows_RI[start:stop], weight_LOI[expert].T, out=out_RO[start:stop])
    return out_RO


def grouped_product_transposed(grad_RO: Tensor, weight_LOI: Tensor, groups: Groups, backend: str) -> Tensor:
    """Gradient of the rows: [R, O] x [L, O, I] -> [R, I]."""
    if backend == "grouped_mm":
        return F.grouped_mm(grad_RO, weight_LOI, offs=groups.ends_L)
    if backend == "transformer-engine":
        return functions("grouped", backend).grouped_product_transposed(grad_RO, weight_LOI, groups.runs)
    out_RI = grad_RO.new_empty(grad_RO.shape[0], weight_LOI.shape[2])
    for expert, start, stop in groups.runs:
        torch.mm(grad_RO[start:stop], weight_LOI[expert], out=out_RI[start:stop])
    return out_RI


def add_grouped_outer_product(
    out_LOI: Tensor, grad_RO: Tensor, rows_RI: Tensor, groups: Groups, backend: str, beta: float
) -> None:
    """Gradient of the weights, [R, O], [R, I] -> out [L, O, I] = beta out + product; none for an expert without rows.

    Args:
        beta: 0 overwrites whatever is there, 1 adds.
    """
    if backend == "grouped_mm":
        product_LOI = F.grouped_mm(grad_RO.T, rows_RI, offs=groups.ends_L)
        out_LOI.copy_(product_LOI) if beta == 0 else out_LOI.add_(product_LOI)
        return
    if backend == "transformer-engine":
        functions("grouped", backend).add_grouped_outer_product(out_LOI, grad_RO, rows_RI, groups.runs, beta)
        return
    same_type = out_LOI.dtype == grad_RO.dtype
    if beta == 0 and not (same_type and len(groups.runs) == len(out_LOI)):
        out_LOI.zero_()
    for expert, start, stop in groups.runs:
        out_OI, transposed, rows = out_LOI[expert], grad_RO[start:stop].T, rows_RI[start:stop]
        if same_type:
            torch.addmm(out_OI, transposed, rows, beta=beta, out=out_OI)
        else:
            out_OI += transposed @ rows
