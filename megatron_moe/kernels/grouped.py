"""The grouped matrix product of experts: rows of expert l are multiplied by matrix l.

    rows_RI   [ rows of expert 0 | rows of expert 1 | ... ]   groups say where those of each are, some have none
    weight_LOI, product_RO[r] = weight[l(r)] @ rows[r]

``loop`` runs one product per expert into slices of one output; ``grouped_mm`` is torch's fused product
(float32, bfloat16, float16; row strides in multiples of 16 bytes). Each has its own form of the groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

Groups = list[tuple[int, int, int]] | Tensor
"""Loop: (expert, first row, end row) of the experts that have rows. grouped_mm: int32 [L], where each expert's end."""


def choose_backend(requested: str, dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...]) -> str:
    """The implementation behind ``--moe-expert-backend auto``.

    On CUDA (and without data, in a plan for it) the fused product, which needs no host copy of the counts; on CPU the
    loop, which was never slower there for bfloat16 and float64 is not supported by the fused one at all.

    Args:
        sizes: lengths of the matrices' rows; the fused product wants multiples of 16 bytes.

    Raises:
        ValueError: grouped_mm was asked for with a type or a size it does not support.
    """
    aligned = all(size * dtype.itemsize % 16 == 0 for size in sizes)
    if requested == "auto":
        return "grouped_mm" if device.type in ("cuda", "meta") and dtype == torch.bfloat16 and aligned else "loop"
    if requested == "grouped_mm" and (dtype == torch.float64 or not aligned):
        raise ValueError(
            f"--moe-expert-backend grouped_mm supports float32 and bfloat16, and rows of multiples of 16 bytes; here "
            f"they have {' and '.join(map(str, sizes))} numbers of {dtype}. Use loop (or auto)."
        )
    return requested


def groups_of(counts_L: Tensor, backend: str, device: torch.device) -> Groups:
    """Rows per expert -> what the products of a backend want, to be made once for all of them.

    The loop wants it on the host, the fused product on the device: waits for the device where the counts are not there.
    """
    if backend == "grouped_mm":
        return counts_L.to(device).cumsum(0, dtype=torch.int32)
    runs, start = [], 0
    for expert, count in enumerate(counts_L.tolist()):
        if count:
            runs.append((expert, start, start + count))
        start += count
    return runs


def grouped_product(rows_RI: Tensor, weight_LOI: Tensor, groups: Groups) -> Tensor:
    """[R, I] x [L, O, I] -> [R, O]."""
    if isinstance(groups, Tensor):
        return F.grouped_mm(rows_RI, weight_LOI.transpose(1, 2), offs=groups)
    out_RO = rows_RI.new_empty(rows_RI.shape[0], weight_LOI.shape[1])
    for expert, start, stop in groups:
        torch.mm(rows_RI[start:stop], weight_LOI[expert].T, out=out_RO[start:stop])
    return out_RO


def grouped_product_transposed(grad_RO: Tensor, weight_LOI: Tensor, groups: Groups) -> Tensor:
    """Gradient of the rows: [R, O] x [L, O, I] -> [R, I]."""
    if isinstance(groups, Tensor):
        return F.grouped_mm(grad_RO, weight_LOI, offs=groups)
    out_RI = grad_RO.new_empty(grad_RO.shape[0], weight_LOI.shape[2])
    for expert, start, stop in groups:
        torch.mm(grad_RO[start:stop], weight_LOI[expert], out=out_RI[start:stop])
    return out_RI


def add_grouped_outer_product(out_LOI: Tensor, grad_RO: Tensor, rows_RI: Tensor, groups: Groups, beta: float) -> None:
    """Gradient of the weights, [R, O], [R, I] -> out [L, O, I] = beta out + product; none for an expert without rows.

    Args:
        beta: 0 overwrites whatever is there, 1 adds.
    """
    if isinstance(groups, Tensor):
        product_LOI = F.grouped_mm(grad_RO.T, rows_RI, offs=groups)
        out_LOI.copy_(product_LOI) if beta == 0 else out_LOI.add_(product_LOI)
        return
    same_type = out_LOI.dtype == grad_RO.dtype
    if beta == 0 and not (same_type and len(groups) == len(out_LOI)):
        out_LOI.zero_()
    for expert, start, stop in groups:
        out_OI, transposed, rows = out_LOI[expert], grad_RO[start:stop].T, rows_RI[start:stop]
        if same_type:
            torch.addmm(out_OI, transposed, rows, beta=beta, out=out_OI)
        else:
            out_OI += transposed @ rows
