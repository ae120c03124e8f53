"""The house's bounds: small files, short functions, packages that only hand on names."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [p for part in ("megatron_moe", "tools", "tests", "benchmarks") for p in sorted((ROOT / part).rglob("*.py"))]
SOURCES += sorted(ROOT.glob("*.py"))
LINES, FUNCTION_LINES = 400, 60


def test_sizes():
    long: list[str] = []
    for path in SOURCES:
        text, name = path.read_text(), path.relative_to(ROOT)
        if text.count("\n") > LINES:
            long.append(f"{name} has {text.count(chr(10))} lines")
        for node in ast.walk(ast.parse(text)) if name.parts[0] != "tests" else ():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > FUNCTION_LINES:
                    long.append(f"{name}:{node.lineno} {node.name} has {length} lines")
    assert len(SOURCES) > 100 and long == []


def test_packages_only_hand_on_names():
    allowed = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign, ast.AnnAssign)
    for path in ROOT.glob("megatron_moe/**/__init__.py"):
        body = ast.parse(path.read_text()).body
        assert all(isinstance(node, allowed) for node in body), f"{path.relative_to(ROOT)} has code of its own"
