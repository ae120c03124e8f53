"""Every tool explains itself: --help answers with status 0."""

import importlib
from pathlib import Path

import pytest

TOOLS = sorted(path.stem for path in (Path(__file__).parents[3] / "tools").glob("*.py"))


@pytest.mark.parametrize("tool", TOOLS)
def test_help(tool: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"tools.{tool}")
    with pytest.raises(SystemExit) as end:
        module.main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage:") and "--help" in shown
