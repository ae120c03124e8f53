"""Sampling: greedy is an argmax loop, cuts cut where they should, text ends where it ends."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_moe.config.schema import Config, DataConfig, ModelConfig, MoEConfig, TrainingConfig
from megatron_moe.model.cache import AttentionCache
from megatron_moe.model.decoder import Decoder
from megatron_moe.model.generation import Sampling, generate, next_logits, next_token, text_loss, whole_batch
from megatron_moe.model.latent_attention import LatentAttention
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.building import token_batch

V = 13
LOGITS_V = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]))


CONFIG = Config(
    model=ModelConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=V, ffn_hidden_size=8, init_method_std=0.5
    ),
    moe=MoEConfig(num_experts=4),
    data=DataConfig(seq_length=16),
    training=TrainingConfig(params_dtype="float64"),
)


def model(**moe: object) -> Decoder:
    return Decoder(replace(CONFIG, moe=replace(CONFIG.moe, **moe)), ParallelContext.single())  # type: ignore[arg-type]


def run(made: Decoder, prompt: list[int], sampling: Sampling, **changes: object) -> list[int]:
    settings = {"max_new_tokens": 8, "context_length": 16, "eod_id": None, "seed": 1} | changes
    steps = generate(made, [prompt], ParallelContext.single(), sampling=sampling, **settings)  # type: ignore[arg-type]
    return [token for (token,) in steps if token is not None]


def draws(logits_V: Tensor, sampling: Sampling, num: int = 400) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return [next_token(logits_V, sampling, generator) for _ in range(num)]


def test_greedy_is_an_argmax_loop():
    made, ids = model(), [3, 1, 4]
    for _ in range(8):
        tokens = token_batch(torch.tensor(ids).unsqueeze(1), training=False)
        assert made.output is not None
        with torch.no_grad():
            logits_V = made.output(made.hidden(None, tokens))[-1, 0, :V]
        batch = whole_batch(torch.tensor(ids).unsqueeze(1), ParallelContext.single())
        torch.testing.assert_close(next_logits(made, batch)[0], logits_V)
        ids.append(int(logits_V.argmax()))
    assert run(made, [3, 1, 4], Sampling(temperature=0)) == ids[3:]


def test_the_context_is_the_last_tokens():
    made = model()
    whole, cut = (
        run(made, [1, 2, 3, 4, 5], Sampling(0), context_length=3),
        run(made, [3, 4, 5], Sampling(0), context_length=3),
    )
    assert whole == cut


def test_text_ends_with_the_document():
    made = model()
    text = run(made, [3, 1, 4], Sampling(0))
    end = text[3]
    assert run(made, [3, 1, 4], Sampling(0), eod_id=end) == text[: text.index(end)]


def test_same_seed_same_text():
    made, sampling = model(), Sampling(temperature=2.0, top_p=1.0)
    assert run(made, [3], sampling, seed=4) == run(made, [3], sampling, seed=4)
    assert run(made, [3], sampling, seed=4) != run(made, [3], sampling, seed=5)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(1.0, top_k=0, top_p=1.0), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_k=1, top_p=1.0), {1}),
        (Sampling(1.0, top_k=2, top_p=1.0), {1, 3}),
        (Sampling(1.0, top_k=99, top_p=1.0), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_k=0, top_p=0.39), {1}),
        (Sampling(1.0, top_k=0, top_p=0.41), {1, 3}),  # the token that crosses the border stays
        (Sampling(1.0, top_k=0, top_p=0.71), {1, 3, 4}),
        (Sampling(1.0, top_k=2, top_p=0.99), {1, 3}),
        (Sampling(1.0, top_k=0, top_p=1e-9), {1}),
        (Sampling(1.0, top_k=0, top_p=0.0), {1}),
    ],
    ids=str,
)
def test_what_may_be_drawn(sampling, allowed):
    assert set(draws(LOGITS_V, sampling)) == allowed


def test_probabilities_and_temperature():
    for temperature in (1.0, 0.5):
        found = torch.bincount(torch.tensor(draws(LOGITS_V, Sampling(temperature, 0, 1.0), 4000)), minlength=5) / 4000
        torch.testing.assert_close(found, torch.softmax(LOGITS_V / temperature, 0), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    "moe", [{"moe_group_size": "4"}, {"moe_group_size": "32", "moe_expert_capacity_factor": 2.0}], ids=str
)
def test_prompts_of_any_length_whatever_the_group(moe):
    """A model trained with groups of N tokens generates from prompts that N does not divide."""
    assert len(run(model(**moe), [3, 1, 4], Sampling(0), max_new_tokens=3)) == 3


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1]]
KINDS = {
    "grouped": {"num_attention_heads": 4, "num_query_groups": 2},
    "window and sinks": {
        "window_size": (2, 0), "softmax_type": "learnable", "add_bias_linear": True, "num_attention_heads": 4,
        "num_query_groups": 1,
    },
    "latent": {
        "multi_latent_attention": True, "kv_lora_rank": 6, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 3,
        "qk_layernorm": True,
    },
    "projection norm": {"qk_layernorm": True, "qk_layernorm_scope": "projection", "rotary_interleaved": True},
}  # fmt: skip


def of_kind(kind: str) -> Decoder:
    changed = replace(CONFIG.model, **KINDS[kind])  # type: ignore[arg-type]
    made = Decoder(replace(CONFIG, model=changed), ParallelContext.single())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.arange(len(parameter)) - 1.0)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_caches_change_nothing(kind):
    """Step by step the logits of a batch with caches are those of each prompt alone, run anew."""
    made, ctx = of_kind(kind), ParallelContext.single()
    seen: list[Tensor] = []

    def noted(logits_V: Tensor, *rest: object) -> int:
        seen.append(logits_V)
        return int(logits_V.argmax())

    settings = {"max_new_tokens": 6, "context_length": 12, "eod_id": None, "sampling": Sampling(0), "seed": 1}
    with mock.patch("megatron_moe.model.generation.next_token", noted):
        together = list(generate(made, PROMPTS, ctx, **settings))  # type: ignore[arg-type]
        in_batch = torch.stack(seen).unflatten(0, (6, 3))
        for i, prompt in enumerate(PROMPTS):
            seen.clear()
            alone = list(generate(made, [prompt], ctx, use_cache=False, **settings))  # type: ignore[arg-type]
            torch.testing.assert_close(torch.stack(seen), in_batch[:, i], rtol=1e-10, atol=1e-10)
            assert [step[0] for step in alone] == [step[i] for step in together]


def test_a_cache_is_used_and_left_behind():
    made = model()
    lengths: list[int] = []
    made.layers["0"].register_forward_pre_hook(lambda module, args: lengths.append(len(args[0])))
    run(made, [1, 2, 3], Sampling(0), max_new_tokens=4)
    assert lengths == [3, 1, 1, 1]
    lengths.clear()
    run(made, [1, 2, 3], Sampling(0), max_new_tokens=4, context_length=4)
    assert lengths == [3, 1, 4, 4]  # beyond its context the text begins elsewhere, so all is computed anew
    lengths.clear()
    run(model(moe_expert_capacity_factor=1.0), [1, 2, 3], Sampling(0))
    assert all(layer.attention.cache is None for layer in made.layers.values())  # type: ignore[union-attr]


def test_latents_of_earlier_tokens_are_not_projected_again():
    made, rows = of_kind("latent"), []
    attention = made.layers["0"].attention
    assert isinstance(attention, LatentAttention)
    attention.kv_up.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    with mock.patch.object(AttentionCache, "extend", autospec=True, side_effect=AttentionCache.extend) as extend:
        run(made, [1, 2, 3], Sampling(0), max_new_tokens=4)
    assert rows == [3]  # for the prompt; then kv_up is absorbed
    assert {call.args[1].shape[-1] for call in extend.call_args_list} == {6 + 4}


@pytest.mark.parametrize("moe", [{}, {"moe_expert_capacity_factor": 1.0, "moe_group_size": "4"}], ids=str)
def test_a_prompt_gets_the_same_alone_and_in_company(moe):
    made, sampling = model(**moe), Sampling(1.0)
    ctx, common = ParallelContext.single(), {"max_new_tokens": 5, "context_length": 16, "eod_id": 2}
    together = list(generate(made, PROMPTS, ctx, sampling=sampling, seed=10, **common))  # type: ignore[arg-type]
    for i, prompt in enumerate(PROMPTS):
        steps = generate(made, [prompt], ctx, sampling=sampling, seed=10 + i, **common)  # type: ignore[arg-type]
        alone = [step[0] for step in steps]
        assert [step[i] for step in together if step[i] is not None] == alone


def test_loss_of_a_text():
    made, ctx = model(), ParallelContext.single()
    ids = [3, 1, 4, 1, 5, 9, 2]
    total, count = text_loss(made, ids, ctx, context_length=4)
    expected = 0.0
    for start, stop in ((0, 4), (4, 6)):
        for i in range(start, stop):
            logits_V = next_logits(made, whole_batch(torch.tensor(ids[start : i + 1]).unsqueeze(1), ctx))[0]
            expected -= float(torch.log_softmax(logits_V.float(), 0)[ids[i + 1]])
    assert count == 6 and total == pytest.approx(expected, rel=1e-6)
