"""What may change on resume."""

import pytest

from megatron_moe.config import Config, compare, to_dict
from megatron_moe.config.compare import BY_NAME, BY_SECTION, Agreement, agreement
from megatron_moe.config.settings import assemble, sections, settings


def test_every_setting_has_one_class() -> None:
    assert set(BY_SECTION) == set(sections())
    assert set(BY_NAME) <= set(settings())
    redundant = [name for name, kind in BY_NAME.items() if kind is BY_SECTION[settings()[name].section]]
    assert redundant == []
    assert all(isinstance(agreement(name), Agreement) for name in settings())


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("num_experts", 8, "must"),
        ("hidden_size", 512, "must"),
        ("seed", 1, "must"),
        ("split", "90,10", "must"),
        ("seq_length", 64, "must"),
        ("moe_router_topk", 1, "must"),
        ("lr", 1.0, "warn"),
        ("moe_aux_loss_coeff", (0.1,), "warn"),
        ("global_batch_size", 64, "warn"),
        ("data_path", ("moved",), "warn"),
        ("tensor_model_parallel_size", 2, "free"),
        ("micro_batch_size", 2, "free"),
        ("save_interval", 2, "free"),
        ("moe_token_dispatcher_type", "local", "free"),
        ("wandb_project", "p", "free"),
    ],
)
def test_classes(name: str, value: object, kind: str) -> None:
    found = compare(to_dict(Config()), assemble({name: value}))
    assert [item.name for item in found.must] == [name] * (kind == "must")
    assert [item.name for item in found.warn] == [name] * (kind == "warn")


def test_text_shows_both_values() -> None:
    saved = to_dict(assemble({"num_experts": 8, "lr": 1e-3}))
    found = compare(saved, assemble({"num_experts": 16, "data_path": ("a", "b")}))
    assert "\n  --num-experts: 8 in the checkpoint, 16 now\n" in found.must_text()
    assert "\n  --lr: 0.001 in the checkpoint, 0.0003 now" in found.warn_text()
    assert "\n  --data-path: none in the checkpoint, a b now" in found.warn_text()
    same = compare(saved, assemble({"num_experts": 8, "lr": 1e-3}))
    assert same.must_text() == same.warn_text() == ""


def test_a_default_equals_its_value_written_out() -> None:
    written = {
        "num_experts": 4,
        "ffn_hidden_size": 704,
        "num_query_groups": 8,
        "kv_channels": 32,
        "moe_ffn_hidden_size": 704,
        "moe_layer_freq": "[0,1,0,1]",
        "moe_first_dense_layers": 1,
    }
    assert compare(to_dict(assemble({"num_experts": 4})), assemble(written)).must == ()
    written["moe_layer_freq"] = "[0,1,1,1]"
    found = compare(to_dict(assemble({"num_experts": 4})), assemble(written))
    assert "moe_layer_freq" in [item.name for item in found.must]


def test_finetuning_must_agree_in_nothing() -> None:
    found = compare(to_dict(Config()), assemble({"seq_length": 64, "finetune": True}))
    assert found.must == () and [item.name for item in found.warn] == ["seq_length"]


def test_checkpoints_of_older_and_newer_versions() -> None:
    saved = to_dict(assemble({"num_experts": 8}))
    del saved["moe"]["moe_router_topk"]
    saved["moe"]["moe_no_longer_there"] = 3
    saved["no_longer_there"] = {"x": 1}
    assert compare(saved, assemble({"num_experts": 8})).must == ()
    assert [item.name for item in compare(saved, assemble({"num_experts": 8, "moe_router_topk": 4})).must] == [
        "moe_router_topk"
    ]
