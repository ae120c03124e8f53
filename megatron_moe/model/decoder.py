"""The decoder, or the part of it that a pipeline stage holds.

    ids_SB -> embedding -> x_SBD -> layers -> final norm -> logits (V / tp) -> loss per token -> sum / global tokens
                                                     |-> multi-token prediction, with the same embedding and output

Layers carry their number in the whole model, so that logical names do not depend on the stage.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_moe.config.schema import Config
from megatron_moe.kernels.selection import choose
from megatron_moe.model.block import Block
from megatron_moe.model.cross_entropy import vocab_parallel_cross_entropy
from megatron_moe.model.multi_token import PredictionModule, ahead
from megatron_moe.model.norm import Norm
from megatron_moe.model.offload import Mover, OffloadedPass
from megatron_moe.moe.losses import attach_loss
from megatron_moe.parallel.buckets import Bucket
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.gradients import ShardedUnit, with_weights
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
from megatron_moe.parallel.turns import Steps, in_turns
from megatron_moe.parallel.vocab import VocabParallelEmbedding, vocab_spec
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
        # Used more than once in a pass: autograd adds up what reducers count as one gradient.
        self.weight_is_shared = bool(self._embedding_weight) or bool(model.mtp_num_layers)
        self.weight: ShardedParameter | None = None
        if not self._embedding_weight:
            spec = replace(self.spec, tied=True, copy=True, name=EMBEDDING_NAME) if tied else self.spec
            self.weight = empty_parameter(spec, ctx, dtype)

    def forward(self, x_SBD: Tensor) -> Tensor:
        """x [S', B, D] -> logits [S, B, V_padded / tp], this rank's columns."""
        return self.logits(self.norm(x_SBD))

    def logits(self, x_SBD: Tensor) -> Tensor:
        """The same of rows that are normalised already."""
        x_SBD = enter_tp(x_SBD, self.ctx, self.sequence_parallel)
        weight = self._embedding_weight[0] if self.weight is None else self.weight
        return F.linear(x_SBD, weight) if self.weight_is_shared else linear(x_SBD, weight, None, None)


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
        embedding_is_copied: the output layer is on another rank, which holds a copy of the embedding where it needs
            one: for tied weights, and for multi-token prediction.
        embedding: the first stage's, where it is on this rank too.
        queue: where a schedule that splits the backward pass finds deferred weight gradients.
        initial_values: draw initial weights; else they are zero, to be loaded.
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
        initial_values: bool = True,
    ) -> None:
        super().__init__()
        model, self.ctx = config.model, ctx
        dtype = getattr(torch, config.training.params_dtype)
        pattern = config.moe.layer_pattern(model.num_layers)
        layer_ids = range(model.num_layers) if layer_ids is None else layer_ids
        num_mtp = (model.mtp_num_layers or 0) if has_output else 0
        ends_share = bool(model.mtp_num_layers) or not model.untie_embeddings_and_output_weights

        def vocabulary(**changes: Any) -> VocabParallelEmbedding:
            spec = replace(_vocabulary(config, ctx), **changes)
            return VocabParallelEmbedding(spec, ctx, dtype, config.parallel.sequence_parallel)

        self.embedding = vocabulary(tied=embedding_is_copied and ends_share) if has_embedding else None
        self.embedding_copy: VocabParallelEmbedding | None = None
        if num_mtp and self.embedding is None and embedding is None:
            self.embedding_copy = vocabulary(tied=True, copy=True, name=EMBEDDING_NAME)
        near = self.embedding or embedding or self.embedding_copy
        self._embedding = [near]  # in a list: where it is another stage's it is not registered here
        self.layers = nn.ModuleDict({str(i): Block(config, i, pattern[i], ctx, dtype, queue) for i in layer_ids})
        self.num_parts = config.moe.moe_overlap_degree if config.moe.moe_overlap_attention else 1
        for parameter in sharded_parameters(self.layers).values():
            parameter.uses_per_pass *= self.num_parts
        self.mtp = nn.ModuleList(PredictionModule(config, k, ctx, dtype, queue) for k in range(num_mtp))
        self.mtp_scale = model.mtp_loss_scaling_factor / max(num_mtp, 1)
        self.kernels = choose(model.kernels, ctx.device, dtype)
        self.mtp_losses: dict[int, Tensor] = {}  # of each module, this rank's part; by micro-batch and overwritten
        self.output = OutputLayer(config, ctx, dtype, near) if has_output else None
        if has_output and embedding is not None and ends_share:
            embedding.weight.passes_per_microbatch = 2  # from this stage and from its own
        self._sharded_units: list[ShardedUnit] = []  # layers, then prediction modules
        self._outside: list[Bucket] = []
        self.num_offloaded = config.training.cpu_offloading_num_layers
        self.mover = Mover(ctx.device, config.training.min_offloaded_tensor_size)
        name_parameters(self)
        initialise(self, ctx, config.training.seed if initial_values else None)

    def forward(self, x_SBD: Tensor | None, tokens: TokenBatch) -> Tensor:
        """Activations of the previous stage (None at the first) -> those for the next, or the loss at the last.

        Returns:
            [S', B, D], or [] this rank's part of the loss: sum over its tokens / tokens of the global batch. In
            training its backward pass is also that of the losses of multi-token prediction.
        """
        x_SBD = self.hidden(x_SBD, tokens)
        if self.output is None:
            return x_SBD
        h_SBD = self.output.norm(x_SBD)
        loss = self._loss(h_SBD, tokens)
        return attach_loss(loss, self._mtp_loss(h_SBD, tokens)) if len(self.mtp) and tokens.step.training else loss

    def _mtp_loss(self, h_SBD: Tensor, tokens: TokenBatch) -> Tensor:
        """The prediction modules one after the other: weighted losses of tokens ever further ahead."""
        losses, (embedding,) = [], self._embedding
        assert embedding is not None
        units = self._sharded_units[len(self.layers) :]
        for k, (module, unit) in enumerate(zip_longest(self.mtp, units)):
            further = ahead(tokens, k + 1)
            e_SBD = embedding(tokens.context(further.ids_SB))
            h_SBD = with_weights(unit, partial(module, tokens=further), torch.stack([h_SBD, e_SBD]))
            losses.append(self._loss(h_SBD, further))
        self.mtp_losses[tokens.microbatch] = torch.stack(losses).detach()
        return self.mtp_scale * torch.stack(losses).sum()

    def _loss(self, h_SBD: Tensor, tokens: TokenBatch) -> Tensor:
        assert self.output is not None
        logits_SBV = self.output.logits(h_SBD)
        labels_N = tokens.context(tokens.labels_SB).flatten()
        loss_N = vocab_parallel_cross_entropy(
            logits_SBV.flatten(0, 1), labels_N, self.output.spec, self.ctx, self.kernels["cross_entropy"]
        )
        mask_N = tokens.context(tokens.loss_mask_SB).flatten()
        return loss_N.masked_fill(~mask_N, 0.0).sum() / tokens.step.num_loss_tokens

    def hidden(self, x_SBD: Tensor | None, tokens: TokenBatch) -> Tensor:
        """Through the embedding, where it is here, and the layers: [S', B, D]."""
        for bucket in self._outside:
            bucket.gather()
        if self.embedding is not None:
            ids_SB = tokens.context(tokens.ids_SB)
            x_SBD = self.embedding(ids_SB)
        assert x_SBD is not None, "a stage without the embedding needs the previous stage's activations"
        if self.num_parts > 1:
            parts = zip(x_SBD.chunk(self.num_parts, 1), tokens.parts(self.num_parts), strict=True)
            return torch.cat(in_turns([self._through_layers(*part) for part in parts]), 1)
        below: OffloadedPass | None = None
        units = zip_longest(self.layers.values(), self._sharded_units[: len(self.layers)])
        for i, (block, unit) in enumerate(units):
            run = partial(block, tokens=tokens)
            if i < self.num_offloaded:
                below = OffloadedPass(block, self.mover, below)
                run = partial(below.run, run)
            x_SBD = with_weights(unit, run, x_SBD)
        return x_SBD

    def _through_layers(self, x_SBD: Tensor, tokens: TokenBatch) -> Steps:
        """Some of the samples, in turns with the others."""
        for block in self.layers.values():
            assert isinstance(block, Block)
            x_SBD = yield from block.steps(x_SBD, tokens)
        return x_SBD

    def units(self) -> list[list[ShardedParameter]]:
        """Parameters by unit: what is outside the layers first, then layer by layer, prediction modules included."""
        layers = [*self.layers.values(), *self.mtp]
        in_layers = {id(p) for layer in layers for p in layer.parameters()}
        outside = [p for p in sharded_parameters(self).values() if id(p) not in in_layers]
        return [outside, *(list(sharded_parameters(block).values()) for block in layers)]

    def use_sharded_weights(self, units: list[list[Bucket]]) -> None:
        """From now on gather a layer's weights around its use; what is outside the layers stays for the whole step."""
        self._outside, *inside = units
        num_layers = len(self.layers)  # apart from the prediction modules, which do not run in evaluation
        self._sharded_units = ShardedUnit.chain(inside[:num_layers]) + ShardedUnit.chain(inside[num_layers:])
