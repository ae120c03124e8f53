"""docs/flags.md is what the dataclasses say."""

from pathlib import Path

import pytest

from tools.generate_flag_docs import main


def test_page_is_fresh() -> None:
    assert main(["--check"]) == 0, "run: python tools/generate_flag_docs.py"


def test_stale_or_missing_page_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "flags.md"
    assert main(["--check", "--page", str(page)]) == 1
    assert main(["--page", str(page)]) == 0
    assert main(["--check", "--page", str(page)]) == 0
    page.write_text(page.read_text().replace("| int |", "| float |", 1))
    assert main(["--check", "--page", str(page)]) == 1
    assert "is stale" in capsys.readouterr().err and "| float |" in page.read_text()
