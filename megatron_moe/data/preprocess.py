"""Turns text into a ``.bin``/``.idx`` pair: in several processes, in constant memory, and restartable.

    input --cut--> part 0, part 1, ...  --tokenize, any order--> PREFIX.parts/part-00000.{bin,idx,json} ...
                                        --merge, in order-->     PREFIX.{bin,idx}  --verify-->  PREFIX.json

A part is done when its ``.json`` exists. An interrupted run, started again with the same command, does the
parts that are not done; ``PREFIX.parts/job.json`` makes sure that it is the same command and the same
input. The result does not depend on the number of processes.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_moe.data.documents import Part, check_inputs, cut_into_parts, read_part
from megatron_moe.data.indexed_builder import IndexedDatasetBuilder
from megatron_moe.data.indexed_dataset import IndexedDataset, token_dtype
from megatron_moe.data.preprocess_parts import (
    PROBLEMS_SHOWN,
    Job,
    PartResult,
    document_ids,
    finished_result,
    part_prefix,
    run_parts,
)
from megatron_moe.data.sidecar import Sidecar, read_sidecar, write_json, write_sidecar
from megatron_moe.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_fingerprint

# Large enough that the files of a part do not matter, small enough that little is lost when a run dies.
_MIN_PART_BYTES, _MAX_PART_BYTES, _PARTS_WANTED = 1 << 20, 1 << 28, 64


@dataclass(frozen=True)
class Report:
    """What a run gave in total."""

    documents: int
    tokens: int
    empty: int
    skipped: int
    problems: tuple[str, ...]
    dtype: str
    parts: int
    parts_reused: int
    lossless: bool
    """Whether the first document decodes to the text that it was."""
    already_done: bool = False


def preprocess(job: Job) -> Report:
    """Runs the job, or what is left of it, and verifies the result.

    Raises ValueError for bad input and for files in the way; nothing that existed before is changed then.
    """
    if job.workers < 1:
        raise ValueError(f"--workers {job.workers} should be 1 or more.")
    tokenizer = build_tokenizer(job.tokenizer_type, job.tokenizer_model)
    inputs = check_inputs(job.inputs)
    description = _describe(job, inputs, tokenizer)
    folder = Path(f"{job.output_prefix}.parts")
    if not _job_file(folder).exists() and (done := _finished_before(job, description)):
        return done
    _open_folder(folder, description)

    size = sum(int(str(fact["bytes"])) for fact in inputs)
    part_bytes = job.part_bytes or min(max(size // _PARTS_WANTED, _MIN_PART_BYTES), _MAX_PART_BYTES)
    parts = cut_into_parts(job.inputs, job.read, part_bytes)
    results = [finished_result(job, folder, part) for part in parts]
    todo = [part for part, result in zip(parts, results, strict=True) if result is None]
    _tokenize(job, folder, len(parts), todo)
    finished = [finished_result(job, folder, part) for part in parts]
    report = _total([result for result in finished if result], tokenizer, len(parts) - len(todo))
    if report.tokens == 0:
        shutil.rmtree(folder)
        raise ValueError(
            f"the input holds no text: {report.empty} empty and {report.skipped} unreadable documents in "
            f"{len(job.inputs)} file(s)."
        )
    max_token_id = _merge(job, folder, parts, tokenizer)
    lossless = _verify(job, report, parts, tokenizer)
    write_sidecar(job.output_prefix, _sidecar(job, report, tokenizer, max_token_id, description))
    shutil.rmtree(folder)
    return Report(**{**asdict(report), "lossless": lossless})


def _describe(job: Job, inputs: Sequence[dict[str, object]], tokenizer: Tokenizer) -> dict[str, object]:
    """Everything that shapes the result, as plain values to store and compare."""
    return {
        "inputs": list(inputs),
        "tokenizer_type": job.tokenizer_type,
        "tokenizer_sha256": tokenizer_fingerprint(job.tokenizer_type, job.tokenizer_model),
        "vocab_size": tokenizer.vocab_size,
        "append_eod": job.append_eod,
        "json_key": job.read.json_key,
        "sample_by": job.read.sample_by,
        "part_bytes": job.part_bytes,
    }


def _digest(description: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _finished_before(job: Job, description: dict[str, object]) -> Report | None:
    """The report of an earlier, complete run of the same job; raises if other data is in the way."""
    if not any(Path(f"{job.output_prefix}{suffix}").exists() for suffix in (".bin", ".idx", ".json")):
        return None
    sidecar = read_sidecar(job.output_prefix)
    same_job = sidecar is not None and sidecar.source_sha256 == _digest(description)
    if sidecar is None or not same_job or (sidecar.skipped and not job.skip_errors):
        raise ValueError(
            f"--output-prefix {job.output_prefix} already has data from other input or other settings. "
            "Remove its .bin, .idx and .json, or give another prefix."
        )
    indexed = IndexedDataset(job.output_prefix)
    return Report(
        documents=indexed.num_documents,
        tokens=indexed.num_tokens,
        empty=0,
        skipped=sidecar.skipped,
        problems=(),
        dtype=indexed.dtype.name,
        parts=0,
        parts_reused=0,
        lossless=True,
        already_done=True,
    )


def _job_file(folder: Path) -> Path:
    return folder / "job.json"


def _open_folder(folder: Path, description: dict[str, object]) -> None:
    """Makes the folder of parts, or checks that the one there belongs to the same job."""
    job_file = _job_file(folder)
    if job_file.exists():
        earlier = json.loads(job_file.read_text(encoding="utf-8"))
        differing = [key for key in description if earlier.get(key) != description[key]]
        if differing:
            raise ValueError(
                f"{folder} holds parts of an interrupted run with other {', '.join(differing)}. "
                "Remove the folder to start anew, or repeat that run's command to finish it."
            )
        return
    # Without job.json nothing says whose parts these are: what is left of a folder that was being removed.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(job_file, description)


def _tokenize(job: Job, folder: Path, num_parts: int, todo: Sequence[Part]) -> None:
    from tqdm import tqdm

    # disable=None: no bar where the output is not a terminal.
    with tqdm(total=num_parts, initial=num_parts - len(todo), unit="part", disable=None) as bar:
        try:
            for _ in run_parts(job, folder, todo):
                bar.update()
        except ValueError:
            if not any(folder.glob("part-*.json")):  # nothing to continue from: leave no trace
                shutil.rmtree(folder)
            raise


def _total(results: Sequence[PartResult], tokenizer: Tokenizer, parts_reused: int) -> Report:
    return Report(
        documents=sum(result.documents for result in results),
        tokens=sum(result.tokens for result in results),
        empty=sum(result.empty for result in results),
        skipped=sum(result.skipped for result in results),
        problems=tuple(problem for result in results for problem in result.problems)[:PROBLEMS_SHOWN],
        dtype=token_dtype(tokenizer.vocab_size).name,
        parts=len(results),
        parts_reused=parts_reused,
        lossless=True,
    )


def _merge(job: Job, folder: Path, parts: Sequence[Part], tokenizer: Tokenizer) -> int:
    """Concatenates the parts into the output; returns the largest token id."""
    with IndexedDatasetBuilder(job.output_prefix, token_dtype(tokenizer.vocab_size)) as builder:
        for part in parts:
            builder.append(part_prefix(folder, part))
        builder.finalize()
        return builder.max_token_id


def _verify(job: Job, report: Report, parts: Sequence[Part], tokenizer: Tokenizer) -> bool:
    """Reads the output again and compares counts and the first document; True if that decodes to its text."""
    indexed = IndexedDataset(job.output_prefix)
    found = (indexed.num_documents, indexed.num_tokens)
    texts = (text for part in parts for text in read_part(part, job.read))
    first = next(text for text in texts if isinstance(text, str) and text)
    stored = indexed.document(0).tolist()
    if found != (report.documents, report.tokens) or stored != document_ids(tokenizer, first, job.append_eod):
        raise ValueError(
            f"verification failed: {job.output_prefix} holds {found[0]} documents and {found[1]} tokens, "
            f"expected {report.documents} and {report.tokens}, or its first document differs from the "
            "input. Did the input change meanwhile? Remove the output and run again."
        )
    return tokenizer.decode(stored[:-1] if job.append_eod else stored) == first


def _sidecar(
    job: Job, report: Report, tokenizer: Tokenizer, max_token_id: int, description: dict[str, object]
) -> Sidecar:
    return Sidecar(
        tokenizer_type=job.tokenizer_type,
        tokenizer_sha256=str(description["tokenizer_sha256"]),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        append_eod=job.append_eod,
        documents=report.documents,
        tokens=report.tokens,
        max_token_id=max_token_id,
        skipped=report.skipped,
        source_sha256=_digest(description),
    )
