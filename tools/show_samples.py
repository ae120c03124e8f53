"""Print samples of a run's training data as text, such as those of the steps that were skipped.

python tools/show_samples.py runs/quickstart                      of all events in metrics.jsonl
python tools/show_samples.py runs/quickstart --samples 1024 1031  from the first to the last
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_moe.config import load_config
from megatron_moe.data.build import build_datasets
from megatron_moe.data.tokenizer import build_tokenizer
from megatron_moe.training.records import read_records


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("run", type=Path, help="the --save folder of a run")
    made.add_argument("--samples", type=int, nargs=2, metavar=("FIRST", "LAST"), help="default: those of all events")
    made.add_argument("--characters", type=int, default=400, help="of each sample's text (default 400)")
    return made


def events(run: Path) -> list[tuple[str, range]]:
    """What happened, and to which samples, from metrics.jsonl."""
    records = (record for record in read_records(run / "metrics.jsonl") if record.get("samples"))
    return [
        (f"iteration {record['iteration']}, {record['event']}: {record['reason']}", range(first, last + 1))
        for record in records
        for first, last in [record["samples"]]
    ]


def texts(run: Path, samples: Sequence[int], characters: int) -> Iterator[str]:
    """A line about each sample and the beginning of its text.

    Raises:
        ValueError, OSError: the data are not where the run had them.
    """
    config = load_config(run / "config.yaml")
    assert config.model.vocab_size is not None, "a run stores what its tokenizer implied"
    tokenizer = build_tokenizer(config.data.tokenizer_type, config.data.tokenizer_model)
    train = build_datasets(config.data, seed=config.training.seed, vocab_size=config.model.vocab_size).train
    for i in samples:
        ids = [int(token) for token in train[i]]
        text = tokenizer.decode([token for token in ids if token < tokenizer.vocab_size])
        cut = text[:characters] + (" ..." if len(text) > characters else "")
        yield f"--- sample {i}: {len(ids)} tokens, {ids.count(tokenizer.eod_id)} ends of documents\n{cut}"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 with one line for what the user can mend."""
    arguments = parser().parse_args(argv)
    try:
        if arguments.samples:
            wanted = [("", range(arguments.samples[0], arguments.samples[1] + 1))]
        else:
            wanted = events(arguments.run)
        if not wanted:
            print("No step was refused in this run.")
        for title, samples in wanted:
            print(title, end="\n" if title else "")
            for text in texts(arguments.run, samples, arguments.characters):
                print(text)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
