"""--torch-compile: the parts of a block between its matrix products, each compiled into few kernels.

    norm -> | q k v products | -> head norms, rotary -> | attention, product | -> norm -> | product | -> activation

Compiled is what is a function of tensors alone: norms, rotary positions, activations without a kernel of their own.
What breaks a graph stays outside of one, so that everything combines with it: products write their weight gradients
into the bucket's buffer or leave them in a queue, collectives count bytes, and where a token goes is data.
``docs/performance.md`` lists it.
"""

import os
import shutil

import torch
from torch import nn

from megatron_moe.model.attention import Attention
from megatron_moe.model.feed_forward import FeedForward
from megatron_moe.model.latent_attention import LatentAttention
from megatron_moe.model.norm import Norm


def compile_parts(model: nn.Module, backend: str) -> None:
    """Compile the parts of a model in place, at their first use; layers that are alike share the result.

    Args:
        backend: torch.compile's; ``inductor`` makes kernels and needs a compiler.

    Raises:
        ValueError: there is no compiler.
    """
    if backend == "inductor" and not _has_compiler():
        raise ValueError(
            "--torch-compile inductor needs a C++ compiler, and none of $CXX, g++, clang++ or c++ is there; install "
            "one (Debian, Ubuntu: apt install g++), or leave --torch-compile out."
        )
    for module in model.modules():
        if isinstance(module, Norm) and module.kernels == "torch":
            module.compile(backend=backend)
        elif isinstance(module, (Attention, LatentAttention)) and module.rotary is not None:
            module.rotary.rotate = torch.compile(module.rotary.rotate, backend=backend)
        elif isinstance(module, FeedForward) and not module.has_fused_activation:
            module.activate = torch.compile(module.activate, backend=backend)


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++") if name)
