"""Checkpoints of Megatron-Core: one that it wrote computes here what it computed there; bad ones are refused.

``megatron_core.tar.gz`` is a ``torch_dist`` checkpoint written by the package megatron-core 0.19.2, with its tokens and
its logits: see ``tests/interop/megatron_core_checkpoint.py``, which made it and compares further kinds of models.
"""

import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_moe.checkpoint import Checkpoint
from megatron_moe.config import dump
from megatron_moe.convert.errors import ConversionError
from megatron_moe.convert.importing import prepare_megatron_import
from megatron_moe.convert.megatron_arguments import read_arguments
from megatron_moe.convert.torch_dist import TorchDistFolder
from megatron_moe.model.generation import whole_batch
from megatron_moe.model.size import logical_tensors
from megatron_moe.training.conversion_check import our_model
from tools.convert_checkpoint import main

V = 61


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("megatron_core.tar.gz")) as archive:
        archive.extractall(tmp_path / "run/iter_0000007", filter="data")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("7\n")
    return tmp_path / "run/iter_0000007"


@torch.no_grad()
def test_logits_are_theirs(theirs: Path, tmp_path: Path, capsys):
    """Dense first layer, shared gated expert, sigmoid scores, groups, bias of the choice, norms of queries and keys."""
    command = ["import", "--from", "megatron-core", str(theirs.parent), str(tmp_path / "ours")]
    assert main([*command, "--vocab-size", str(V)]) == 0
    assert "float32" in capsys.readouterr().out
    model, expected = our_model(tmp_path / "ours/iter_0000000", "float32"), load_file(theirs / "expected.safetensors")
    assert model.output is not None
    hidden_SBD = model.hidden(None, whole_batch(expected["ids"].T, model.ctx))
    found = model.output(hidden_SBD)[..., :V].transpose(0, 1)
    torch.testing.assert_close(found, expected["logits"], rtol=0, atol=1e-5 * float(expected["logits"].abs().max()))
    assert main(command) == 1 and "not empty" in capsys.readouterr().err


def test_a_file_of_settings_stands_for_arguments(theirs: Path, tmp_path: Path, monkeypatch, capsys):
    config = read_arguments(TorchDistFolder(theirs).arguments())
    assert config.model.vocab_size == 64, "Megatron's arguments tell the padded size alone"
    (tmp_path / "settings.yaml").write_text(dump(config))
    monkeypatch.setattr(TorchDistFolder, "arguments", lambda self: {})
    command = ["import", "--from", "megatron-core", str(theirs), str(tmp_path / "ours")]
    assert main(command) == 1 and "--config FILE" in capsys.readouterr().err
    assert main([*command, "--config", str(tmp_path / "settings.yaml")]) == 0
    written = Checkpoint(tmp_path / "ours/iter_0000000")
    assert written.describe("model.embedding.weight")[0] == (64, 16)
    assert main(["import", "huggingface", str(tmp_path / "x"), "--vocab-size", "61"]) == 1


def test_every_tensor_has_its_place(theirs: Path):
    config = read_arguments(TorchDistFolder(theirs).arguments())

    def refused(message: str, **model: object) -> None:
        changed = replace(config, model=replace(config.model, **model))
        with pytest.raises(ConversionError, match=message):
            prepare_megatron_import(theirs, logical_tensors, config=changed)

    with pytest.raises(ConversionError, match=r"not expected: .*router\.expert_bias"):
        moe = replace(config.moe, moe_router_enable_expert_bias=False)
        prepare_megatron_import(theirs, logical_tensors, config=replace(config, moe=moe))
    refused(r"not expected: output_layer", untie_embeddings_and_output_weights=False)
    refused(r"not expected: .*k_layernorm", qk_layernorm=False)
    refused("does not fit 4 heads of 8 channels in 4 groups", num_query_groups=None)
    refused("the configuration asks for", ffn_hidden_size=24)
    refused(r"missing: .*mtp\.layers\.0\.enorm", mtp_num_layers=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_expert_capacity_factor": 1.5}, "--moe-expert-capacity-factor 1.5 changes"),
        ({"apply_layernorm_1p": True}, "--apply-layernorm-1p"),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"position_embedding_type": "learned_absolute"}, "--position-embedding-type learned_absolute"),
        ({"moe_router_load_balancing_type": ["sinkhorn"]}, "sinkhorn"),
        ({"moe_router_score_function": "sqrtsoftplus"}, "sqrtsoftplus"),
        ({"moe_router_score_function": "softmax"}, "--moe-router-group-topk with a softmax after"),
        ({"moe_router_topk": 1}, "--moe-router-topk 1 with sigmoid"),
        ({"swiglu": False, "bias_gelu_fusion": True, "add_bias_linear": True}, "tanh"),
        ({"rotary_percent": 0.4}, "odd number"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_arguments_that_are_refused(theirs: Path, change, message):
    arguments = TorchDistFolder(theirs).arguments() | change
    with pytest.raises(ConversionError, match=message):
        read_arguments(arguments)
    (name, *_) = change
    if name in ("moe_expert_capacity_factor", "apply_layernorm_1p"):
        read_arguments(arguments, ignore=[name])


def test_arguments_that_have_other_names():
    base = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12, "vocab_size": 9}
    base |= {"position_embedding_type": "rope"}
    config = read_arguments(base | {"squared_relu": True, "num_query_groups": 1, "layernorm_epsilon": 1e-3})
    assert (config.model.activation, config.model.query_groups, config.model.norm_epsilon) == ("squared_relu", 2, 1e-3)
    assert config.model.normalization == "LayerNorm" and config.model.add_bias_linear
    config = read_arguments(base | {"swiglu": True, "num_experts": 4, "moe_layer_freq": [0, 1, 0, 1]})
    assert config.moe.layer_pattern(4) == (False, True, False, True) and config.moe.moe_ffn_hidden_size == 12
    config = read_arguments(base | {"use_rope_scaling": True, "window_size": (127, 0), "window_attn_skip_freq": 2})
    assert (config.model.rope_type, config.model.rotary_scaling_factor) == ("llama3", 8.0)
    assert config.model.windows == (127, None, 127, None)


def test_damaged_checkpoints_are_refused(theirs: Path, tmp_path: Path, capsys):
    def refused(message: str) -> None:
        assert main(["import", "--from", "megatron-core", str(theirs), str(tmp_path / "out")]) == 1
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.tmp-*"))

    data, whole = theirs / "__0_0.distcp", (theirs / "__0_0.distcp").read_bytes()
    data.write_bytes(whole[:-5000])
    refused("is damaged: it ends inside")
    data.write_bytes(whole[:60000] + bytes(120000) + whole[180000:])
    refused("is damaged")
    data.unlink()
    refused("lacks __0_0.distcp")
    metadata = theirs / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-300])
    refused(".metadata is damaged")
    metadata.unlink()
    refused("--ckpt-format torch_dist")


def test_a_tensor_that_lacks_a_part_is_refused(theirs: Path):
    """Else its place would hold what was in memory there before."""
    folder = TorchDistFolder(theirs)
    name, stored = next((n, s) for n, s in folder._stored.items() if len(getattr(s, "chunks", ())) > 1)
    stored.chunks.pop()
    with pytest.raises(ConversionError, match=f"lacks .* numbers of {name}"):
        folder.read(name)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


def test_nothing_in_a_checkpoint_is_run(theirs: Path, tmp_path: Path):
    bomb = Bomb(tmp_path / "ran")
    pickle.loads(pickle.dumps(bomb))
    assert bomb.path.exists()
    bomb.path.unlink()
    (theirs / ".metadata").write_bytes(pickle.dumps(bomb))
    with pytest.raises(ConversionError, match="damaged"):
        TorchDistFolder(theirs)
    with tarfile.open(Path(__file__).with_name("megatron_core.tar.gz")) as archive:
        archive.extract("./.metadata", theirs, filter="data")
    folder = TorchDistFolder(theirs)
    folder._stored.pop("common_state/shard_0_1")  # as versions before 0.15 wrote it
    torch.save({"args": bomb, "more": bomb}, theirs / "common.pt")
    assert folder.arguments() == {} and not bomb.path.exists()
