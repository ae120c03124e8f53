"""Tokenizes the parts of a preprocessing job, in one process or several.

A part is done when its ``.json`` exists, which is written last::

    PREFIX.parts/part-00012.bin  part-00012.idx  part-00012.json
"""

import functools
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_moe.data.documents import Part, Problem, ReadOptions, read_part
from megatron_moe.data.indexed_builder import IndexedDatasetBuilder
from megatron_moe.data.indexed_dataset import token_dtype
from megatron_moe.data.sidecar import write_json
from megatron_moe.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_fingerprint

PROBLEMS_SHOWN = 5


@dataclass(frozen=True)
class Job:
    """What is to be preprocessed and how; everything here but ``workers`` shapes the result."""

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_type: str
    tokenizer_model: str | None
    append_eod: bool = False
    read: ReadOptions = field(default_factory=ReadOptions)
    skip_errors: bool = False
    """Leave out and count documents that cannot be read, instead of stopping at the first."""
    workers: int = 1
    part_bytes: int | None = None
    """Size of a part; chosen from the size of the input unless given."""


@dataclass(frozen=True)
class PartResult:
    """What one part gave."""

    documents: int
    tokens: int
    empty: int
    skipped: int
    problems: tuple[str, ...]
    """The first few reasons for skipping."""


def run_parts(job: Job, folder: Path, todo: Sequence[Part]) -> Iterator[PartResult]:
    """Tokenizes the parts in ``todo`` with ``job.workers`` processes; yields results as parts get done.

    Raises ValueError for input that cannot be read and when a process dies. Parts that are done stay done.
    """
    if job.workers == 1:
        for part in todo:
            yield tokenize_part(job, folder, part)
        return
    # Forked processes start at once; where they are unsafe or missing, the system's own way is taken.
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    executor = ProcessPoolExecutor(job.workers, multiprocessing.get_context(method), initializer=_set_up_process)
    try:
        waiting, pending = iter(todo), set()
        while True:
            # A few at a time: an executor with very many tasks in its queue can hang when a process dies.
            for part in itertools.islice(waiting, 2 * job.workers - len(pending)):
                pending.add(executor.submit(tokenize_part, job, folder, part))
            if not pending:
                return
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    except BrokenProcessPool as error:
        raise ValueError(
            "a process died while tokenizing (killed, or out of memory?). Run the same command again to continue."
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _set_up_process() -> None:
    """Makes a process of the pool end with its parent: no stray process writes beside a restarted run."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    # Ctrl-C reaches all processes of a terminal; the parent alone decides, and parts in work get done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def tokenize_part(job: Job, folder: Path, part: Part) -> PartResult:
    """Writes the pair of one part and, last, the ``.json`` that marks it as done."""
    fingerprint = tokenizer_fingerprint(job.tokenizer_type, job.tokenizer_model)
    tokenizer = _tokenizer(job.tokenizer_type, job.tokenizer_model, fingerprint)
    empty = skipped = 0
    problems: list[str] = []
    with IndexedDatasetBuilder(part_prefix(folder, part), token_dtype(tokenizer.vocab_size)) as builder:
        for text in read_part(part, job.read):
            if isinstance(text, Problem):
                if not job.skip_errors:
                    raise ValueError(f"{text}. Mend the input, or leave such documents out with --on-error skip.")
                skipped += 1
                problems += [str(text)] if len(problems) < PROBLEMS_SHOWN else []
            elif not text:
                empty += 1
            else:
                builder.add_document(document_ids(tokenizer, text, job.append_eod))
        builder.finalize()
        result = PartResult(builder.num_documents, builder.num_tokens, empty, skipped, tuple(problems))
    write_json(result_path(folder, part), asdict(result))
    return result


@functools.lru_cache(maxsize=1)
def _tokenizer(tokenizer_type: str, tokenizer_model: str | None, fingerprint: str) -> Tokenizer:
    """Loaded once in a process; ``fingerprint`` keeps a changed model file from being missed."""
    return build_tokenizer(tokenizer_type, tokenizer_model)


def document_ids(tokenizer: Tokenizer, text: str, append_eod: bool) -> list[int]:
    """The tokens that a document is stored as."""
    return tokenizer.encode(text) + ([tokenizer.eod_id] if append_eod else [])


def part_prefix(folder: Path, part: Part) -> Path:
    """Path of a part's pair without suffix."""
    return folder / f"part-{part.number:05d}"


def result_path(folder: Path, part: Part) -> Path:
    """The file that marks a part as done."""
    return part_prefix(folder, part).with_suffix(".json")


def finished_result(job: Job, folder: Path, part: Part) -> PartResult | None:
    """What an earlier run made of a part; None if it is not done, or skipped what this job must stop at."""
    path = result_path(folder, part)
    if not path.exists():
        return None
    result = PartResult(**json.loads(path.read_text(encoding="utf-8")))
    return result if job.skip_errors or not result.skipped else None
