"""No flag is accepted and ignored: the code outside the configuration reads every field.

A field is read where ``.name`` is loaded, and not called, from something called config or like a section,
such as ``config.model.num_layers`` or ``moe.num_experts``; or where a property or method of the schema that
reads the field is. To check or compare a value is not to use it: of ``megatron_moe/config`` only ``normalise.py``
counts, which makes other values of it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from megatron_moe.config.settings import sections, settings

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "megatron_moe" / "config"


def sources() -> Iterator[Path]:
    for path in sorted((ROOT / "megatron_moe").rglob("*.py")):
        if CONFIG not in path.parents or path.name == "normalise.py":
            yield path
    yield from sorted((ROOT / "tools").glob("*.py"))
    yield ROOT / "pretrain_moe.py"


def attributes_read(tree: ast.AST, methods: frozenset[str] = frozenset()) -> set[str]:
    """Names read from a configuration; a call is a reading only of the schema's own methods."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and (id(node) not in called or node.attr in methods)
        and is_configuration(node.value)
    }


def is_configuration(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in sections() or "config" in name.lower()


def fields_behind() -> dict[str, set[str]]:
    """For each property and method of the schema the names that it reads of itself."""
    behind: dict[str, set[str]] = {}
    trees = [ast.parse(path.read_text()) for path in sorted((CONFIG / "schema").glob("*.py"))]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            behind[node.name] = {
                item.attr
                for item in ast.walk(node)
                if isinstance(item, ast.Attribute) and isinstance(item.value, ast.Name) and item.value.id == "self"
            }
    return behind


def all_read(texts: list[str]) -> set[str]:
    """Every field that the texts read, directly or through the schema."""
    behind = fields_behind()
    read = set().union(*(attributes_read(ast.parse(text), frozenset(behind)) for text in texts))
    reached: set[str] = set()
    while read:
        name = read.pop()
        if name not in reached:
            reached.add(name)
            read |= behind.get(name, set())
    return reached


def test_every_flag_is_read() -> None:
    read = all_read([path.read_text() for path in sources() if path.is_file()])
    unread = [setting.flag for setting in settings().values() if setting.name not in read]
    assert unread == [], f"{len(unread)} flags are accepted and ignored: {' '.join(unread)}"


def test_what_counts_as_reading() -> None:
    assert "seed" in all_read(["x = config.training.seed"])
    assert "seed" in all_read(["x = self.train_config.seed"])
    assert "seed" not in all_read(["config.seed = 3", "x = torch.seed", "seed = 3"])
    assert "split" not in all_read(["text.split(',')", "data.split(',')"])
    assert "save" in all_read(["folder = config.checkpoint.save"])
    assert "kv_channels" in all_read(["model.head_channels"])
    assert {"moe_layer_freq", "num_experts"} <= all_read(["config.moe.layer_pattern(4)"])
