"""Text from a model: one token at a time, after what came before.

    prompts   [3 1 4] [2 7]   ->   [3 1 4] [_ 2 7]   padded on the left; padding is another document, which no one sees
    step 1    the whole prompts, whose keys and values stay in caches; then one token a step

Ranks share the model: heads, widths and vocabulary over tp, experts over ep and etp. All hold all tokens: the sequence
is not cut, for a step is one token long. Rank 0 chooses the next token for all.

A model whose routing looks at whole groups of tokens (capacity, expert choice) is run anew over all tokens at each
step, prompt by prompt: what it decides for a token depends on its neighbours. So is one whose text outgrows its
context.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_moe.config.schema import Config, ParallelConfig
from megatron_moe.model.cache import caching, without_caches
from megatron_moe.model.cross_entropy import vocab_parallel_cross_entropy
from megatron_moe.model.decoder import Decoder
from megatron_moe.moe.capacity import needs_whole_groups
from megatron_moe.moe.dispatchers import ReplicatedDispatcher
from megatron_moe.moe.gate import Gate
from megatron_moe.moe.layer import MoELayer
from megatron_moe.parallel import collectives
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.tokens import SequenceLayout, StepInfo, TokenBatch


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: temperature 0 takes the most likely one; top_k 0 and top_p 1 cut nothing off.

    Raises:
        ValueError: a number that means nothing.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95

    def __post_init__(self) -> None:
        for name, value, highest in (
            ("temperature", self.temperature, math.inf),
            ("top-k", self.top_k, math.inf),
            ("top-p", self.top_p, 1.0),
        ):
            if not 0 <= value <= highest or value == math.inf:  # NaN is caught, too
                limit = "" if highest == math.inf else f" and at most {highest:g}"
                raise ValueError(f"--{name} {value} must be at least 0{limit}.")


def generation_model(config: Config, ctx: ParallelContext, *, initial_values: bool = True) -> Decoder:
    """This rank's part of a model that generates, cut over tp, ep and etp; initial weights, or zeros to be loaded."""
    assert ctx.cp.size == ctx.pp.size == 1
    model = Decoder(replace(config, parallel=ParallelConfig()), ctx, initial_values=initial_values)
    for layer in model.modules():
        if isinstance(layer, MoELayer) and ctx.ep.size * ctx.etp.size > 1:
            layer.dispatcher = ReplicatedDispatcher(layer.gate.num_experts, ctx)
    return model.eval()


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


def whole_batch(ids_SB: Tensor, ctx: ParallelContext, *, start: int = 0, padding_B: Tensor | None = None) -> TokenBatch:
    """Tokens [S, B] to be looked at, the same on all ranks, not trained on.

    Args:
        start: place of the first one; the caches hold those before.
        padding_B: how many places of each sequence are padding, on the left.
    """
    seq_length, batch = ids_SB.shape
    places_S1 = torch.arange(start + seq_length, device=ctx.device).unsqueeze(1)
    positions_SB, documents_SB, padding_SB = places_S1.expand(-1, batch), None, None
    if padding_B is not None:
        padding_SB = places_S1 < padding_B
        documents_SB = -padding_SB.long()
        positions_SB = (places_S1 - padding_B).clamp(min=0)
        padding_SB = padding_SB[start:]
    return TokenBatch(
        ids_SB=ids_SB,
        labels_SB=ids_SB,
        loss_mask_SB=torch.zeros_like(ids_SB, dtype=torch.bool),
        positions_SB=positions_SB[start:],
        documents_SB=documents_SB,
        padding_SB=padding_SB,
        sample_ids_B=torch.arange(batch, device=ctx.device),
        microbatch=0,
        layout=SequenceLayout(seq_length, ctx, sequence_parallel=False),
        step=StepInfo(
            seed=0, iteration=0, training=False, num_loss_tokens=1.0, num_routed_tokens=float(ids_SB.numel())
        ),
    )


@torch.no_grad()
def next_logits(model: Decoder, tokens: TokenBatch) -> Tensor:
    """[B, V] logits of the tokens that follow, on every rank."""
    assert model.output is not None
    x_SBD = model.hidden(None, tokens)
    logits_VB = collectives.gather_dim0(model.output(x_SBD[-1:]).squeeze(0).T, model.ctx.tp)
    return logits_VB[: model.output.spec.shape[0]].T


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    ctx: ParallelContext,
    *,
    max_new_tokens: int,
    context_length: int,
    eod_id: int | None,
    sampling: Sampling,
    seed: int,
    vocab_size: int | None = None,
    use_cache: bool = True,
) -> Iterator[list[int | None]]:
    """The next token of each prompt, step by step; None for one whose document has ended. Stops when all have.

    What a prompt gets depends neither on the others nor on the cache nor on the layout. Prompt i draws with the seed
    ``seed + i``. All ranks take all steps, and yield the same.

    Args:
        context_length: the model sees the last so many tokens: what it was trained on.
        vocab_size: ids from here on are not chosen: those that the tokenizer lacks. Default: all are.
        use_cache: keep keys and values; else run over all tokens at each step.
    """
    model.eval()
    texts = [list(prompt) for prompt in prompts]
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(texts))]
    step = _Stepper(model, ctx, context_length, use_cache and not looks_at_groups(model))
    ended = [False] * len(texts)
    with step.caches():
        for _ in range(max_new_tokens):
            logits_BV, chosen = step.logits(texts), [text[-1] for text in texts]
            if ctx.rank == 0:
                for i, logits_V in enumerate(logits_BV.cpu()):
                    if not ended[i]:
                        chosen[i] = next_token(logits_V[:vocab_size], sampling, generators[i])
            # Were every rank to choose, rounding could part them, and they would wait for each other for ever.
            mine_B = torch.tensor(chosen, device=ctx.device) * (ctx.rank == 0)
            for i, token in enumerate(collectives.sum_(mine_B, ctx.world).tolist()):
                texts[i].append(token)
                ended[i] = ended[i] or token == eod_id
            if all(ended):
                return
            yield [None if end else text[-1] for text, end in zip(texts, ended, strict=True)]


def looks_at_groups(model: Decoder) -> bool:
    """Whether the routing of a token depends on later or neighbouring tokens."""
    gates = (module for module in model.modules() if isinstance(module, Gate))
    return any(needs_whole_groups(gate.router, gate.config, False) for gate in gates)


class _Stepper:
    """Logits after texts that grow by one token a step."""

    def __init__(self, model: Decoder, ctx: ParallelContext, context_length: int, use_cache: bool) -> None:
        self.model, self.ctx, self.context_length, self.use_cache = model, ctx, context_length, use_cache
        self.alone = looks_at_groups(model)
        self.num_seen = 0

    def caches(self) -> AbstractContextManager[None]:
        """Around all steps."""
        return caching(self.model) if self.use_cache else nullcontext()

    def logits(self, texts: list[list[int]]) -> Tensor:
        """[B, V]."""
        longest = max(map(len, texts))
        if self.use_cache and longest <= self.context_length:
            ids_SB, padding_B = self._padded(texts)
            tokens = whole_batch(ids_SB[self.num_seen :], self.ctx, start=self.num_seen, padding_B=padding_B)
            self.num_seen = longest
            return next_logits(self.model, tokens)
        with without_caches(self.model):
            if not self.alone:
                ids_SB, padding_B = self._padded([text[-self.context_length :] for text in texts])
                return next_logits(self.model, whole_batch(ids_SB, self.ctx, padding_B=padding_B))
            alone = [self._padded([text[-self.context_length :]])[0] for text in texts]
            return torch.cat([next_logits(self.model, whole_batch(ids_S1, self.ctx)) for ids_S1 in alone])

    def _padded(self, texts: list[list[int]]) -> tuple[Tensor, Tensor | None]:
        """Ids [S, B], padded on the left with any id, and how many of each are padding (None: none at all)."""
        longest = max(map(len, texts))
        missing = [longest - len(text) for text in texts]
        ids_BS = torch.tensor([[0] * n + text for n, text in zip(missing, texts, strict=True)], device=self.ctx.device)
        return ids_BS.T, torch.tensor(missing, device=self.ctx.device) if any(missing) else None


@torch.no_grad()
def text_loss(model: Decoder, ids: Sequence[int], ctx: ParallelContext, context_length: int) -> tuple[float, int]:
    """Sum of the losses of all tokens but the first, in nats, and their number.

    The text is read in stretches of the context's length; each token is predicted from those before it in its stretch.
    """
    assert model.output is not None
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, context_length):
        stretch = torch.tensor(ids[start : start + context_length + 1], device=ctx.device)
        x_SBD = model.hidden(None, whole_batch(stretch[:-1].unsqueeze(1), ctx))
        logits_SV = model.output(x_SBD).squeeze(1)
        total += float(vocab_parallel_cross_entropy(logits_SV, stretch[1:], model.output.spec, ctx).sum())
        count += len(stretch) - 1
    return total, count
