"""Order copies of tokens by expert, and add them back: the only place where rows change order.

tokens_TD --token_ids_N, expert_ids_N--> rows_ND (expert-major, tokens in order inside an expert) --> tokens_TD
"""

import torch
from torch import Tensor


def expert_order(expert_ids_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Stable order of copies by expert.

    Returns:
        order_N: int64, the copy that goes to each row.
        counts_E: int64, rows of each expert.
    """
    order_N = torch.argsort(expert_ids_N, stable=True)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=expert_ids_N.device)
    counts_E.scatter_add_(0, expert_ids_N, torch.ones_like(expert_ids_N))
    return order_N, counts_E


def add_rows(rows_ND: Tensor, token_ids_N: Tensor, num_tokens: int) -> Tensor:
    """[N, D] rows -> [T, D]: each token is the sum of its rows; a token without rows is zero."""
    return rows_ND.new_zeros(num_tokens, rows_ND.shape[1]).index_add(0, token_ids_N, rows_ND)


def expert_major(counts_PL: Tensor) -> Tensor:
    """Row order that turns peer-major blocks into expert-major ones.

    Args:
        counts_PL: [peers, local experts] rows of each block, as they lie: peer by peer, expert by expert.

    Returns:
        order_R: int64; row r of the expert-major order is row ``order[r]`` of the peer-major one.
    """
    num_peers, num_local = counts_PL.shape
    expert_of_row_R = torch.arange(num_local).repeat(num_peers).repeat_interleave(counts_PL.flatten())
    return torch.argsort(expert_of_row_R, stable=True)
