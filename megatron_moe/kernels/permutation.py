"""Move rows between the order of tokens and the order of experts: gathers both ways, each the other's transpose.

    spread    rows[r] = x[token_ids[r]] * weight[r]
    collect   y[t] = sum of rows[r] * weight[r] over the rows r of token t, in float32 at least

Copies of tokens have no weights here, since the experts' activation applies them; the biases of experts are "tokens"
whose rows have. ``moe/permute.py`` has the tables (``Copies``) and the backward passes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def spread(x_TD: Tensor, token_ids_R: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """[T, D] tokens -> [R, D], the token of each row, times the row's weight."""
    rows_RD = x_TD.index_select(0, token_ids_R)
    return rows_RD if weights_R is None else rows_RD.mul_(weights_R.unsqueeze(1))


def collect(rows_RD: Tensor, rows_R: Tensor, starts_T: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """[R, D] rows -> [T, D]: each token is the weighed sum of its rows; a token without rows is zero.

    Args:
        rows_R: int64, the rows token by token.
        starts_T: int64, where in ``rows_R`` those of each token begin.
        weights_R: of each row, in the type of the rows.
    """
    ordered_R = None if weights_R is None else weights_R.index_select(0, rows_R)
    return F.embedding_bag(rows_R, rows_RD, starts_T, mode="sum", per_sample_weights=ordered_R)


def row_products(x_TD: Tensor, rows_RD: Tensor, token_ids_R: Tensor) -> Tensor:
    """[R] product of each row with its token, in the type of the rows: the weights' gradient of :func:`spread`."""
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    return (x_TD.index_select(0, token_ids_R).to(wide) * rows_RD).sum(1).to(rows_RD.dtype)
