"""Multi-token prediction against transformers' modules: losses, and gradients of everything that they share."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.modeling_layers import MtpModel

from megatron_moe.config.schema import Config, DataConfig, ModelConfig, MoEConfig, ParallelConfig, TrainingConfig
from megatron_moe.model.decoder import Decoder
from megatron_moe.model.multi_token import ahead
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.sharding import sharded_parameters
from megatron_moe.training.registries import pipeline_rules
from tests.helpers.building import token_batch
from tests.helpers.huggingface import float32_means_float64
from tests.unit.model.test_model_families import FAMILIES, LAYERS, MODEL, MOE, THEIRS, B, S, V, in_our_names, loud

DEPTH, SCALE = 2, 0.3


def in_our_mtp_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of their ``MtpModel`` but for embedding and head."""
    names = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "projection", "post_norm": "norm"}
    found, layers = {}, {}
    for key, tensor in tensors.items():
        if not key.startswith("layers."):
            continue
        _, k, part = key.split(".", 2)
        if part.startswith("mtp_block."):
            layers[f"model.layers.{k}.{part.removeprefix('mtp_block.')}"] = tensor
        else:
            found[f"mtp.{k}.{names[part.removesuffix('.weight')]}.weight"] = tensor
    ends = dict.fromkeys(("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"), torch.empty(0))
    for name, tensor in in_our_names(ends | layers, gpt_oss=False).items():
        if name.startswith("layers."):
            _, k, part = name.split(".", 2)
            found[f"mtp.{k}.layer.{part}"] = tensor
    return found


@pytest.fixture(scope="module")
def ids_SB() -> Tensor:
    return torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(5)).T


def test_losses_and_gradients(ids_SB: Tensor) -> None:
    family = FAMILIES["deepseek v3"]
    with float32_means_float64():
        config = transformers.DeepseekV3Config(**THEIRS | family.theirs, num_mtp_layers=DEPTH)
        main = loud(transformers.DeepseekV3ForCausalLM(config).double())
        mtp = MtpModel(main, DEPTH).double()
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for key, p in mtp.named_parameters():
                if key.startswith("layers."):
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.4 + ("norm" in key))
        ids_BS = ids_SB.T
        h_BSD = main.model(input_ids=ids_BS[:, :-1]).last_hidden_state
        total = F.cross_entropy(main.lm_head(h_BSD).flatten(0, 1), ids_BS[:, 1:].flatten())
        main_loss = float(total.detach())
        for k, module in enumerate(mtp.layers):
            length = S - k - 1
            e_BSD = main.model.embed_tokens(ids_BS[:, k + 1 : S])
            positions = torch.arange(length).unsqueeze(0)
            mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
            h_BSD = module(
                inputs_embeds=e_BSD,
                previous_hidden_state=h_BSD[:, :length],
                position_embeddings=main.model.rotary_emb(e_BSD, positions),
                attention_mask=mask,
                position_ids=positions,
                cache=None,
            )
            further = F.cross_entropy(main.lm_head(h_BSD).flatten(0, 1), ids_BS[:, k + 2 :].flatten(), reduction="sum")
            total = total + SCALE / DEPTH * further / (B * S)
        total.backward()
    theirs = in_our_names({k: p for k, p in main.named_parameters()}, gpt_oss=False)
    theirs_mtp = dict(mtp.named_parameters())
    weights = {k: p.detach() for k, p in (theirs | in_our_mtp_names(theirs_mtp)).items()}
    grads = in_our_names({k: p.grad for k, p in main.named_parameters()}, gpt_oss=False)
    grads |= in_our_mtp_names({k: p.grad for k, p in theirs_mtp.items()})

    values = {**MODEL, **family.model, "mtp_num_layers": DEPTH, "mtp_loss_scaling_factor": SCALE}
    model = Decoder(
        Config(
            model=ModelConfig(**values),
            moe=MoEConfig(**MOE | family.moe),
            data=DataConfig(seq_length=S),
            training=TrainingConfig(params_dtype="float64"),
        ),
        ParallelContext.single(),
    )
    parameters, ctx = sharded_parameters(model), ParallelContext.single()
    assert parameters.keys() == weights.keys(), parameters.keys() ^ weights.keys()
    buffers = dict(main.named_buffers()) | {f"mtp.{k}": b for k, b in mtp.named_buffers()}
    with torch.no_grad():
        for name, p in parameters.items():
            p.logical(p, ctx).copy_(weights[name])
        for key, bias_E in model.named_buffers():
            name = key.replace("moe", "mlp").replace("bias_E", "e_score_correction_bias")
            name = name.replace("layer.mlp", "mtp_block.mlp")
            bias_E.copy_(buffers[name.replace("mtp.", "mtp.layers.") if key.startswith("mtp") else f"model.{name}"])
    loss = model(None, token_batch(ids_SB[:-1], labels_SB=ids_SB[1:]))
    assert abs(float(loss.detach()) - main_loss) < 1e-9, "what is reported is the main loss alone"
    loss.backward()
    for name, p in parameters.items():
        assert p.grad is not None, name
        torch.testing.assert_close(
            p.logical(p.grad, ctx), grads[name], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert len(model.layers) == LAYERS


def test_nothing_is_predicted_in_evaluation(ids_SB: Tensor) -> None:
    config = Config(
        model=ModelConfig(num_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=V, mtp_num_layers=1),
        data=DataConfig(seq_length=S),
    )
    model = Decoder(config, ParallelContext.single())
    model.mtp[0].register_forward_hook(lambda *_: pytest.fail("a prediction module ran"))
    model(None, token_batch(ids_SB[:-1], labels_SB=ids_SB[1:], training=False))


def test_targets_stay_in_the_document_and_in_the_sequence() -> None:
    ids_SB = torch.tensor([[1, 2, 3, 4, 5, 6]]).T
    documents_SB = torch.tensor([[0, 0, 0, 1, 1, 1]]).T
    padding_SB = torch.tensor([[False] * 5 + [True]]).T
    batch = token_batch(ids_SB, labels_SB=ids_SB + 1, documents_SB=documents_SB, padding_SB=padding_SB)
    further = ahead(batch, 1)
    assert further.ids_SB[:, 0].tolist() == [2, 3, 4, 5, 6, 0]
    assert further.labels_SB[:, 0].tolist() == [3, 4, 5, 6, 7, 0]
    assert further.loss_mask_SB[:, 0].tolist() == [True, True, False, True, False, False]
    assert further.padding_SB is not None
    assert further.padding_SB[:, 0].tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Ett|ttmL", None),
        ("Ett|ttL", "has 0 prediction blocks (m), but --mtp-num-layers is 1."),
        ("Etttm|tL", "must stand before every m"),
        ("Etttt|m|L", "away from L"),
    ],
)
def test_where_prediction_modules_may_stand(text: str, says: str | None) -> None:
    stages = text.count("|") + 1
    config = Config(
        model=ModelConfig(num_layers=4, mtp_num_layers=1),
        parallel=ParallelConfig(pipeline_model_parallel_size=stages, pipeline_model_parallel_layout=text),
        training=TrainingConfig(global_batch_size=8),
    )
    problems = list(pipeline_rules(config, stages))
    assert says in "\n".join(problems) if says else problems == []
