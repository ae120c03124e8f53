"""Text from a checkpoint of any layout; or how well it predicts a text.

    python tools/generate.py --load runs/quickstart --prompt "def " --max-new-tokens 120
    python tools/generate.py --load runs/quickstart --prompt "def " "class " --temperature 0
    python tools/generate.py --load runs/quickstart --perplexity README.md
    torchrun --nproc-per-node 4 tools/generate.py --load runs/mixtral --tensor-model-parallel-size 2 \\
        --expert-model-parallel-size 2 --prompt "The sea"

The layout is this command's own, whatever wrote the checkpoint; the text is the same but for rounding. A single
prompt's text appears as it is made; several are continued together and shown when they are done. To serve a model,
export it (tools/convert_checkpoint.py) to vLLM, SGLang or transformers.
"""

import argparse
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

from megatron_moe.checkpoint.index import INDEX_FILE
from megatron_moe.config import check
from megatron_moe.config.schema import CheckpointConfig, Config, ParallelConfig, TrainingConfig
from megatron_moe.data.tokenizer import TOKENIZERS, Tokenizer, build_tokenizer
from megatron_moe.model.decoder import Decoder
from megatron_moe.model.generation import Sampling, generate, generation_model, text_loss
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training import checkpointing, launch, registries

CUT = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
NOT_CUT = ("pipeline_model_parallel_size", "context_parallel_size")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--load", required=True, help="folder of a run (its --save), or one of its checkpoints")
    made.add_argument("--ckpt-step", type=int, help="iteration to load; default: the latest")
    made.add_argument("--tokenizer-type", choices=TOKENIZERS, help="default: that of the run")
    made.add_argument("--tokenizer-model", help="file or folder of the tokenizer; default: where the run had it")
    what = made.add_argument_group("text")
    what.add_argument("--prompt", nargs="+", default=[""], help="texts to go on from; default: the start of a document")
    what.add_argument("--perplexity", type=Path, metavar="FILE", help="do not generate: measure this text")
    what.add_argument("--max-new-tokens", type=int, default=100, help="longest continuation (default 100)")
    what.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token (default 0.8)")
    what.add_argument("--top-k", type=int, default=0, help="choose among so many likeliest tokens; 0: all (default)")
    what.add_argument("--top-p", type=float, default=0.95, help="choose among the likeliest, up to this probability")
    what.add_argument("--seed", type=int, default=1, help="prompt i draws with this plus i (default 1)")
    what.add_argument("--no-cache", action="store_true", help="run over all tokens at each step, to compare")
    ranks = made.add_argument_group("ranks", "with torchrun, as in training")
    number = {"type": int, "metavar": "N"}
    ranks.add_argument("--tensor-model-parallel-size", default=1, help="ranks that share the matrices (tp)", **number)
    ranks.add_argument("--expert-model-parallel-size", default=1, help="ranks that share the experts (ep)", **number)
    ranks.add_argument("--expert-tensor-parallel-size", help="ranks that share one expert (etp); default: tp", **number)
    for name in NOT_CUT:
        ranks.add_argument(f"--{name.replace('_', '-')}", default=1, help=argparse.SUPPRESS, **number)
    return made


def configured(arguments: argparse.Namespace) -> Config:
    """The checkpoint's configuration under the layout that was asked for.

    Raises:
        ValueError: there is no checkpoint, or it cannot be cut so.
    """
    for name in NOT_CUT:
        if getattr(arguments, name) != 1:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(arguments, name)}: text is made under tensor and expert "
                "parallelism alone. Checkpoints load under any layout: leave this out, and spread the model with "
                "--tensor-model-parallel-size and --expert-model-parallel-size."
            )
    if arguments.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {arguments.max_new_tokens} must be at least 1.")
    saved = checkpointing.saved_config(arguments.load, arguments.ckpt_step)
    data = replace(
        saved.data,
        tokenizer_type=arguments.tokenizer_type or saved.data.tokenizer_type,
        tokenizer_model=arguments.tokenizer_model or saved.data.tokenizer_model,
    )
    config = replace(
        saved.as_stored(),
        data=data,
        parallel=ParallelConfig(**{name: getattr(arguments, name) for name in CUT}),
        training=replace(TrainingConfig(), params_dtype=saved.training.params_dtype),
        checkpoint=CheckpointConfig(),
    )
    # Neither sequences nor groups of tokens are cut: rules about that have nothing to say.
    length = data.seq_length * max(arguments.tensor_model_parallel_size, 1)
    uncut = replace(config, data=replace(data, seq_length=length), moe=replace(config.moe, moe_group_size="sequence"))
    problems = check(uncut, launch.world_size(), registries.CHOICES, registries.RULES, to_train=False)
    if problems:
        raise ValueError("\n".join(problems))
    return config


def tokenizer_of(config: Config) -> Tokenizer:
    """The model's tokenizer.

    Raises:
        ValueError: it is gone, or another model's.
    """
    try:
        tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
    except ValueError as error:
        raise ValueError(f"{error} The run's configuration names it; --tokenizer-model names another place.") from error
    assert config.model.vocab_size is not None
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids and the model {config.model.vocab_size}: it is another "
            "model's. Give the right one with --tokenizer-type and --tokenizer-model."
        )
    return tokenizer


def load(config: Config, ctx: ParallelContext, arguments: argparse.Namespace) -> Decoder:
    """This rank's part of the model."""
    model = generation_model(config, ctx, initial_values=False)
    checkpointing.load_weights(model, arguments.load, arguments.ckpt_step)
    return model


def sample(
    model: Decoder, config: Config, tokenizer: Tokenizer, sampling: Sampling, arguments: argparse.Namespace
) -> None:
    """Generate on all ranks, and print on rank 0."""
    speaks, context_length = model.ctx.rank == 0, config.data.seq_length
    prompts = [tokenizer.encode(prompt) or [tokenizer.eod_id] for prompt in arguments.prompt]
    for number, prompt in enumerate(prompts, 1):
        if speaks and len(prompt) > context_length:
            which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
            print(
                f"note: {which} has {len(prompt)} tokens; the model was trained on {context_length}, and sees the last "
                f"{context_length}.",
                file=sys.stderr,
            )
    streams = speaks and len(prompts) == 1
    texts = [_Text(prompt, tokenizer, streams) for prompt in arguments.prompt]
    for step in generate(
        model,
        prompts,
        model.ctx,
        max_new_tokens=arguments.max_new_tokens,
        context_length=context_length,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        sampling=sampling,
        seed=arguments.seed,
        use_cache=not arguments.no_cache,
    ):
        for text, token in zip(texts, step, strict=True):
            if token is not None:
                text.add(token)
    if streams:
        print()
    elif speaks:
        for number, text in enumerate(texts, 1):
            print(f"--- {number}\n{text.prompt}{text.shown}")


class _Text:
    """A prompt and what follows it, shown as it comes if it is the only one."""

    def __init__(self, prompt: str, tokenizer: Tokenizer, streams: bool) -> None:
        self.prompt, self.tokenizer, self.streams = prompt, tokenizer, streams
        self.ids: list[int] = []
        self.shown = ""
        if streams:
            print(prompt, end="", flush=True)

    def add(self, token: int) -> None:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # the middle of a character is not shown
            return
        if self.streams:
            print(text[len(self.shown) :], end="", flush=True)
        self.shown = text


def measure(model: Decoder, config: Config, ids: list[int], num_bytes: int) -> None:
    """Perplexity of a text, per token, and bits per byte, which tokenizers do not change."""
    total, count = text_loss(model, ids, model.ctx, config.data.seq_length)
    bits = total / math.log(2) / num_bytes
    if model.ctx.rank == 0:
        print(
            f"perplexity {math.exp(total / count):.4f}  loss {total / count:.5f}  bits per byte {bits:.4f}  "
            f"tokens {count}"
        )


def document(path: Path, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Tokens of a text behind the end of another, and its length in bytes.

    Raises:
        ValueError, OSError: there is no text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8. ({error})") from error
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError(f"{path} holds no text.")
    return [tokenizer.eod_id, *ids], len(text.encode())


def main(argv: list[str] | None = None) -> int:
    """Exit status 2 with one line for what the user can mend."""
    arguments = parser().parse_args(argv)
    path = Path(arguments.load)
    if (path / INDEX_FILE).exists():
        arguments.load, arguments.ckpt_step = str(path.parent), int(path.name.removeprefix("iter_"))
    config = launch.together(lambda: configured(arguments))
    sampling = launch.together(lambda: Sampling(arguments.temperature, arguments.top_k, arguments.top_p))
    ctx = launch.together(lambda: launch.join(config))
    tokenizer = launch.together(lambda: tokenizer_of(config))
    measured = None
    if arguments.perplexity is not None:
        measured = launch.together(lambda: document(arguments.perplexity, tokenizer))
    model = launch.together(lambda: load(config, ctx, arguments))
    try:
        if measured is None:
            sample(model, config, tokenizer, sampling, arguments)
        else:
            measure(model, config, *measured)
    except BrokenPipeError:  # whoever read the text, such as head, has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    launch.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
