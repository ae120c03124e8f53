"""From a command line to a configuration: defaults < files, in their order < flags.

Errors of all files and flags are gathered and raised at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_moe.config.errors import ConfigError, sentence
from megatron_moe.config.files import read_file
from megatron_moe.config.flags import Actions, read_typed
from megatron_moe.config.normalise import apply, implications
from megatron_moe.config.schema import Config
from megatron_moe.config.settings import Registries, assemble, did_you_mean, sections, setting_named, settings, value_of
from megatron_moe.config.values import from_value


@dataclass(frozen=True)
class Resolved:
    """A configuration with where each value came from, by setting name, and what to do with it.

    Provenance reads ``default``, ``configs/quickstart.yaml:12``, ``--lr`` or ``implied by ...``.
    """

    config: Config
    provenance: dict[str, str]
    actions: Actions

    def normalised(self, world_size: int) -> tuple["Resolved", list[str]]:
        """With the values that others imply on so many ranks, and a sentence for each that changed."""
        found = implications(self.config, world_size)
        provenance = {**self.provenance, **{item.name: f"implied by {item.cause}" for item in found}}
        return replace(self, config=apply(self.config, found), provenance=provenance), [str(item) for item in found]


def resolve(argv: Sequence[str], registries: Registries, description: str | None = None) -> Resolved:
    """Read a command line and the files that it names.

    Args:
        argv: the words after the program's name.
        registries: the choices of the names that the top floor offers.
        description: first paragraph of ``--help``.

    Raises:
        ConfigError: every unknown name, wrong type and unknown choice of all files and flags.
        SystemExit: after ``--help``.
    """
    typed, actions, flag_problems = read_typed(argv, registries, description)
    problems: list[str] = []
    values: dict[str, tuple[Any, str]] = {}
    for path in actions.config:
        layer = read_file(path, registries)
        problems += layer.problems
        values.update(layer.values)
    values.update(typed)
    problems += flag_problems
    if problems:
        raise ConfigError(problems)
    provenance = {name: values[name][1] if name in values else "default" for name in settings()}
    return Resolved(assemble({name: value for name, (value, _) in values.items()}), provenance, actions)


def load_config(path: str | Path) -> Config:
    """Read one complete YAML file, such as the ``config.yaml`` that a run saves. Raises ConfigError."""
    layer = read_file(str(path), registries=None)
    if layer.problems:
        raise ConfigError(layer.problems)
    return assemble({name: value for name, (value, _) in layer.values.items()})


def to_dict(config: Config) -> dict[str, dict[str, Any]]:
    """Plain nested values, ready for JSON: ``{"model": {"num_layers": 4, ...}, ...}``."""
    nested: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for name, setting in settings().items():
        value = value_of(config, name)
        nested[setting.section][name] = list(value) if isinstance(value, tuple) else value
    return nested


def from_dict(data: Mapping[str, Any]) -> Config:
    """The inverse of :func:`to_dict`; sections or keys may be missing. Raises ConfigError."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for section, entries in data.items():
        if section not in sections():
            problems.append(sentence(f"unknown section '{section}'{did_you_mean(section, sections())}"))
            continue
        for name, value in entries.items():
            setting = setting_named(name)
            if setting is None or setting.section != section:
                problems.append(sentence(f"unknown key '{name}' in '{section}'{did_you_mean(name, settings())}"))
                continue
            try:
                values[setting.name] = from_value(setting, value)
            except ValueError as error:
                problems.append(f"{section}.{name}: {error}.")
    if problems:
        raise ConfigError(problems)
    return assemble(values)
