"""What Megatron-Core 0.19.2 must be told to run on CPU over gloo: it asks CUDA for devices, streams and random states.

Call ``before_import`` before the first import of ``megatron`` and ``after_import`` after it. Every patch names the
place in ``megatron/core`` that needs it; none is inside an operation of a layer, so none costs time in a step.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


class _Event:
    """An event of a device that does everything at once."""

    def synchronize(self) -> None:
        pass


class _Stream:
    """The one stream of such a device."""

    def wait_stream(self, stream: "_Stream") -> None:
        pass

    def record_event(self) -> _Event:
        return _Event()


def before_import() -> None:
    """Let the names of ``torch`` that Megatron-Core calls answer for the CPU."""
    cuda, the_stream = torch.cuda, _Stream()
    # tensor_parallel/layers.py, transformer/moe/router.py, pipeline_parallel/p2p_communication.py and others make
    # weights and buffers with device=torch.cuda.current_device().
    cuda.current_device = lambda: CPU
    # transformer/moe/token_dispatcher.py copies split sizes to the host on a stream of its own;
    # distributed/param_and_grad_buffer.py waits for CUDA graphs on the current stream.
    cuda.Stream = lambda *_, **__: the_stream
    cuda.current_stream = lambda *_: the_stream
    cuda.stream = lambda _: contextlib.nullcontext()
    # tensor_parallel/random.py keeps one random state for each kind of parallelism, the device's.
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_: torch.get_rng_state()
    # optimizer/clip_grads.py, optimizer/optimizer.py, pipeline_parallel/schedules.py and utils.py name 'cuda' outright.
    torch.zeros, torch.tensor = _on_cpu(torch.zeros), _on_cpu(torch.tensor)
    # optimizer/clip_grads.py asserts param.grad.type() == 'torch.cuda.FloatTensor'.
    torch.Tensor.type = _named_as_cuda(torch.Tensor.type)


def after_import() -> None:
    """Replace three functions of Megatron-Core that take for granted that tensors lie on a GPU."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # These two go past torch.cuda to torch._C.
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes
    WrappedTorchNorm.__new__ = _norm


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The original turns only CUDA tensors to numpy; all-to-all needs the sizes as integers in any case."""
    return tensor.numpy() if isinstance(tensor, Tensor) and as_numpy else tensor


def _norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.RMSNorm:
    """The original refuses sequence parallelism, since nobody would sum the gain's gradient over its ranks.

    ``finalize_model_grads`` sums it where the parameter carries this mark, which the norms of Apex and Transformer
    Engine set themselves.
    """
    norm = torch.nn.RMSNorm(hidden_size, eps=eps)
    norm.weight.sequence_parallel = config.sequence_parallel
    return norm


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return made


def _named_as_cuda(name_or_cast: Callable[..., Any]) -> Callable[..., Any]:
    def named(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = name_or_cast(tensor, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    return named
