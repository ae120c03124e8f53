"""Every family: imported it computes the same, routes the same, and exported again it is the same, bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_moe.convert.exporting import export_folder, prepare_export
from megatron_moe.convert.importing import import_folder, prepare_import
from megatron_moe.model.size import logical_tensors
from megatron_moe.training.conversion_check import compare, compare_tensors, our_model, their_model
from tests.helpers.huggingface import FAMILIES, float32_means_float64, loud_model, save, tokens


@pytest.mark.parametrize("family", list(FAMILIES))
def test_same_function_and_same_bits(family, tmp_path: Path):
    with float32_means_float64():
        reference = loud_model(family)
        save(reference, tmp_path / "theirs")
    made = prepare_import(tmp_path / "theirs", logical_tensors)
    assert made.config.training.params_dtype == "float64"
    checkpoint = import_folder(made, tmp_path / "ours")
    with float32_means_float64():
        report = compare(reference, our_model(checkpoint, "float64"), tokens(), 1e-9)
    assert report.same, f"{report}"
    assert max(report.layers) < 1e-9 and set(report.routing.values()) <= {1.0}, f"{report}"
    assert bool(report.routing) == (made.config.moe.num_experts is not None)

    assert compare_tensors(tmp_path / "theirs", checkpoint).same
    export_folder(prepare_export(checkpoint), tmp_path / "back")
    before, after = load_file(tmp_path / "theirs/model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[n].dtype == after[n].dtype and torch.equal(before[n], after[n]) for n in before)
    with float32_means_float64():
        again = their_model(tmp_path / "back", torch.float64)  # an error where anything is missing or left over
        assert compare(again, our_model(checkpoint, "float64"), tokens(), 1e-9).same
