"""Sampling: greedy is an argmax loop, cuts cut where they should, text ends where it ends."""

import pytest
import torch
from torch import Tensor

from megatron_moe.config.schema import Config, DataConfig, ModelConfig, MoEConfig, TrainingConfig
from megatron_moe.model.decoder import Decoder
from megatron_moe.model.generation import Sampling, continuation_logits, generate, next_token
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.building import token_batch

V = 13
LOGITS_V = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15]))


def model(**moe: object) -> Decoder:
    config = Config(
        model=ModelConfig(
            num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=V, ffn_hidden_size=8, init_method_std=0.5
        ),
        moe=MoEConfig(num_experts=4, **moe),  # type: ignore[arg-type]
        data=DataConfig(seq_length=16),
        training=TrainingConfig(params_dtype="float64"),
    )
    return Decoder(config, ParallelContext.single())


def run(made: Decoder, prompt: list[int], sampling: Sampling, **changes: object) -> list[int]:
    settings = {"max_new_tokens": 8, "context_length": 16, "eod_id": None, "seed": 1} | changes
    return list(generate(made, prompt, ParallelContext.single(), sampling=sampling, **settings))  # type: ignore[arg-type]


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
        torch.testing.assert_close(continuation_logits(made, ids, ParallelContext.single()), logits_V)
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
