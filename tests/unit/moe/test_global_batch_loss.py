"""The global-batch balance loss: counts of the last step, probabilities of this one, whatever the micro-batches."""

from itertools import pairwise
from types import SimpleNamespace

import torch

from megatron_moe.config.schema import ModelConfig, MoEConfig
from megatron_moe.moe.gate import Gate
from megatron_moe.moe.losses import BALANCE_LOSSES
from megatron_moe.moe.routing import Choice
from megatron_moe.parallel.context import ParallelContext


def test_micro_batches_add_up_to_the_loss_of_the_batch() -> None:
    moe = MoEConfig(num_experts=4, moe_router_topk=2, moe_router_load_balancing_type=("global_aux_loss",))
    gate = Gate(ModelConfig(hidden_size=8), moe, 0, ParallelContext.single(), torch.float64)
    loss = BALANCE_LOSSES["global_aux_loss"]
    assert loss is not None and gate.batch_load_E is not None
    scores_TE = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).softmax(-1)
    tokens = SimpleNamespace(step=SimpleNamespace(num_routed_tokens=12.0))

    def part(start: int, stop: int) -> float:
        ids = torch.zeros(1, stop - start, 2, dtype=torch.int64)
        choice = Choice(ids, ids.double(), scores_TE[None, start:stop], ids)
        return float(gate._balance_loss(loss, choice, tokens))  # type: ignore[arg-type]

    torch.testing.assert_close(part(0, 12), 1.0)  # uniform before the first step
    load_E = torch.tensor([0.9, 0.7, 0.4, 0.0], dtype=torch.float64)  # copies per token of the last step
    gate.batch_load_E.copy_(load_E)
    expected = float(4 * (load_E / 2 * scores_TE.mean(0)).sum())  # E sum f_e P_e, f_e = c_e / (K T)
    for cuts in ((0, 12), (0, 5, 12), (0, 1, 2, 7, 12)):
        torch.testing.assert_close(sum(part(a, b) for a, b in pairwise(cuts)), expected)
