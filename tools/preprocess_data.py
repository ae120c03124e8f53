"""Tokenizes text, JSON lines or parquet into the .bin/.idx pair that training reads.

Interrupted? Run the same command again: what is done is kept. Documents keep the order of the input.
"""

import argparse
import sys
from collections.abc import Sequence

from megatron_moe.data.documents import ReadOptions
from megatron_moe.data.preprocess import Report, preprocess
from megatron_moe.data.preprocess_parts import Job
from megatron_moe.data.tokenizer import TOKENIZERS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = _parser().parse_args(argv)
    job = Job(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        tokenizer_type=arguments.tokenizer_type,
        tokenizer_model=arguments.tokenizer_model,
        append_eod=arguments.append_eod,
        read=ReadOptions(arguments.json_key, arguments.sample_by),
        skip_errors=arguments.on_error == "skip",
        workers=arguments.workers,
    )
    try:
        report = preprocess(job)
    except (ValueError, OSError) as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("preprocess_data: interrupted; run the same command again to continue", file=sys.stderr)
        return 130
    print(_summary(job, report))
    return 0


def _summary(job: Job, report: Report) -> str:
    counts = f"{report.documents:,} documents, {report.tokens:,} tokens ({report.dtype})"
    if report.already_done:
        return f"{job.output_prefix} is complete already: {counts}"
    lines = [f"{job.output_prefix}: {counts}, verified"]
    if report.parts_reused:
        lines.append(f"  {report.parts_reused} of {report.parts} parts were done by an earlier run")
    if report.empty:
        lines.append(f"  {report.empty:,} empty documents left out")
    if report.skipped:
        lines.append(f"  {report.skipped:,} unreadable documents skipped, the first of them:")
        lines += [f"    {problem}" for problem in report.problems]
    if not report.lossless:
        lines.append("  note: this tokenizer does not reproduce the text exactly (seen on the first document)")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files: .jsonl, .ndjson, .json (an object a line; also .gz), .parquet, .arrow, .csv, else text",
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin, .idx and .json")
    parser.add_argument("--tokenizer-type", required=True, choices=list(TOKENIZERS), help="kind of tokenizer")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="file or folder of the tokenizer")
    parser.add_argument("--append-eod", action="store_true", help="end every document with an end-of-document token")
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    parser.add_argument(
        "--sample-by",
        choices=["document", "line"],
        default="document",
        help="plain text: a file is one document (default), or every line is",
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="a document that cannot be read stops the run (default), or is skipped and counted",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
