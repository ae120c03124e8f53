"""Models of transformers, imported and loaded under a layout: loss and gradients of the first step are theirs."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_moe.checkpoint.streaming import Piece
from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.config.schema import CheckpointConfig
from megatron_moe.convert.importing import import_folder, prepare_import
from megatron_moe.convert.table import form_in, steps_for
from megatron_moe.model.size import logical_tensors
from megatron_moe.training import checkpointing
from megatron_moe.training.build import Machine
from tests.helpers.huggingface import float32_means_float64, loud_model, save
from tests.helpers.ranks import RankPool
from tests.parity.harness import batches, layout, trace, vary


def loaded(machine: Machine) -> AbstractContextManager[None]:
    """What --load --finetune does, before the first step."""
    assert checkpointing.load(machine, quiet=True) is None
    return nullcontext()


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_loss_and_gradients_on_a_layout(family, tmp_path: Path, ranks: RankPool):
    fields, world_size = layout("tp=2,pp=2,ep=2")
    with float32_means_float64():
        reference = loud_model(family)
        made = prepare_import(save(reference, tmp_path / "theirs"), logical_tensors)
        import_folder(made, tmp_path / "ours")
    config = replace(made.config, checkpoint=CheckpointConfig(load=str(tmp_path / "ours"), finetune=True))
    config = vary(
        config, seq_length=16, global_batch_size=4, moe_router_load_balancing_type=("none",), train_iters=3, **fields
    )
    found = trace(config, world_size, ranks, prepare=loaded)

    (batch,) = batches(vary(config, micro_batch_size=4), 0, 0, 1, False)
    with float32_means_float64():
        logits = reference(input_ids=batch.tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
    assert found.losses[0] == pytest.approx(loss.item(), rel=1e-9)
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    shapes = {n: Described(*v) for n, v in logical_tensors(config).items() if not n.endswith("bias_E")}
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in shapes}
    for step in steps_for(made.family.rules, shapes, {"num_layers": config.model.num_layers}, form_in(theirs)):
        gradients[step.ours.name].append(step.operation.to_ours([part(theirs, piece) for piece in step.theirs]))
    assert gradients.keys() == found.gradients[0].keys()
    for name, parts in gradients.items():
        expected = parts[0] if len(parts) == 1 else torch.stack(parts)
        torch.testing.assert_close(
            torch.from_numpy(found.gradients[0][name]), expected, rtol=1e-8, atol=1e-10, msg=name
        )


def part(tensors: dict[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    return tensors[piece.name] if piece.row is None else tensors[piece.name][piece.row]
