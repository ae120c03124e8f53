"""Text from a checkpoint of any layout, in one process; or how well it predicts a text.

    python tools/generate.py --load runs/quickstart --prompt "def " --max-new-tokens 120
    python tools/generate.py --load runs/quickstart --prompt "def " "class " --temperature 0
    python tools/generate.py --load runs/quickstart --perplexity README.md

A single prompt's text appears as it is made; several are continued together and shown when they are done. To serve a
model, export it (tools/convert_checkpoint.py) to vLLM, SGLang or transformers.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from megatron_moe.config.schema import CheckpointConfig, Config, ParallelConfig
from megatron_moe.data.tokenizer import Tokenizer, build_tokenizer
from megatron_moe.model.decoder import Decoder
from megatron_moe.model.generation import Sampling, generate, text_loss
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training import checkpointing
from megatron_moe.training.build import build_machine


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--load", required=True, help="folder of checkpoints (--save of the run)")
    made.add_argument("--ckpt-step", type=int, help="iteration to load; default: the latest")
    made.add_argument("--prompt", nargs="+", default=[""], help="texts to go on from; default: the start of a document")
    made.add_argument("--perplexity", type=Path, metavar="FILE", help="do not generate: measure this text")
    made.add_argument("--max-new-tokens", type=int, default=100)
    made.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token")
    made.add_argument("--top-k", type=int, default=0, help="choose among so many most likely tokens; 0: all")
    made.add_argument("--top-p", type=float, default=0.95, help="choose among the likeliest, up to this probability")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--no-cache", action="store_true", help="run over all tokens at each step, to compare")
    return made


def load(arguments: argparse.Namespace) -> tuple[Decoder, Config, Tokenizer, ParallelContext]:
    """The model in this process.

    Raises:
        ValueError: no checkpoint, or a tokenizer that is gone.
    """
    config = checkpointing.saved_config(arguments.load, arguments.ckpt_step)
    config = replace(
        config,
        parallel=ParallelConfig(),
        checkpoint=CheckpointConfig(load=arguments.load, ckpt_step=arguments.ckpt_step, finetune=True),
    )
    tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
    ctx = ParallelContext.single()
    machine = build_machine(config, ctx)
    checkpointing.load(machine, quiet=True)
    return machine.stages[0].module, config, tokenizer, ctx  # type: ignore[return-value]


def sample(arguments: argparse.Namespace) -> None:
    """Generate, and print."""
    model, config, tokenizer, ctx = load(arguments)
    streams = len(arguments.prompt) == 1
    texts = [_Text(prompt, tokenizer, streams) for prompt in arguments.prompt]
    for step in generate(
        model,
        [tokenizer.encode(prompt) or [tokenizer.eod_id] for prompt in arguments.prompt],
        ctx,
        max_new_tokens=arguments.max_new_tokens,
        context_length=config.data.seq_length,
        eod_id=tokenizer.eod_id,
        sampling=Sampling(arguments.temperature, arguments.top_k, arguments.top_p),
        seed=arguments.seed,
        use_cache=not arguments.no_cache,
    ):
        for text, token in zip(texts, step, strict=True):
            if token is not None:
                text.add(token)
    if streams:
        print()
        return
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


def measure(arguments: argparse.Namespace) -> None:
    """Perplexity of a text, per token, and bits per byte, which tokenizers do not change."""
    text = arguments.perplexity.read_text(encoding="utf-8")
    model, config, tokenizer, ctx = load(arguments)
    ids = [tokenizer.eod_id, *tokenizer.encode(text)]
    if len(ids) < 2:
        raise ValueError(f"{arguments.perplexity} holds no text.")
    total, count = text_loss(model, ids, ctx, config.data.seq_length)
    bits = total / math.log(2) / len(text.encode())
    print(
        f"perplexity {math.exp(total / count):.4f}  loss {total / count:.5f}  bits per byte {bits:.4f}  tokens {count}"
    )


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 with one line for what the user can mend."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.perplexity is not None:
            measure(arguments)
        else:
            sample(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
