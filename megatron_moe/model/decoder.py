"""The decoder, or the part of it that a pipeline stage holds.

    ids_SB -> embedding -> x_SBD -> layers -> final norm -> logits (V / tp) -> loss per token -> sum / global tokens

Layers carry their number in the whole model, so that logical names do not depend on the stage.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor, nn

from megatron_moe.config.schema import Config
from megatron_moe.model.block import Block
from megatron_moe.model.norm import Norm
from megatron_moe.parallel.buckets import Bucket
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.gradients import with_weights
from megatron_moe.parallel.linear import enter_tp, linear
from megatron_moe.parallel.sharding import (
    Initial,
    ShardedParameter,
    ShardSpec,
    empty_parameter,
    initialise,
    name_parameters,
    sharded_parameters,
)
from megatron_moe.parallel.tokens import TokenBatch
from megatron_moe.parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy, vocab_spec
from megatron_moe.parallel.weight_gradients import WeightGradientQueue

EMBEDDING_NAME = "embedding.weight"


class OutputLayer(nn.Module):
    """Final norm and output projection; the weight is its own, or the embedding's (tied), which may live elsewhere."""

    def __init__(
        self, config: Config, ctx: ParallelContext, dtype: torch.dtype, embedding: VocabParallelEmbedding | None
    ) -> None:
        super().__init__()
        model, self.ctx = config.model, ctx
        self.sequence_parallel = config.parallel.sequence_parallel
        self.norm = Norm(model.hidden_size, model, ctx, dtype, partial_tp=self.sequence_parallel)
        self.spec = _vocabulary(config, ctx)
        tied = not model.untie_embeddings_and_output_weights
        # Not registered here when it is the embedding's own: one parameter, one owner.
        self._embedding_weight = [embedding.weight] if tied and embedding is not None else []
        self.weight: ShardedParameter | None = None
        if not self._embedding_weight:
            spec = replace(self.spec, tied=True, copy=True, name=EMBEDDING_NAME) if tied else self.spec
            self.weight = empty_parameter(spec, ctx, dtype)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """x [S', B, D] -> logits [S, B, V_padded / tp], this rank's columns."""
        x_SBD = enter_tp(self.norm(x_SBD), self.ctx, self.sequence_parallel)
        weight = self._embedding_weight[0] if self.weight is None else self.weight
        return linear(x_SBD, weight, None, None)


def _vocabulary(config: Config, ctx: ParallelContext) -> ShardSpec:
    """Placement of the embedding and of the output layer."""
    model = config.model
    assert model.vocab_size is not None, "the vocabulary size follows from the tokenizer before a model is built"
    multiple, initial = model.make_vocab_size_divisible_by, Initial("normal", model.init_method_std)
    return vocab_spec(model.vocab_size, model.hidden_size, multiple, ctx, initial)


class Decoder(nn.Module):
    """Layers ``layer_ids`` of the model, with the embedding and the output layer where this stage has them.

    Args:
        layer_ids: numbers of the layers, from 0.
        has_embedding, has_output: whether tokens enter and losses leave here.
        embedding_is_copied: the output layer is on another rank, which holds a copy of tied embeddings.
        embedding: the first stage's, where it is on this rank too and its weights are tied to the output layer's.
        queue: where a schedule that splits the backward pass finds deferred weight gradients.
    """

    def __init__(
        self,
        config: Config,
        ctx: ParallelContext,
        *,
        layer_ids: Sequence[int] | None = None,
        has_embedding: bool = True,
        has_output: bool = True,
        embedding_is_copied: bool = False,
        embedding: VocabParallelEmbedding | None = None,
        queue: WeightGradientQueue | None = None,
    ) -> None:
        super().__init__()
        model, self.ctx = config.model, ctx
        dtype = getattr(torch, config.training.params_dtype)
        pattern = config.moe.layer_pattern(model.num_layers)
        layer_ids = range(model.num_layers) if layer_ids is None else layer_ids
        self.embedding: VocabParallelEmbedding | None = None
        if has_embedding:
            spec = _vocabulary(config, ctx)
            if embedding_is_copied and not model.untie_embeddings_and_output_weights:
                spec = replace(spec, tied=True)
            self.embedding = VocabParallelEmbedding(spec, ctx, dtype, config.parallel.sequence_parallel)
        self.layers = nn.ModuleDict({str(i): Block(config, i, pattern[i], ctx, dtype, queue) for i in layer_ids})
        self.output = OutputLayer(config, ctx, dtype, self.embedding or embedding) if has_output else None
        if has_output and embedding is not None and not model.untie_embeddings_and_output_weights:
            embedding.weight.gradients_per_microbatch = 2  # from this stage and from its own
        self._sharded_units: list[list[Bucket]] = []
        name_parameters(self)
        initialise(self, ctx, config.training.seed)

    def forward(self, x_SBD: Tensor | None, tokens: TokenBatch) -> Tensor:
        """Activations of the previous stage (None at the first) -> those for the next, or the loss at the last.

        Returns:
            [S', B, D], or [] this rank's part of the loss: sum over its tokens / tokens of the global batch.
        """
        x_SBD = self.hidden(x_SBD, tokens)
        if self.output is None:
            return x_SBD
        logits_SBV = self.output(x_SBD)
        labels_N = tokens.context(tokens.labels_SB).flatten()
        loss_N = vocab_parallel_cross_entropy(logits_SBV.flatten(0, 1), labels_N, self.output.spec, self.ctx)
        mask_N = tokens.context(tokens.loss_mask_SB).flatten()
        return loss_N.masked_fill(~mask_N, 0.0).sum() / tokens.step.num_loss_tokens

    def hidden(self, x_SBD: Tensor | None, tokens: TokenBatch) -> Tensor:
        """Through the embedding, where it is here, and the layers: [S', B, D]."""
        for bucket in self._sharded_units[0] if self._sharded_units else ():
            bucket.gather()
        if self.embedding is not None:
            ids_SB = tokens.context(tokens.ids_SB)
            x_SBD = self.embedding(ids_SB)
        assert x_SBD is not None, "a stage without the embedding needs the previous stage's activations"
        for block, unit in zip_longest(self.layers.values(), self._sharded_units[1:]):
            x_SBD = with_weights(unit or [], partial(block, tokens=tokens), x_SBD)
        return x_SBD

    def units(self) -> list[list[ShardedParameter]]:
        """Parameters by unit: what is outside the layers first, then layer by layer."""
        in_layers = {id(p) for p in self.layers.parameters()}
        outside = [p for p in sharded_parameters(self).values() if id(p) not in in_layers]
        return [outside, *(list(sharded_parameters(block).values()) for block in self.layers.values())]

    def use_sharded_weights(self, units: list[list[Bucket]]) -> None:
        """From now on gather a layer's weights around its use; what is outside the layers stays for the whole step."""
        self._sharded_units = units
