"""Text from a model: one token at a time, each by a full forward pass over all that came before."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_moe.model.decoder import Decoder
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.tokens import SequenceLayout, StepInfo, TokenBatch


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: temperature 0 takes the most likely one; top_k 0 and top_p 1 cut nothing off."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95


def next_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose from the logits [V] of one position."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probabilities_V = torch.softmax(logits_V.double() / sampling.temperature, 0)
    probabilities_V, ids_V = probabilities_V.sort(descending=True, stable=True)
    keep_V = torch.arange(len(ids_V)) < (sampling.top_k or len(ids_V))
    keep_V &= probabilities_V.cumsum(0) - probabilities_V < sampling.top_p
    keep_V[0] = True  # the most likely one always stays
    return int(ids_V[torch.multinomial(probabilities_V * keep_V, 1, generator=generator)])


def whole_batch(ids_SB: Tensor, ctx: ParallelContext) -> TokenBatch:
    """Tokens [S, B] to be looked at by one process, not trained on."""
    seq_length, batch = ids_SB.shape
    return TokenBatch(
        ids_SB=ids_SB,
        labels_SB=ids_SB,
        loss_mask_SB=torch.zeros_like(ids_SB, dtype=torch.bool),
        positions_SB=torch.arange(seq_length, device=ctx.device).unsqueeze(1).expand(-1, batch),
        documents_SB=None,
        padding_SB=None,
        sample_ids_B=torch.zeros(batch, dtype=torch.int64, device=ctx.device),
        microbatch=0,
        layout=SequenceLayout(seq_length, ctx, sequence_parallel=False),
        step=StepInfo(seed=0, iteration=0, training=False, num_loss_tokens=1.0, num_routed_tokens=float(ids_SB.numel())),
    )


@torch.no_grad()
def continuation_logits(model: Decoder, ids: list[int], ctx: ParallelContext) -> Tensor:
    """[V] logits of the token after ``ids``, in one process."""
    assert ctx.world.size == 1 and model.output is not None
    x_SBD = model.hidden(None, whole_batch(torch.tensor(ids, device=ctx.device).unsqueeze(1), ctx))
    return model.output(x_SBD[-1:])[0, 0, : model.output.spec.shape[0]]


def generate(
    model: Decoder,
    prompt: list[int],
    ctx: ParallelContext,
    *,
    max_new_tokens: int,
    context_length: int,
    eod_id: int | None,
    sampling: Sampling,
    seed: int,
) -> Iterator[int]:
    """Tokens after the prompt, until the end of the document or ``max_new_tokens``.

    Args:
        context_length: the model sees the last so many tokens: what it was trained on.
    """
    model.eval()
    ids, generator = list(prompt), torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        logits_V = continuation_logits(model, ids[-context_length:], ctx)
        ids.append(next_token(logits_V.cpu(), sampling, generator))
        if ids[-1] == eod_id:
            return
        yield ids[-1]
