"""How a linear multiplies: in the type of its numbers, or by something else that is given to it.

    forward:   y = x W^T, and what of x is kept        backward:   grad_x = grad W        grad_W += grad^T rows(kept)

The weight's gradient is a sum over tokens, which ranks share; it is always computed in the type of the numbers.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Product(Protocol):
    """The products of a linear with a weight [O, I], forward and for its input's gradient."""

    def forward(self, x: Tensor, weight_OI: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [..., I] -> [..., O], and what is kept of x for the weight's gradient."""
        ...

    def input_gradient(self, grad: Tensor, weight_OI: Tensor) -> Tensor:
        """[..., O] -> [..., I]."""
        ...

    def rows(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """What was kept, as the factor [..., I] of the weight's gradient."""
        ...


class PlainProduct:
    """In the type of the numbers."""

    def forward(self, x: Tensor, weight_OI: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :class:`Product`."""
        return F.linear(x, weight_OI), (x,)

    def input_gradient(self, grad: Tensor, weight_OI: Tensor) -> Tensor:
        """See :class:`Product`."""
        return grad.matmul(weight_OI)

    def rows(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """See :class:`Product`."""
        return kept[0]


PLAIN = PlainProduct()
