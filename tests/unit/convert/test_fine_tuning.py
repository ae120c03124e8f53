"""Fine-tuning an imported Mixtral gives the losses of fine-tuning it in transformers, step by step."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_moe.convert.importing import import_folder, prepare_import
from megatron_moe.model.size import logical_tensors
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training import checkpointing
from megatron_moe.training.build import build_machine
from megatron_moe.training.parity import batches
from megatron_moe.training.shrink import vary
from megatron_moe.training.step import train_step
from tests.helpers.huggingface import float32_means_float64, loud_model, save

STEPS, BATCH, RATE, DECAY, CLIP = 20, 4, 2e-3, 0.1, 1.0


def test_twenty_losses(tmp_path: Path):
    with float32_means_float64():
        model = loud_model("mixtral")
    reference = model.float().train()
    made = prepare_import(save(reference, tmp_path / "theirs"), logical_tensors)
    import_folder(made, tmp_path / "ours")
    config = vary(
        made.config,
        seq_length=16,
        global_batch_size=BATCH,
        micro_batch_size=2,
        train_iters=STEPS,
        moe_router_load_balancing_type=("none",),
        weight_decay=DECAY,
        clip_grad=CLIP,
        load=str(tmp_path / "ours"),
        finetune=True,
    )
    machine = build_machine(config, ParallelContext.single())
    assert checkpointing.load(machine, quiet=True) is None

    matrices = [p for p in reference.parameters() if p.dim() > 1]
    vectors = [p for p in reference.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    found, expected, norms = [], [], []
    for step in range(STEPS):
        data = batches(config, step * BATCH, 0, 1, False)
        found.append(train_step(machine, data, step + 1, RATE).loss)
        tokens, labels = (torch.cat([getattr(b, name) for b in data]) for name in ("tokens", "labels"))
        loss = cross_entropy(reference(input_ids=tokens).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    assert machine.config.training.params_dtype == "float32"
    assert found == pytest.approx(expected, rel=1e-5)
    assert min(norms) > CLIP and max(expected) - min(expected) > 0.1, "else clipping and learning would not be seen"
