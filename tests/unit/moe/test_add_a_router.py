"""The worked example of docs/add_a_router.md runs as printed and stays short."""

import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from moe_oracle import combine_matrix, inputs_of

from megatron_moe.config.schema import MoEConfig
from megatron_moe.moe.capacity import decide
from megatron_moe.moe.checks import moe_checks
from megatron_moe.moe.routers import ROUTERS
from megatron_moe.moe.routing import flatten

PAGE = Path(__file__).parents[3] / "docs" / "add_a_router.md"


def test_worked_example():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(example.splitlines()) < 40
    with mock.patch.dict(ROUTERS):
        exec(compile(example, str(PAGE), "exec"), {"__name__": "example"})
        config = MoEConfig(num_experts=6, moe_router="top_p", moe_router_topk=4)
        assert not list(moe_checks(config))
        generator = torch.Generator().manual_seed(0)
        logits_GTE = 2 * torch.randn(2, 8, 6, generator=generator, dtype=torch.float64)
        choice = decide(ROUTERS["top_p"], inputs_of(logits_GTE.requires_grad_()), config)
        weights_GTE = combine_matrix(choice)
        for row, probabilities in zip(weights_GTE.flatten(0, 1), choice.scores_GTE.flatten(0, 1), strict=True):
            held, wanted = 0.0, []
            for p in probabilities.sort(descending=True).values.tolist()[:4]:
                if held < 0.8:
                    wanted.append(p)
                held += p
            assert sorted(row[row > 0].tolist(), reverse=True) == wanted
        copies = flatten(choice, ROUTERS["top_p"].leaves_holes).expert_ids_N.numel()
        assert 16 < copies == int((weights_GTE > 0).sum()) < 64
        full = decide(ROUTERS["top_p"], inputs_of(logits_GTE), replace(config, moe_expert_capacity_factor=0.5))
        assert int((full.expert_ids_GTK >= 0).sum()) < copies
