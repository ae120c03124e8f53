"""From files to a .bin/.idx pair: kinds of input, restarts, workers, and bad input."""

import gzip
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_moe.data import preprocess_parts
from megatron_moe.data.documents import Part, Problem, ReadOptions, cut_into_parts, read_part
from megatron_moe.data.indexed_dataset import IndexedDataset
from megatron_moe.data.preprocess import preprocess
from megatron_moe.data.preprocess_parts import Job, PartResult, tokenize_part
from megatron_moe.data.sidecar import read_sidecar
from megatron_moe.data.tokenizer import ByteTokenizer
from tools.make_corpus import library_sources
from tools.make_corpus import main as make_corpus
from tools.preprocess_data import main as preprocess_data

TEXTS = [f"document {number} " + "wörds " * (number % 7) for number in range(40)]


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """40 documents, with an empty line and an empty text among them."""
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS]
    path = tmp_path / "input.jsonl"
    path.write_text("\n".join(lines[:20] + ["", '{"text": ""}'] + lines[20:]), encoding="utf-8")
    return path


def job(tmp_path: Path, *inputs: Path, output: str = "out", **changes: object) -> Job:
    arguments = {
        "tokenizer_type": "ByteTokenizer",
        "tokenizer_model": None,
        "append_eod": True,
        "part_bytes": 300,
    }
    files = tuple(map(str, inputs))
    return Job(inputs=files, output_prefix=str(tmp_path / output), **{**arguments, **changes})  # pyright: ignore[reportArgumentType]


def documents(prefix: Path) -> list[str]:
    data = IndexedDataset(prefix)
    stored = [data.document(number).tolist() for number in range(data.num_documents)]
    assert all(ids[-1] == 256 for ids in stored)
    return [ByteTokenizer().decode(ids) for ids in stored]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_and_two_workers_write_the_same_bytes(tmp_path: Path, jsonl: Path) -> None:
    report = preprocess(job(tmp_path, jsonl, output="one"))
    assert (report.documents, report.empty, report.skipped, report.lossless) == (40, 1, 0, True)
    assert report.parts > 3 and report.parts_reused == 0
    preprocess(job(tmp_path, jsonl, output="two", workers=2))
    preprocess(job(tmp_path, jsonl, output="whole", part_bytes=None))
    assert documents(tmp_path / "one") == TEXTS
    for suffix in (".bin", ".idx"):
        one = (tmp_path / f"one{suffix}").read_bytes()
        assert (tmp_path / f"two{suffix}").read_bytes() == one == (tmp_path / f"whole{suffix}").read_bytes()
    assert names(tmp_path) == sorted(
        ["input.jsonl"] + [f"{name}.{suffix}" for name in ("one", "two", "whole") for suffix in ("bin", "idx", "json")]
    )
    sidecar = read_sidecar(tmp_path / "one")
    assert sidecar is not None
    assert (sidecar.documents, sidecar.tokens, sidecar.max_token_id) == (40, report.tokens, 256)


def dies_at_part_3(job: Job, folder: Path, part: Part) -> PartResult:
    if part.number == 3:
        (folder / "part-00003.bin.tmp").write_bytes(b"half")
        if multiprocessing.parent_process() is None:
            raise KeyboardInterrupt
        os._exit(1)
    return tokenize_part(job, folder, part)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_run_continues(
    tmp_path: Path, jsonl: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A worker that is killed (or Ctrl-C in line) loses its own part alone; the rest is kept."""
    monkeypatch.setattr(preprocess_parts, "tokenize_part", dies_at_part_3)
    with pytest.raises((KeyboardInterrupt, ValueError)) as caught:
        preprocess(job(tmp_path, jsonl, workers=workers))
    assert workers == 1 or "Run the same command again" in str(caught.value)
    assert not (tmp_path / "out.idx").exists()
    monkeypatch.setattr(preprocess_parts, "tokenize_part", tokenize_part)

    with pytest.raises(ValueError, match="interrupted run with other append_eod"):
        preprocess(job(tmp_path, jsonl, append_eod=False))
    report = preprocess(job(tmp_path, jsonl))
    assert report.parts_reused >= 1 and report.documents == 40
    assert documents(tmp_path / "out") == TEXTS
    assert names(tmp_path) == ["input.jsonl", "out.bin", "out.idx", "out.json"]


def test_a_finished_run_is_recognised_and_protected(tmp_path: Path, jsonl: Path) -> None:
    preprocess(job(tmp_path, jsonl))
    before = (tmp_path / "out.idx").stat().st_mtime_ns
    assert preprocess(job(tmp_path, jsonl)).already_done
    with pytest.raises(ValueError, match="already has data from other input or other settings"):
        preprocess(job(tmp_path, jsonl, append_eod=False))
    assert (tmp_path / "out.idx").stat().st_mtime_ns == before


def test_workers_end_with_their_parent() -> None:
    """A run that is killed leaves no process that would write beside the next run."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def parent() -> None:
        def child() -> None:
            preprocess_parts._set_up_process()
            sender.send("ready")
            time.sleep(60)

        context.Process(target=child).start()
        receiver.poll(None)
        os._exit(0)  # as if killed: nothing is cleaned up

    process = context.Process(target=parent)
    process.start()
    process.join()
    assert receiver.recv() == "ready"
    sender.close()
    # The worker holds the last copy of the sending end: the end of the stream is its death.
    assert receiver.poll(10)
    with pytest.raises(EOFError):
        receiver.recv()


def write_text(path: Path, texts: list[str]) -> None:
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")


def write_gzip(path: Path, texts: list[str]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts).encode()))


def write_parquet(path: Path, texts: list[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "id": list(range(len(texts)))}), path)


@pytest.mark.parametrize(
    ("name", "write"), [("a.txt", write_text), ("a.jsonl.gz", write_gzip), ("a.parquet", write_parquet)]
)
def test_other_kinds_of_files(tmp_path: Path, name: str, write: Callable[[Path, list[str]], None]) -> None:
    write(tmp_path / name, TEXTS)
    preprocess(job(tmp_path, tmp_path / name, read=ReadOptions(sample_by="line")))
    assert documents(tmp_path / "out") == TEXTS


def test_text_files_are_documents_in_order(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("b.txt", "a.md", "c")]
    for number, file in enumerate(files):
        file.write_bytes(f"text\r\n{number}".encode())
    preprocess(job(tmp_path, *files))
    assert documents(tmp_path / "out") == ["text\r\n0", "text\r\n1", "text\r\n2"]


def test_every_cut_of_a_file_gives_the_same_lines_and_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n\nbad\r\n{"text": "bc"}\n{"text": 5}\n{"text": "d"}')
    expected = [
        "a",
        f"{path}, line 3: not JSON: Expecting value: line 1 column 1 (char 0)",
        "bc",
        f"{path}, line 5: the value of 'text' is not text but int",
        "d",
    ]
    for part_bytes in range(1, path.stat().st_size + 2):
        parts = cut_into_parts([str(path)], ReadOptions(), part_bytes)
        assert [part.number for part in parts] == list(range(len(parts)))
        assert [str(text) for part in parts for text in read_part(part, ReadOptions())] == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "cut off', "not JSON: Unterminated string"),
        (b'{"text": "\xff"}', r"byte 34 \(0xff\) is not UTF-8: invalid start byte"),
        (b'{"txt": "a"}', r"no key 'text' among 'txt' \(see --json-key\)"),
        (b'["a"]', "expected an object with the key 'text', found list"),
        (b'{"text": null}', "the value of 'text' is not text but NoneType"),
        (b'{"text": "\\ud800"}', r"half of a surrogate pair \(\\ud800\)"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_malformed_lines_stop_or_are_skipped_and_counted(
    tmp_path: Path, content: bytes, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n        \n' + content + b'\n{"text": "c"}\n')
    arguments = [
        "--input",
        str(path),
        "--output-prefix",
        str(tmp_path / "out"),
        "--tokenizer-type",
        "ByteTokenizer",
    ]
    assert preprocess_data(arguments) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--on-error skip" in error
    assert f"{path}, line 4: " in error
    assert re.search(reason, error)
    assert names(tmp_path) == ["x.jsonl"]
    assert preprocess_data([*arguments, "--on-error", "skip"]) == 0
    output = capsys.readouterr().out
    assert "2 documents, 2 tokens (uint16), verified" in output and "1 unreadable documents skipped" in output
    assert f"{path}, line 4: " in output


def test_undecodable_text_names_file_and_position(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"ab\nc\xe9d\n")
    whole, by_line = ReadOptions(), ReadOptions(sample_by="line")
    assert list(read_part(Part(0, (str(path),)), whole)) == [
        Problem(str(path), "byte 4 (0xe9) is not UTF-8: invalid continuation byte")
    ]
    assert list(read_part(Part(0, (str(path),)), by_line)) == [
        "ab",
        Problem(f"{path}, line 2", "byte 4 (0xe9) is not UTF-8: invalid continuation byte"),
    ]


def test_bad_inputs_are_one_line_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "broken.parquet").write_text("PAR1 no")
    write_parquet(tmp_path / "columns.parquet", ["a"])
    write_text(tmp_path / "fine.txt", ["a"])
    for file, more, message in (
        ("empty.jsonl", [], "the input holds no text: 0 empty"),
        ("empty.txt", [], "the input holds no text: 1 empty"),
        ("missing.txt", [], "does not exist"),
        (".", [], "is a folder; give its files"),
        ("broken.parquet", [], "broken.parquet cannot be read as parquet"),
        ("columns.parquet", ["--json-key", "body"], "no key 'body' among 'text', 'id'"),
        ("fine.txt", ["--workers", "0"], "--workers 0 should be 1 or more"),
        ("fine.txt", ["--tokenizer-type", "SentencePieceTokenizer"], "needs --tokenizer-model"),
    ):
        arguments = ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "ByteTokenizer", *more]
        assert preprocess_data([*arguments, "--input", str(tmp_path / file)]) == 1
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert not [name for name in names(tmp_path) if name.startswith("out")]


def test_corpus_of_the_standard_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = tmp_path / "lib"
    for name, content in (
        ("b.py", b"b = 1\n"),
        ("a/z.py", "é".encode()),
        ("latin.py", b"\xe9"),
        ("blank.py", b"\n"),
        ("site-packages/x.py", b"x"),
    ):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(content)
    assert list(library_sources(library)) == [("a/z.py", "é"), ("b.py", "b = 1\n")]

    assert make_corpus(["--output", str(tmp_path / "new" / "corpus.jsonl")]) == 0
    assert "documents" in capsys.readouterr().out
    lines = (tmp_path / "new" / "corpus.jsonl").read_text(encoding="utf-8").split("\n")
    assert sum(map(len, lines)) > 10_000_000
    assert json.loads(lines[0]).keys() == {"text", "source"}
