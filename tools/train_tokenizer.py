"""Trains a sentencepiece tokenizer (byte-pair encoding) on text or JSON lines.

Every text comes back from it exactly as it was: nothing is normalised, white space is kept, and characters
that the vocabulary lacks are spelled as bytes. <|endoftext|> is the end-of-document token. The same input
gives the same model.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_moe.data.documents import Problem, ReadOptions, check_inputs, cut_into_parts, read_part
from megatron_moe.data.tokenizer import EOD_PIECE

_PART_BYTES = 1 << 28


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        train(arguments.input, arguments.model_prefix, arguments.vocab_size, arguments.json_key)
    except (ValueError, OSError) as error:
        print(f"train_tokenizer: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.model_prefix}.model: {arguments.vocab_size} pieces")
    return 0


def train(files: Sequence[str], model_prefix: str, vocab_size: int, json_key: str) -> None:
    """Writes ``MODEL_PREFIX.model`` and ``MODEL_PREFIX.vocab``; raises ValueError for input it cannot use."""
    import sentencepiece

    check_inputs(files)
    lines = _lines(files, json_key)
    first = next(lines, None)
    if first is None:
        raise ValueError("the input holds no text.")
    Path(model_prefix).parent.mkdir(parents=True, exist_ok=True)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_chain(first, lines),
            model_prefix=model_prefix,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,  # indentation of code
            # A control symbol cannot come from the text itself, so a text that says <|endoftext|> ends
            # nothing.
            control_symbols=[EOD_PIECE],
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            shuffle_input_sentence=False,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"sentencepiece cannot make {vocab_size} pieces of this input ({str(error).splitlines()[-1]}). "
            "Use another --vocab-size (at least 300, for bytes and characters), or more text."
        ) from error


def _chain(first: str, others: Iterator[str]) -> Iterator[str]:
    yield first
    yield from others


def _lines(files: Sequence[str], json_key: str) -> Iterator[str]:
    # By lines, because sentencepiece ignores sentences of more than 4192 bytes.
    options = ReadOptions(json_key, "line")
    for part in cut_into_parts(files, options, _PART_BYTES):
        for text in read_part(part, options):
            if isinstance(text, Problem):
                raise ValueError(str(text))
            yield from (line for line in text.split("\n") if line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="text, JSON lines or parquet files")
    parser.add_argument("--model-prefix", required=True, metavar="PREFIX", help="writes PREFIX.model and PREFIX.vocab")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="number of pieces")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
