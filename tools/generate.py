"""Sample text from a checkpoint of any layout, in one process.

    python tools/generate.py --load runs/quickstart --prompt "def " --max-new-tokens 120
"""

import argparse
import sys
from dataclasses import replace

from megatron_moe.config.schema import CheckpointConfig, ParallelConfig
from megatron_moe.data.tokenizer import build_tokenizer
from megatron_moe.model.generation import Sampling, generate
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.training import checkpointing
from megatron_moe.training.build import build_machine


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--load", required=True, help="folder of checkpoints (--save of the run)")
    made.add_argument("--ckpt-step", type=int, help="iteration to load; default: the latest")
    made.add_argument("--prompt", default="", help="text to go on from; default: the start of a document")
    made.add_argument("--max-new-tokens", type=int, default=100)
    made.add_argument("--temperature", type=float, default=0.8, help="0 takes the most likely token")
    made.add_argument("--top-k", type=int, default=0, help="choose among so many most likely tokens; 0: all")
    made.add_argument("--top-p", type=float, default=0.95, help="choose among the likeliest, up to this probability")
    made.add_argument("--seed", type=int, default=1)
    return made


def sample(arguments: argparse.Namespace) -> None:
    """Load, generate, print as it comes.

    Raises:
        ValueError: no checkpoint, or a tokenizer that is gone.
    """
    if arguments.temperature < 0 or not 0 <= arguments.top_p <= 1 or arguments.top_k < 0:
        raise ValueError("--temperature and --top-k are 0 or more, --top-p is from 0 to 1.")
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
    prompt = tokenizer.encode(arguments.prompt) or [tokenizer.eod_id]
    print(arguments.prompt, end="", flush=True)
    ids: list[int] = []
    shown = ""
    for token in generate(
        machine.stages[0].module,  # type: ignore[arg-type]
        prompt,
        ctx,
        max_new_tokens=arguments.max_new_tokens,
        context_length=config.data.seq_length,
        eod_id=tokenizer.eod_id,
        sampling=Sampling(arguments.temperature, arguments.top_k, arguments.top_p),
        seed=arguments.seed,
    ):
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the middle of a character is not shown
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print()


def main(argv: list[str] | None = None) -> int:
    """Exit status 1 with one line for what the user can mend."""
    arguments = parser().parse_args(argv)
    try:
        sample(arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
