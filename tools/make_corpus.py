"""Collects a text corpus that every machine has: the sources of Python's standard library.

Code, comments and documentation strings, one document a file, in alphabetical order, as JSON lines with the
keys "text" and "source".
"""

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, metavar="FILE", help="the .jsonl file to write")
    arguments = parser.parse_args(argv)
    try:
        num_documents, num_bytes = write_corpus(Path(arguments.output), Path(sysconfig.get_paths()["stdlib"]))
    except (ValueError, OSError) as error:
        print(f"make_corpus: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.output}: {num_documents:,} documents, {num_bytes / 1e6:.1f} MB of text")
    return 0


def write_corpus(output: Path, library: Path) -> tuple[int, int]:
    """Writes the corpus, at once or not at all; returns the numbers of documents and of bytes of text."""
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(output.name + ".tmp")
    num_documents = num_bytes = 0
    with temporary.open("w", encoding="utf-8") as file:
        for source, text in library_sources(library):
            file.write(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
            num_documents += 1
            num_bytes += len(text.encode())
    if num_documents == 0:
        temporary.unlink()
        raise ValueError(f"{library} holds no Python sources. Is the standard library installed?")
    os.replace(temporary, output)
    return num_documents, num_bytes


def library_sources(library: Path) -> Iterator[tuple[str, str]]:
    """(path within the library, text) of each source, sorted by path; without installed packages."""
    for path in sorted(library.rglob("*.py")):
        source = path.relative_to(library)
        if source.parts[0] in ("site-packages", "dist-packages"):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a few of the library's tests are in other encodings on purpose
            continue
        if text.strip():
            yield source.as_posix(), text


if __name__ == "__main__":
    sys.exit(main())
