"""Checks by hand that GPT-MoE checkpoints written by the package megatron-core compute the same after import.

Not collected by pytest, because megatron-core is no dependency. In a virtual environment of its own, from the
repository root (megatron-core asks for a newer Python than it needs here)::

    python -m venv .venv-megatron && source .venv-megatron/bin/activate
    pip install torch==2.13.0 numpy packaging triton einops psutil pyyaml
    pip download --no-deps --ignore-requires-python -d .venv-megatron/dl megatron-core==0.19.2
    pip install --no-deps --ignore-requires-python .venv-megatron/dl/megatron_core-*.whl
    PYTHONPATH=. python tests/interop/megatron_core_checkpoint.py

Every model has loud weights: norms, biases and the bias of the choice far from their defaults. The largest relative
difference of logits seen with 0.19.2 was 8e-7, in float32. Some are loaded and saved again by two ranks, and must then
give the same bits. ``--fixture tests/unit/convert/megatron_core.tar.gz`` writes
the checkpoint that the test beside it reads, with its tokens and logits.
"""

import argparse
import contextlib
import os
import shutil
import socket
import sys
import tarfile
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from megatron_moe.convert.importing import import_folder, prepare_megatron_import
from megatron_moe.convert.moving import import_pieces
from megatron_moe.model.generation import whole_batch
from megatron_moe.model.multi_token import ahead
from megatron_moe.model.size import logical_tensors
from megatron_moe.training.conversion_check import our_model

LAYERS, S, B, V, E = 2, 20, 2, 61, 12

BASE: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 20,
    "moe_ffn_hidden_size": 10,
    "num_moe_experts": E,
    "moe_router_topk": 3,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 3e-4,
}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: (fields of TransformerConfig, arguments of GPTModel, how it is saved)
    "softmax": ({}, {}, {}),
    "softmax over all, tied": ({"moe_router_pre_softmax": True}, {"share_embeddings_and_output_weights": True}, {}),
    "sigmoid, bias, groups, shared, qk norm, dense first": (
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 3,
            "moe_router_topk": 6,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_shared_expert_intermediate_size": 14,
            "moe_shared_expert_gate": True,
            "qk_layernorm": True,
            "moe_layer_freq": [0, 1],
        },
        {},
        {},
    ),
    "one by one": ({"moe_shared_expert_intermediate_size": 14}, {}, {"singleton_local_shards": True}),
    "biases, LayerNorm, not gated": (
        {"add_bias_linear": True, "normalization": "LayerNorm", "gated_linear_unit": False, "activation_func": "relu2"},
        {"rotary_percent": 0.5},
        {},
    ),
    "qkv bias, interpolated positions": (
        {"add_qkv_bias": True, "moe_layer_freq": 2},
        {"seq_len_interpolation_factor": 4.0},
        {"singleton_local_shards": True},
    ),
    "multi-token prediction": ({"mtp_num_layers": 1}, {}, {}),
}
FIXTURE = "sigmoid, bias, groups, shared, qk norm, dense first"


@contextlib.contextmanager
def on_the_cpu(rank: int, world_size: int, layout: dict[str, int]) -> Any:
    """megatron-core asks torch.cuda for its device and streams, whatever it runs on."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    cpu, stay = torch.device("cpu"), lambda self, *args, **kwargs: self
    names = {"current_device": lambda: cpu, "set_device": lambda *a: None, "manual_seed": torch.manual_seed}
    names |= {"get_rng_state": lambda *a, **k: torch.get_rng_state(), "synchronize": lambda *a: None}
    with contextlib.ExitStack() as stack:
        for name, value in names.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "cuda", stay))
        stack.enter_context(mock.patch.object(torch.nn.Module, "cuda", stay))
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random

        random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
        random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **layout)
        random.model_parallel_cuda_manual_seed(1)
        yield
        dist.destroy_process_group()


def model_of(name: str, *, layout: dict[str, int] | None = None, **stage: bool) -> Any:
    """A model of megatron-core in float32 with loud weights."""
    from megatron.core.activations import squared_relu
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields, arguments, _ = VARIANTS[name]
    fields = {**BASE, **fields}
    if fields["activation_func"] == "relu2":
        fields["activation_func"] = squared_relu
    off = dict.fromkeys(("masked_softmax_fusion", "apply_rope_fusion", "gradient_accumulation_fusion"), False)
    off |= dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion"), False)
    config = TransformerConfig(
        **fields,
        **off,
        **(layout or {}),
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp64",
        use_cpu_initialization=True,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    model = GPTModel(
        config,
        spec,
        vocab_size=64,  # padded
        max_sequence_length=64,
        position_embedding_type="rope",
        mtp_block_spec=mtp,
        **stage,
        **{"rotary_base": 123, "share_embeddings_and_output_weights": False, **arguments},
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + ("norm" in key and "weight" in key))
        for key, p in model.named_buffers():
            if key.endswith("expert_bias"):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3 - 1.0)
    return model.eval()


def arguments_of(name: str) -> Namespace:
    """What Megatron-LM's training saves beside such a model, as far as it is read here."""
    fields, arguments, _ = VARIANTS[name]
    values = {**BASE, **fields, **arguments}
    values["num_experts"] = values.pop("num_moe_experts")
    activation, gated = values.pop("activation_func"), values.pop("gated_linear_unit")
    values["swiglu"], values["squared_relu"] = gated, activation == "relu2"
    shared = values.pop("share_embeddings_and_output_weights", False)
    values["rotary_seq_len_interpolation_factor"] = values.pop("seq_len_interpolation_factor", None)
    values["untie_embeddings_and_output_weights"] = not shared
    values |= {"rotary_base": 123, "group_query_attention": True, "position_embedding_type": "rope"}
    values |= {"seq_length": 64, "vocab_size": None, "padded_vocab_size": 64, "params_dtype": torch.float32}
    return Namespace(**values)


def save(model: Any, name: str, folder: Path) -> None:
    """Write it as Megatron-LM does."""
    from megatron.core import dist_checkpointing, parallel_state

    metadata = {**VARIANTS[name][2], "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": model.sharded_state_dict(metadata=metadata), "args": arguments_of(name), "iteration": 7}
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(state, str(folder))


@torch.no_grad()
def outputs(model: Any, ids_BS: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits [B, S, V] of the model and of its prediction module."""
    mask = torch.ones(1, 1, S, S, dtype=torch.bool).triu(1)
    positions = torch.arange(S).expand(B, -1)
    kept: dict[str, torch.Tensor] = {}
    hooks = []
    if getattr(model, "mtp", None) is not None:
        hooks.append(model.mtp.register_forward_hook(lambda m, a, o: kept.update(hidden=o[S:])))
        with contextlib.suppress(IndexError):  # its loss, without labels; what is looked at has been computed
            model(ids_BS, positions, mask)
        mtp = model.output_layer(kept.pop("hidden"))[0]
        kept["module"] = mtp.transpose(0, 1)[:, :-1, :V]
        model.config.mtp_num_layers, model.mtp_process = None, False
    kept["logits"] = model(ids_BS, positions, mask)[..., :V]
    for hook in hooks:
        hook.remove()
    return kept


@torch.no_grad()
def ours(checkpoint: Path, ids_BS: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same of the imported model."""
    model = our_model(checkpoint, "float32")
    tokens = whole_batch(ids_BS.T, model.ctx)
    hidden_SBD = model.hidden(None, tokens)
    assert model.output is not None and model.embedding is not None
    found = {"logits": model.output(hidden_SBD)[..., :V].transpose(0, 1)}
    if len(model.mtp):
        further = ahead(tokens, 1)
        both = torch.stack([model.output.norm(hidden_SBD), model.embedding(further.ids_SB)])
        logits_SBV = model.output.logits(model.mtp[0](both, further))
        found["module"] = logits_SBV[..., :V].transpose(0, 1)[:, :-1]  # at the last place there is no token ahead
    return found


LAYOUTS: dict[str, dict[str, int]] = {
    "tp 2": {"tensor_model_parallel_size": 2},
    "pp 2": {"pipeline_model_parallel_size": 2},
    "ep 2": {"expert_model_parallel_size": 2},
}


def resave(rank: int, name: str, layout: str, source: str, target: str) -> None:
    """On one of two ranks: load a checkpoint under a layout of megatron-core, and save it again."""
    with on_the_cpu(rank, 2, LAYOUTS[layout]):
        from megatron.core import dist_checkpointing, parallel_state

        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        model = model_of(name, pre_process=first, post_process=last, layout=LAYOUTS[layout])
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(-7.0)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        metadata = {**VARIANTS[name][2], "dp_cp_group": group}
        state = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, source)
        model.load_state_dict(state["model"])
        save(model, name, Path(target))


def free_port() -> str:
    """One that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def main() -> int:
    """Every variant: written by megatron-core, imported, compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixture", type=Path)
    args = parser.parse_args()
    kept = tempfile.mkdtemp()
    os.environ["MASTER_PORT"] = free_port()
    with on_the_cpu(0, 1, {}):
        ids_BS = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(5))
        failed = 0
        for name in VARIANTS:
            model = model_of(name)
            with tempfile.TemporaryDirectory() as folder:
                theirs = Path(folder) / "theirs"
                save(model, name, theirs)
                shutil.copytree(theirs, Path(kept) / name)
                made = prepare_megatron_import(theirs, logical_tensors, vocab_size=V)
                found = ours(import_folder(made, Path(folder) / "ours"), ids_BS)
                expected = outputs(model, ids_BS)
                if args.fixture and name == FIXTURE:
                    values = {"ids": ids_BS, "logits": expected["logits"].contiguous()}
                    save_file(values, theirs / "expected.safetensors")
                    with tarfile.open(args.fixture, "w:gz") as archive:
                        archive.add(theirs, ".")
            for what, values in found.items():
                error = float((values - expected[what]).abs().max() / expected[what].abs().max())
                failed += error > 1e-5
                print(f"{name}: {len(made.ours)} tensors, {what} differ by {error:.1e}")
    failed += layouts(Path(kept))
    shutil.rmtree(kept)
    return int(failed > 0)


def layouts(kept: Path) -> int:
    """The checkpoints of two ranks hold what those of one process do; how many do not."""
    failed = 0
    for name in (FIXTURE, "one by one", "softmax over all, tied"):
        one = prepare_megatron_import(kept / name, logical_tensors, vocab_size=V)
        for layout in LAYOUTS:
            target = kept / f"{name}, {layout}"
            target.mkdir()
            os.environ["MASTER_PORT"] = free_port()
            torch.multiprocessing.spawn(resave, (name, layout, str(kept / name), str(target)), nprocs=2)
            two = prepare_megatron_import(target, logical_tensors, vocab_size=V)
            pieces = [list(import_pieces(made.plan, made.source, made.ours)) for made in (one, two)]
            same = all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(*pieces, strict=True))
            failed += not same
            print(f"{name}, {layout}: {len(pieces[1])} pieces, {'the same bits' if same else 'NOT the same'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
