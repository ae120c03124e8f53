"""Residual mixture of experts with a learned coefficient: how much of a token's output its routed experts give.

    (c_0, c_1) = softmax(W x + b)        y = c_0 routed(x) + c_1 shared(x)

The paper adds the two (arXiv 2201.05596, section 4.1.1), and so does a shared expert without this module; the
coefficient is that of DeepSpeed's code (``deepspeed/moe/layer.py``, ``use_residual``).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_moe.config.schema import ModelConfig
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sharding import Initial, ShardSpec, empty_parameter


class ResidualCoefficient(nn.Module):
    """Weight [2, D] and bias [2], in the model's type. Tokens are cut over tp, as everywhere in an MoE layer."""

    def __init__(self, model: ModelConfig, ctx: ParallelContext, dtype: torch.dtype) -> None:
        super().__init__()
        initial = Initial("normal", model.init_method_std)
        weight = ShardSpec((2, model.hidden_size), partial_tp=True, initial=initial)
        bias = ShardSpec((2,), partial_tp=True, initial=Initial("constant", 0.0), decay=False)
        self.weight = empty_parameter(weight, ctx, dtype)
        self.bias = empty_parameter(bias, ctx, dtype)

    def forward(self, x_SBD: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's input [S', B, D] -> shares of the routed and the shared output, each [S', B, 1]."""
        of_routed_SB1, of_shared_SB1 = F.linear(x_SBD, self.weight, self.bias).softmax(dim=-1).split(1, dim=-1)
        return of_routed_SB1, of_shared_SB1
