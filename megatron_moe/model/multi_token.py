"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): module k predicts the token k + 2 places ahead.

    h_0 = norm(main model's last layer)                         t_i is token i of the sequence, k from 0
    h_k+1[i] = norm(layer(W [norm(Emb(t_i+k+1)) ; norm(h_k[i])]))      embedding first, as Megatron and the checkpoints
    logits = Head(h_k+1),  the target of place i is t_i+k+2

    loss = scaling / D x sum over k of (sum over places of the token losses / valid tokens of the global batch)

The divisor is that of the main loss, as the paper divides by T although k + 1 places have no target. Those places are
padding here: they are routed nowhere and count in no balance loss. Where documents are kept apart, a target in the next
document does not count.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_moe.config.schema import Config
from megatron_moe.model.block import Block
from megatron_moe.model.norm import Norm
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.linear import ReplicatedLinear
from megatron_moe.parallel.sharding import Initial
from megatron_moe.parallel.tokens import TokenBatch
from megatron_moe.parallel.weight_gradients import WeightGradientQueue


class PredictionModule(nn.Module):
    """Module ``index``: one more layer, MoE if the model's last one is, numbered after all of the model's."""

    def __init__(
        self,
        config: Config,
        index: int,
        ctx: ParallelContext,
        dtype: torch.dtype,
        queue: WeightGradientQueue | None = None,
    ) -> None:
        super().__init__()
        model, sequence_parallel = config.model, config.parallel.sequence_parallel

        def norm() -> Norm:
            return Norm(model.hidden_size, model, ctx, dtype, partial_tp=sequence_parallel)

        self.embedding_norm, self.hidden_norm = norm(), norm()
        self.projection = ReplicatedLinear(
            (model.hidden_size, 2 * model.hidden_size),
            ctx,
            dtype,
            partial_tp=sequence_parallel,
            initial=Initial("normal", model.init_method_std),
            queue=queue,
        )
        is_moe = config.moe.layer_pattern(model.num_layers)[-1]
        self.layer = Block(config, model.num_layers + index, is_moe, ctx, dtype, queue)
        self.norm = norm()

    def forward(self, he_2SBD: Tensor, tokens: TokenBatch) -> Tensor:
        """Hidden states of the module before and embeddings of the tokens ahead [2, S', B, D] -> [S', B, D].

        Args:
            tokens: as :func:`ahead` gives them.
        """
        h_SBD, e_SBD = he_2SBD
        joined = torch.cat([self.embedding_norm(e_SBD), self.hidden_norm(h_SBD)], -1)
        return self.norm(self.layer(self.projection(joined), tokens))


def ahead(tokens: TokenBatch, places: int) -> TokenBatch:
    """The batch as a prediction module sees it: ids and labels of so many places later, at the old places."""

    def later(whole_SB: Tensor) -> Tensor:
        return torch.cat([whole_SB[places:], torch.zeros_like(whole_SB[:places])])

    exists_SB = later(torch.ones_like(tokens.loss_mask_SB))
    mask_SB = later(tokens.loss_mask_SB) & exists_SB
    if tokens.documents_SB is not None:
        mask_SB = mask_SB & (later(tokens.documents_SB) == tokens.documents_SB)
    padding_SB = ~exists_SB
    if tokens.padding_SB is not None:
        padding_SB = padding_SB | tokens.padding_SB | later(tokens.padding_SB)
    return replace(
        tokens,
        ids_SB=later(tokens.ids_SB),
        labels_SB=later(tokens.labels_SB),
        loss_mask_SB=mask_SB,
        padding_SB=padding_SB,
    )
