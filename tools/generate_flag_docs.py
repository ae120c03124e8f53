"""Write docs/flags.md from the configuration's dataclasses, or check that it is fresh."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_moe.config.docs import flag_page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "flags.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 1 if ``--check`` finds a stale page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="Write nothing; exit with 1 if the page is stale.")
    parser.add_argument("--page", type=Path, default=PAGE, help="The page. Default: docs/flags.md.")
    arguments = parser.parse_args(argv)
    text = flag_page(registries={})
    if not arguments.check:
        arguments.page.write_text(text, encoding="utf-8")
        return 0
    if arguments.page.is_file() and arguments.page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{arguments.page} is stale; run: python tools/generate_flag_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
