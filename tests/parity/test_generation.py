"""Text under layouts: the logits of every step, the tokens and the loss of a text are those of one process."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_moe.config.schema import Config
from megatron_moe.model import generation
from megatron_moe.model.generation import Sampling, generate, generation_model, text_loss
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.training import launch
from tests.helpers.ranks import MAX_RANKS, RankPool
from tests.helpers.running import tiny_run
from tests.parity.harness import BASE, TOLERANCE, _groups, make_groups, vary
from tests.parity.test_model_parts import PARTS
from tools import generate as tool

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1]]
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {"num_query_groups": 1, "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True},
    "latent": PARTS["latent"],
    "gpt-oss": PARTS["gpt-oss"],
    "capacity": {"moe_expert_capacity_factor": 1.0, "qk_layernorm": True, "qk_layernorm_scope": "projection"},
}
LAYOUTS = {
    "grouped": [MeshSizes(tp=4, ep=2, etp=2), MeshSizes(dp=2, ep=2)],
    "latent": [MeshSizes(tp=2, dp=2, ep=4)],
    "gpt-oss": [MeshSizes(tp=2, dp=2, ep=2, etp=2)],
    "capacity": [MeshSizes(tp=2, dp=2, ep=4)],
}


class Made(NamedTuple):
    """Text of a model: the logits and choices of each step, greedy and drawn; the loss of a text."""

    logits: list[Tensor]
    greedy: list[list[int | None]]
    drawn: list[list[int | None]]
    loss: float


def make(rank: int, config: Config, sizes: MeshSizes, use_cache: bool) -> Made:
    """On one rank."""
    torch.set_num_threads(1)
    ctx = ParallelContext.create(sizes, rank=rank, groups=_groups)
    model, logits, whole = generation_model(config, ctx), [], generation.next_logits

    def noted(*arguments: Any) -> Tensor:
        logits.append(whole(*arguments))
        return logits[-1]

    def text(sampling: Sampling) -> list[list[int | None]]:
        settings = {"max_new_tokens": 4, "context_length": 10, "eod_id": None, "seed": 1, "use_cache": use_cache}
        return list(generate(model, PROMPTS, ctx, sampling=sampling, **settings))  # type: ignore[arg-type]

    with mock.patch.object(generation, "next_logits", noted):
        greedy, drawn = text(Sampling(0)), text(Sampling(1.0, top_p=0.9))
    loss, _ = text_loss(model, [i * 7 % 61 for i in range(20)], ctx, 8)
    return Made(logits, greedy, drawn, loss)


@pytest.fixture(scope="module")
def references() -> dict[str, Made]:
    return {}


@pytest.mark.parametrize(("kind", "sizes"), [(kind, s) for kind, sizes in LAYOUTS.items() for s in sizes], ids=str)
def test_text_of_layouts(kind: str, sizes: MeshSizes, references: dict[str, Made], ranks: RankPool) -> None:
    config = vary(BASE, init_method_std=0.3, **KINDS[kind])
    if kind not in references:
        references[kind] = make(0, config, MeshSizes(), use_cache=False)
    expected = references[kind]
    ranks.run(MAX_RANKS, make_groups, sizes)
    for found in ranks.run(sizes.world, make, config, sizes, True):
        assert (found.greedy, found.drawn) == (expected.greedy, expected.drawn)
        assert found.loss == pytest.approx(expected.loss, rel=TOLERANCE)
        torch.testing.assert_close(found.logits, expected.logits, rtol=TOLERANCE, atol=TOLERANCE)
    assert expected.greedy != expected.drawn


def run_tool(rank: int, argv: list[str], config_sizes: MeshSizes | None) -> tuple[int, str]:
    """The tool on one rank, as torchrun starts it: exit status, and what it printed."""
    shown = io.StringIO()
    with contextlib.ExitStack() as held:
        if config_sizes is not None:
            ctx = ParallelContext.create(config_sizes, rank=rank, groups=_groups)
            environment = {"WORLD_SIZE": str(config_sizes.world), "RANK": str(rank)}
            held.enter_context(mock.patch.dict(os.environ, environment))
            held.enter_context(mock.patch.object(launch, "join", lambda config: ctx))
            held.enter_context(mock.patch.object(launch, "leave", lambda: None))
        held.enter_context(contextlib.redirect_stdout(shown))
        held.enter_context(contextlib.redirect_stderr(shown))
        try:
            status = tool.main(argv)
        except SystemExit as end:
            status = int(end.code or 0)
    return status, shown.getvalue()


def test_the_tool_under_a_layout(ranks: RankPool, tmp_path: Path) -> None:
    """One checkpoint, one text: from one process, and from eight ranks of which the first alone speaks."""
    tiny_run(tmp_path, "--train-iters 2 --save-interval 2 --moe-router-enable-expert-bias").train()
    sizes = MeshSizes(tp=2, dp=4, ep=2, etp=2)
    ranks.run(MAX_RANKS, make_groups, sizes)
    cut = ["--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"]
    (tmp_path / "text").write_text("The sea, the sea!", encoding="utf-8")
    for what in (
        ["--prompt", "ab", "--max-new-tokens", "6"],
        ["--prompt", "ab", "c" * 20, "--temperature", "0", "--max-new-tokens", "3"],
        ["--perplexity", str(tmp_path / "text"), "--load", str(tmp_path / "iter_0000002")],
        ["--prompt", "ab", "--ckpt-step", "7"],
    ):
        argv = ["--load", str(tmp_path), *what]
        expected = run_tool(0, argv, None)
        found = ranks.run(MAX_RANKS, run_tool, [*argv, *cut], sizes)
        assert found == [expected] + [(expected[0], "")] * (MAX_RANKS - 1)
        assert expected[0] == (2 if "--ckpt-step" in what else 0), expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pipeline-model-parallel-size", "2"], "leave this out, and spread the model"),
        (["--tensor-model-parallel-size", "3"], "does not divide"),
        (["--expert-model-parallel-size", "3"], "does not divide"),
        (["--top-p", "1.5"], "--top-p 1.5 must be at least 0 and at most 1."),
        (["--temperature", "nan"], "--temperature nan must be at least 0."),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be at least 1."),
        (["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "gone"], "names another place"),
        (["--perplexity", "gone"], "gone"),
        (["--load", "nowhere"], "nowhere holds no checkpoint"),
    ],
    ids=str,
)
def test_what_cannot_be(flags: list[str], message: str, a_run: Path) -> None:
    status, shown = run_tool(0, ["--load", str(a_run), *flags], None)
    assert status == 2 and message in shown and shown.startswith("error: ")


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    tiny_run(folder, "--train-iters 1 --save-interval 1").train()
    return folder
