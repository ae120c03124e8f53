"""Upcycling: the oracle's numbers; the function of the dense model where it is promised; refusals where it is not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_moe.checkpoint.tensor_files import Described
from megatron_moe.config.schema import Config, ModelConfig
from megatron_moe.convert.errors import ConversionError
from megatron_moe.convert.importing import import_folder, prepare_import
from megatron_moe.convert.upcycling import Upcycling, moe_config, paper_scale, upcycled_pieces
from megatron_moe.model.size import logical_tensors
from megatron_moe.training.conversion_check import compare, our_model
from tests.helpers.huggingface import float32_means_float64, loud_model, save, tokens
from tools.upcycle import main

CASES = json.loads((Path(__file__).parents[2] / "vectors/upcycle.json").read_text())["cases"]
PLAIN = Upcycling(4, 1, 2, pre_softmax=False, scaling="exact", layers=(True,) * 3, router_std=0.02, seed=1)


@pytest.mark.parametrize("case", [c for c in CASES if c["params"]["kind"] == "scale"], ids=lambda case: case["name"])
def test_scale(case):
    values = case["params"]
    found = paper_scale(
        values["expansion"],
        values["granularity"],
        values["k"],
        pre_softmax=values["pre_softmax"],
        gated=values["gated"],
    )
    assert found == pytest.approx(case["expected"]["scale"], rel=1e-12)


class Dense:
    """One layer's feed-forward."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        self.tensors: dict[str, Described] = {}
        self.fc1, self.fc2 = torch.stack([gate, up]), down

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        return self.fc1 if "fc1" in name else self.fc2


def test_virtual_groups():
    (case,) = [c for c in CASES if c["params"]["kind"] == "virtual_groups"]
    gate, up, down = (torch.tensor(case["inputs"][f"w_{kind}"], dtype=torch.float64) for kind in ("gate", "up", "down"))
    experts, granularity = case["params"]["expansion"], case["params"]["granularity"]
    how = replace(PLAIN, expansion=experts, granularity=granularity, topk=granularity, scaling="none")
    width, hidden = gate.shape[0] // granularity, gate.shape[1]
    tensors = {
        "layers.0.moe.gate.weight": Described((experts * granularity, hidden), torch.float64),
        "layers.0.moe.experts.fc1": Described((experts * granularity, 2, width, hidden), torch.float64),
        "layers.0.moe.experts.fc2": Described((experts * granularity, hidden, width), torch.float64),
    }
    config = Config(model=ModelConfig(hidden_size=hidden, ffn_hidden_size=gate.shape[0]))
    pieces = dict(upcycled_pieces(Dense(gate, up, down), config, tensors, how))
    for number, (its_gate, its_up, its_down) in enumerate(case["expected"]["experts"]):
        fc1 = next(t for p, t in pieces.items() if p == ("layers.0.moe.experts.fc1", number))
        fc2 = next(t for p, t in pieces.items() if p == ("layers.0.moe.experts.fc2", number))
        assert fc1.tolist() == [its_gate, its_up] and fc2.tolist() == its_down
    rows = next(t for p, t in pieces.items() if p.name.endswith("gate.weight"))
    expected = torch.tensor(case["expected"]["w_router"], dtype=torch.float64)
    same = [[bool((a == b).all()) for b in rows] for a in rows]  # which experts share a row: the numbers are random
    assert same == [[bool((a == b).all()) for b in expected] for a in expected]


@pytest.mark.parametrize(
    "flags", ["--expansion 4", "--expansion 3 --granularity 2 --topk 2", "--expansion 3 --granularity 4 --topk 8"]
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_function_is_preserved(family, flags, tmp_path: Path, capsys):
    with float32_means_float64():
        reference = loud_model(family)
        save(reference, tmp_path / "dense")
    arguments = [str(tmp_path / "dense"), str(tmp_path / "moe"), *flags.split(), "--layers", "[1,0,1]"]
    assert main(arguments) == 0, capsys.readouterr().err
    assert "exactly" in capsys.readouterr().out
    model = our_model(tmp_path / "moe/iter_0000000", "float64")
    assert model.layers["0"].moe is not None and model.layers["1"].moe is None
    with float32_means_float64():
        report = compare(reference, model, tokens(), 1e-10)
    assert report.same, f"{report}"


def test_from_a_checkpoint_and_without_the_promise(tmp_path: Path, capsys):
    with float32_means_float64():
        reference = loud_model("llama")
        made = prepare_import(save(reference, tmp_path / "dense"), logical_tensors)
    import_folder(made, tmp_path / "ours")
    assert main([str(tmp_path / "ours"), str(tmp_path / "same"), "--expansion", "2"]) == 0
    flags = ["--expansion", "3", "--pre-softmax", "--topk", "2"]
    assert main([str(tmp_path / "ours"), str(tmp_path / "other"), *flags]) == 0
    assert "near" in capsys.readouterr().out
    for name, same in (("same", True), ("other", False)):
        with float32_means_float64():
            model = our_model(tmp_path / name / "iter_0000000", "float64")
            assert compare(reference, model, tokens(), 1e-10).same == same
    assert main([str(tmp_path / "same"), str(tmp_path / "again"), "--expansion", "2"]) == 1
    assert "already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"granularity": 3, "topk": 3}, "does not divide the width 20"),
        ({"granularity": 2, "topk": 3}, "of --granularity 2"),
        ({"topk": 5}, "not between 1 and the 4 experts"),
        ({"pre_softmax": True}, "--scaling paper or none"),
    ],
    ids=str,
)
def test_refused(change, message):
    with pytest.raises(ConversionError, match=message):
        moe_config(Config(model=ModelConfig(num_layers=3, ffn_hidden_size=20)), replace(PLAIN, **change))
