"""YAML files as layers of the configuration, every value with its file and line.

Keys may stand flat or below the name of their section, with ``_`` or ``-``::

    hidden-size: 512            # configs/a.yaml:1
    moe:
      num_experts: 16           # configs/a.yaml:3
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_moe.config.errors import sentence
from megatron_moe.config.flags import Actions, as_typed
from megatron_moe.config.settings import Registries, Setting, did_you_mean, key_of, sections, setting_named, settings
from megatron_moe.config.values import from_value

_KEPT_AS_WRITTEN = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")


@dataclass
class Layer:
    """What one file says.

    Attributes:
        values: (value, ``file:line``) by setting name.
        problems: a sentence for each mistake, which begins with ``file:line``.
    """

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_file(path: str, registries: Registries | None) -> Layer:
    """Read a YAML file; mistakes are returned in the layer, never raised."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return Layer(problems=[f"--config {path} cannot be read: {reason}."])
    except UnicodeDecodeError as error:
        return Layer(problems=[f"--config {path} cannot be read: byte {error.start} is not UTF-8 text."])
    return read_text(text, path, registries)


def read_text(text: str, label: str, registries: Registries | None) -> Layer:
    """Read YAML text.

    Args:
        text: the YAML.
        label: what errors and provenance call it, usually a path.
        registries: choices of names; None leaves names from registries unchecked.
    """
    layer = Layer()
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        layer.problems.append(f"{label}{_position(error)}: this is not YAML: {_reason(error)}.")
        return layer
    if root is None:
        return layer
    if not isinstance(root, yaml.MappingNode):
        layer.problems.append(f"{label}:{_line(root)}: expected lines of the form 'key: value'.")
        return layer
    seen: dict[str, int] = {}
    for section, key_node, value_node in _entries(root, label, seen, layer.problems):
        where = f"{label}:{_line(key_node)}"
        try:
            setting, value = _read_entry(section, str(key_node.value), value_node, seen, _line(key_node))
        except ValueError as error:
            layer.problems.append(sentence(f"{where}: {error}"))
            continue
        problem = _choice_problem(setting, value, registries)
        if problem is not None:
            layer.problems.append(sentence(f"{where}: {setting.name}: {problem}"))
        layer.values[setting.name] = (value, where)
    return layer


def _entries(
    root: yaml.MappingNode, label: str, seen: dict[str, int], problems: list[str]
) -> Iterator[tuple[str | None, yaml.Node, yaml.Node]]:
    """(section or None, key, value) of all flat and nested entries."""
    for key_node, value_node in root.value:
        key = str(key_node.value)
        if key not in sections():
            yield None, key_node, value_node
            continue
        where = f"{label}:{_line(key_node)}"
        if key in seen:
            problems.append(f"{where}: section '{key}' was begun before, in line {seen[key]}; put them together.")
        seen.setdefault(key, _line(key_node))
        if isinstance(value_node, yaml.MappingNode):
            yield from ((key, *pair) for pair in value_node.value)
        elif value_node.tag != "tag:yaml.org,2002:null":  # a section whose lines are all commented out is fine
            problems.append(f"{where}: section '{key}' should hold indented lines of the form 'key: value'.")


def _read_entry(section: str | None, key: str, node: yaml.Node, seen: dict[str, int], line: int) -> tuple[Setting, Any]:
    """The setting that a key means, and its value; ValueError says what is wrong, without file and line."""
    name = key.replace("-", "_")
    synonym = _synonyms().get(name)
    setting = synonym[0] if synonym else setting_named(name)
    if setting is None:
        raise ValueError(_unknown_key(section, key, name))
    if section is not None and setting.section != section:
        raise ValueError(f"key '{key}' belongs in section '{setting.section}', not in '{section}'")
    if setting.name in seen:
        raise ValueError(f"key '{key}' was set before, in line {seen[setting.name]} of the same file")
    seen[setting.name] = line
    plain = _plain(node, setting.base)
    if synonym:
        if plain is not True:
            same = as_typed(setting, synonym[1])
            raise ValueError(f"key '{key}' can only be true, which means {same}; otherwise set {setting.name}")
        return setting, synonym[1]
    try:
        return setting, from_value(setting, plain)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _unknown_key(section: str | None, key: str, name: str) -> str:
    """Why a key is unknown, with the closest names."""
    if name in Actions.__dataclass_fields__:
        return f"'{key}' is an action, which is given on the command line only"
    own = [n for n, setting in settings().items() if section in (None, setting.section)]
    if section is None:
        own += sections()
    return f"unknown key '{key}'" + (did_you_mean(name, own) or did_you_mean(name, settings()))


def _synonyms() -> dict[str, tuple[Setting, Any]]:
    """(setting, value) by the YAML key of each synonym: ``bf16: true`` is ``params_dtype: bfloat16``."""
    return {
        key_of(synonym): (setting, value)
        for setting in settings().values()
        for synonym, value in setting.synonyms.items()
    }


def _plain(node: yaml.Node, base: type) -> Any:
    """A node as plain Python values. Where text is wanted a number stays as it was written: ``010``."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(child, base) for child in node.value]
    if base is str and node.tag in _KEPT_AS_WRITTEN:
        return node.value
    try:
        return yaml.constructor.SafeConstructor().construct_object(node, deep=True)
    except yaml.YAMLError as error:
        raise ValueError(_reason(error)) from None


def _choice_problem(setting: Setting, value: Any, registries: Registries | None) -> str | None:
    if registries is None and setting.registry is not None:
        return None
    return setting.choice_problem(value, registries or {})


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _position(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f":{mark.line + 1}"


def _reason(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error)
    context = getattr(error, "context", None)
    return f"{problem} ({context})" if context else problem
