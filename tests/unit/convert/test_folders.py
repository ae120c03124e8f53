"""Folders as they come: sharded, fused, of two types, quantised; old and new keys; and those that are refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron_moe.checkpoint import Checkpoint
from megatron_moe.checkpoint.checksums import damage
from megatron_moe.convert.configuration import read_config, write_config
from megatron_moe.convert.errors import ConversionError
from megatron_moe.convert.exporting import export_folder, prepare_export
from megatron_moe.convert.families import FAMILIES
from megatron_moe.convert.importing import import_folder, prepare_import
from megatron_moe.convert.quantised import Dequantised, mxfp4
from megatron_moe.model.size import logical_tensors
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training.conversion_check import compare_models, compare_tensors
from megatron_moe.training.loop import Run
from pretrain_moe import configuration
from tests.helpers.huggingface import float32_means_float64, loud_model, save
from tools import generate
from tools.convert_checkpoint import main


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a family, in float32."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("mixtral", "qwen3_moe", "deepseek_v3"):
        with float32_means_float64():
            model = loud_model(family)
        save(model.float(), folder / family)
        torch.manual_seed(0)
    return folder


def copied(folder: Path, out: Path, **config: object) -> Path:
    """A folder with other values in its config.json (None removes a key)."""
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    settings = json.loads((out / "config.json").read_text()) | config
    (out / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v != "removed"}))
    return out


def rewritten(folder: Path, change) -> Path:
    """The same folder with other tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def imported(folder: Path, out: Path, **options: object) -> Path:
    return import_folder(prepare_import(folder, logical_tensors, **options), out)  # type: ignore[arg-type]


def test_shards_and_fused_experts_are_read_and_written(models, tmp_path: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(models / "mixtral", dtype=torch.float32)
    save(model, tmp_path / "fused", save_original_format=False, max_shard_size="20KB")
    assert len(list((tmp_path / "fused").glob("*.safetensors"))) > 2
    fused, plain = imported(tmp_path / "fused", tmp_path / "a"), imported(models / "mixtral", tmp_path / "b")
    a, b = Checkpoint(fused), Checkpoint(plain)
    assert a.names == b.names and all(torch.equal(a.read(n), b.read(n)) for n in a.names)
    assert damage(plain) == []
    export_folder(prepare_export(plain, fused_experts=True), tmp_path / "back", shard_bytes=20_000)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    assert compare_tensors(tmp_path / "back", plain).same
    report = compare_models(tmp_path / "back", plain, num_tokens=20)
    assert report.same, f"{report}"
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    found = {name for p in (tmp_path / "back").glob("*.safetensors") for name in load_file(p)}
    assert index["weight_map"].keys() == found and "mlp.experts.gate_up_proj" in " ".join(found)


def test_types_are_kept_tensor_by_tensor(models, tmp_path: Path):
    folder = copied(models / "deepseek_v3", tmp_path / "theirs", dtype="bfloat16")

    def narrow(tensors):
        for name in tensors:
            if "correction_bias" not in name:
                tensors[name] = tensors[name].bfloat16()

    rewritten(folder, narrow)
    checkpoint = imported(folder, tmp_path / "ours")
    stored = Checkpoint(checkpoint)
    types = {name: stored.describe(name)[1] for name in stored.names}
    assert types["model.layers.1.moe.gate.bias_E"] == types["model.layers.1.moe.gate.weight"] == torch.float32
    assert types["model.layers.1.moe.experts.fc1"] == torch.bfloat16
    export_folder(prepare_export(checkpoint), tmp_path / "back")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[n].dtype == after[n].dtype and torch.equal(before[n], after[n]) for n in before)
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_prediction_modules_are_kept_or_dropped(models, tmp_path: Path):
    folder = copied(models / "deepseek_v3", tmp_path / "theirs", num_nextn_predict_layers=1)

    def add(tensors):
        for name in [n for n in tensors if "layers.2." in n]:
            tensors[name.replace("layers.2.", "layers.3.")] = tensors[name] + 0.5
        for name, size in (("enorm", (24,)), ("hnorm", (24,)), ("eh_proj", (24, 48)), ("shared_head.norm", (24,))):
            tensors[f"model.layers.3.{name}.weight"] = torch.randn(size)
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    with pytest.raises(ConversionError, match=r"missing: model\.layers\.3\..*--mtp"):
        prepare_import(folder, logical_tensors)
    rewritten(folder, add)
    kept = imported(folder, tmp_path / "kept")
    assert compare_tensors(folder, kept).same
    export_folder(prepare_export(kept), tmp_path / "back")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1

    dropped = imported(folder, tmp_path / "dropped", predictions="drop")
    assert not any("mtp" in name for name in Checkpoint(dropped).names)
    export_folder(prepare_export(kept, predictions="drop"), tmp_path / "without")
    assert (
        load_file(tmp_path / "without/model.safetensors").keys()
        == load_file(models / "deepseek_v3/model.safetensors").keys()
    )

    rewritten(folder, lambda tensors: tensors["model.layers.3.embed_tokens.weight"].add_(1.0))
    with pytest.raises(ConversionError, match=r"should be the same as model\.embed_tokens\.weight"):
        imported(folder, tmp_path / "differs")
    assert not (tmp_path / "differs").exists() and not list(tmp_path.glob("*.tmp-*"))


def test_prediction_modules_begin_as_copies_of_the_last_layer(models, tmp_path: Path):
    """transformers loses the modules on saving and still announces them; Mixtral never had any."""
    folder = copied(models / "deepseek_v3", tmp_path / "theirs", num_nextn_predict_layers=2)
    begun = imported(folder, tmp_path / "ours", predictions="copy")
    written = Checkpoint(begun)
    names = [name for name in written.names if "mtp." in name]
    assert sum(name.endswith("moe.experts.fc1") for name in names) == 2
    for name in names:
        part = name.split(".", 3)[3]
        found = written.read(name)
        if part.startswith("layer."):
            assert torch.equal(found, written.read(f"model.layers.2.{part.removeprefix('layer.')}")), name
        elif part == "projection.weight":
            assert torch.equal(found, torch.cat([torch.zeros(24, 24), torch.eye(24)], 1))
        else:
            expected = written.read("model.output.norm.weight") if part == "norm.weight" else torch.ones(24)
            assert torch.equal(found, expected), name
    export_folder(prepare_export(begun), tmp_path / "back")
    exported = imported(tmp_path / "back", tmp_path / "again", predictions="copy")  # there now, so they are kept
    again = Checkpoint(exported)
    assert again.names == written.names and all(torch.equal(again.read(n), written.read(n)) for n in again.names)
    mixtral = prepare_import(models / "mixtral", logical_tensors, predictions="copy")
    assert mixtral.config.model.mtp_num_layers == 1 and "mtp.0.layer.moe.experts.fc2" in mixtral.ours


@pytest.mark.parametrize("family", list(FAMILIES))
def test_old_keys_say_what_new_ones_say(family):
    if FAMILIES[family].remote_code:
        theirs = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 2}
        theirs |= {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}
        theirs |= {"intermediate_size": 24, "tie_word_embeddings": False, "model_type": family, "rope_theta": 5e4}
    else:
        made = getattr(transformers, FAMILIES[family].architecture.replace("ForCausalLM", "Config"))()
        made.rope_parameters["rope_theta"] = 54321.0
        theirs = made.to_dict()
        theirs |= {k: v for k, v in {"num_experts_per_tok": 2, "num_nextn_predict_layers": 0}.items() if k in theirs}
    config = read_config(FAMILIES[family], theirs)
    written = write_config(FAMILIES[family], config, "bfloat16", {})
    new = {
        k: v
        for k, v in written.items()
        if k not in ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype")
    }
    old = {k: v for k, v in written.items() if k not in ("rope_parameters", "dtype")}
    assert old["rope_theta"] == config.model.rotary_base > 2e4
    assert read_config(FAMILIES[family], new) == read_config(FAMILIES[family], old) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "mamba.*Known are: mixtral"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_theta": 77.0}, "rope_theta 77.0 and, in rope_parameters"),
        ({"attention_sink_size": 4}, "attention_sink_size.*--ignore-config-key"),
        ({"num_experts": 7}, "names of one thing"),
        ({"num_hidden_layers": "removed"}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, r"not expected: model\.layers\.2\."),
        ({"num_hidden_layers": 4}, r"missing: model\.layers\.3\."),
        ({"num_local_experts": 11}, r"not expected: .*experts\.11\."),
        ({"head_dim": 6}, "the configuration asks for"),
        ({"tie_word_embeddings": True}, "should be the same"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_configurations_that_are_refused(models, tmp_path: Path, change, message):
    folder = copied(models / "mixtral", tmp_path / "theirs", **change)
    with pytest.raises(ConversionError, match=message):
        imported(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists() and not list(tmp_path.glob("*.tmp-*"))


def test_damaged_folders_are_refused(models, tmp_path: Path, capsys):
    def refused(name: str, change, message: str) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(models / "mixtral", dtype=torch.float32)
        folder = save(model, tmp_path / name, max_shard_size="40KB")
        change(folder, sorted(folder.glob("*.safetensors")))
        assert main(["import", str(folder), str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    def index_without(folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"].popitem()
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    refused("no shard", lambda folder, shards: shards[0].unlink(), "copy the missing file")
    refused("no index", lambda folder, shards: (folder / "model.safetensors.index.json").unlink(), "but no model")
    refused("short", lambda folder, shards: shards[0].write_bytes(shards[0].read_bytes()[:-9]), "is damaged")
    refused("not in index", lambda folder, shards: index_without(folder), "in the files but not in")
    refused("no header", lambda folder, shards: shards[0].write_bytes(b"\xff" * 40), "not a whole safetensors file")


def test_outputs_and_tokenizers(models, tmp_path: Path, capsys):
    from tokenizers import Tokenizer
    from tokenizers import models as kinds

    def tokenizer(size: int) -> str:
        return Tokenizer(kinds.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0")).to_str()

    folder = copied(models / "mixtral", tmp_path / "theirs", eos_token_id=5)
    (folder / "tokenizer.json").write_text(tokenizer(62))
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 1
    assert "ids up to 61" in capsys.readouterr().err and not (tmp_path / "ours").exists()
    (folder / "tokenizer.json").write_text(tokenizer(61))
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 0
    assert main(["import", str(folder), str(tmp_path / "ours")]) == 1
    assert "not empty" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back")]) == 1
    assert "not empty" in capsys.readouterr().err and not list(tmp_path.glob("*.tmp-*"))
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert json.loads((tmp_path / "back/config.json").read_text())["eos_token_id"] == 5
    assert main(["verify", str(folder), str(tmp_path / "ours"), "--tokens", "20"]) == 0
    assert "models: the same" in capsys.readouterr().out
    assert main(["verify", str(models / "mixtral"), str(tmp_path / "ours"), "--tensors-only"]) == 0
    rewritten(folder, lambda tensors: tensors["model.layers.1.self_attn.k_proj.weight"].mul_(1.001))
    assert main(["verify", str(folder), str(tmp_path / "ours"), "--tokens", "20"]) == 1
    shown = capsys.readouterr().out
    assert "k_proj.weight: largest difference" in shown and "NOT the same" in shown


def test_what_a_family_cannot_express_is_named(models, tmp_path: Path):
    checkpoint = imported(models / "qwen3_moe", tmp_path / "ours")
    with pytest.raises(ConversionError, match=r"cannot express.*--qk-layernorm"):
        prepare_export(checkpoint, family="mixtral")
    text = (checkpoint / "config.yaml").read_text()
    (checkpoint / "config.yaml").write_text(
        text.replace("moe_expert_capacity_factor: null", "moe_expert_capacity_factor: 1.5")
    )
    with pytest.raises(ConversionError, match=r"--moe-expert-capacity-factor 1\.5"):
        prepare_export(checkpoint)


class Held:
    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        from megatron_moe.checkpoint.tensor_files import Described

        self.values = values
        self.tensors = {name: Described(tuple(t.shape), t.dtype) for name, t in values.items()}

    def read(self, name: str, row: int | None = None) -> torch.Tensor:
        return self.values[name] if row is None else self.values[name][row]


def test_fp8_blocks():
    weight, scale = torch.randn(200, 300).to(torch.float8_e4m3fn), torch.rand(2, 3)
    seen = Dequantised(
        Held({"w": weight, "w_scale_inv": scale}), {"quant_method": "fp8", "weight_block_size": [128, 128]}
    )
    assert list(seen.tensors) == ["w"] and seen.tensors["w"].dtype == torch.bfloat16
    expected = torch.stack(
        [torch.stack([weight[i, j].float() * scale[i // 128, j // 128] for j in (0, 130, 299)]) for i in (0, 199)]
    )
    torch.testing.assert_close(seen.read("w")[[0, 199]][:, [0, 130, 299]].float(), expected, rtol=4e-3, atol=0)


def test_mxfp4():
    blocks, scales = (
        torch.randint(0, 256, (2, 5, 3, 16), dtype=torch.uint8),
        torch.randint(120, 130, (2, 5, 3), dtype=torch.uint8),
    )
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    seen = Dequantised(Held({"x_blocks": blocks, "x_scales": scales}), {"quant_method": "mxfp4"})
    assert seen.tensors["x"].shape == tuple(theirs.shape) == (2, 96, 5)
    assert torch.equal(torch.stack([seen.read("x", 0), seen.read("x", 1)]), theirs)
    assert mxfp4(torch.tensor([[0x21] * 16], dtype=torch.uint8), torch.tensor([128], dtype=torch.uint8))[
        :2
    ].tolist() == [1.0, 2.0]


def test_training_and_text_go_on_from_an_import(tmp_path: Path, capsys):
    """--load OUT --finetune with the configuration that lies in OUT; then back again."""
    with float32_means_float64():
        model = loud_model("qwen3_moe", vocab_size=300)
    imported(save(model.float(), tmp_path / "theirs"), tmp_path / "ours")
    assert generate.main(["--load", str(tmp_path / "ours"), "--prompt", "ab", "--max-new-tokens", "3"]) == 0
    capsys.readouterr()
    assert generate.main(["--load", str(tmp_path / "ours"), "--prompt", "ab", "c", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("--- 1\nab")
    (tmp_path / "text").write_text("The sea, the sea")
    assert generate.main(["--load", str(tmp_path / "ours"), "--perplexity", str(tmp_path / "text")]) == 0
    assert "tokens 16" in capsys.readouterr().out
    flags = (
        f"--config {tmp_path}/ours/config.yaml --load {tmp_path}/ours --save {tmp_path}/tuned --finetune --mock-data "
    )
    flags += "--seq-length 16 --train-iters 1 --eval-interval 0 --peak-tflops 1 --num-workers 0 --global-batch-size 2"
    resolved = configuration(flags.split())
    Run(resolved.config, ParallelContext.single(), resolved.provenance).train()
    export_folder(prepare_export(tmp_path / "tuned/iter_0000001"), tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "qwen3_moe"
    assert (
        load_file(tmp_path / "back/model.safetensors").keys() == load_file(tmp_path / "theirs/model.safetensors").keys()
    )
