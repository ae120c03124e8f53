"""The dataclasses of the schema, read as a table of settings, from which flags, files and docs are made.

::

    num_layers: int = flag(4, "Number of ...")   ->   Setting("num_layers", "model", base=int, default=4, ...)

A field added to the schema becomes a flag, a YAML key, a line of ``--help`` and a row of ``docs/flags.md`` by
itself.
"""

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from megatron_moe.config.schema import Config

Registries = Mapping[str, tuple[str, ...]]
"""The top floor's registries and their choices, e.g. ``{"routers": ("topk", "gshard_top2")}``."""

_TYPE_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
_TYPE_NAMES_OF_MANY = {int: "integers", float: "numbers", str: "texts", bool: "true or false"}


@dataclass(frozen=True)
class Setting:
    """One field of the configuration: ``base`` is int, float, str or bool; ``many`` means a tuple of them."""

    name: str
    section: str
    base: type
    optional: bool
    many: bool
    default: Any
    help: str
    own_choices: tuple[str, ...] | None
    registry: str | None
    synonyms: Mapping[str, Any]
    aliases: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The flag as it is typed."""
        return flag_of(self.name)

    @property
    def type_name(self) -> str:
        """What a value has to be, for a sentence: ``an integer or none``."""
        name = f"a list of {_TYPE_NAMES_OF_MANY[self.base]}" if self.many else _TYPE_NAMES[self.base]
        return f"{name} or none" if self.optional else name

    def choices(self, registries: Registries) -> tuple[str, ...] | None:
        """Admitted strings, or None where any value of the type will do."""
        return self.own_choices if self.registry is None else registries[self.registry]

    def choice_problem(self, value: Any, registries: Registries) -> str | None:
        """What is wrong with a value of the right type that is not among the choices."""
        choices = self.choices(registries)
        if choices is None or value is None:
            return None
        unknown = [item for item in (value if self.many else (value,)) if item not in choices]
        if not unknown:
            return None
        return f"{unknown[0]!r} is not one of {', '.join(choices)}{did_you_mean(unknown[0], choices)}"


@cache
def sections() -> dict[str, type]:
    """The sections of the configuration and their dataclasses, in order."""
    return get_type_hints(Config)


def section_title(section: str) -> tuple[str, str]:
    """Title and description of a section, from the first line of its docstring ``Title: description.``"""
    title, _, description = (sections()[section].__doc__ or section).strip().splitlines()[0].partition(": ")
    return title, description


@cache
def settings() -> dict[str, Setting]:
    """Every setting by its name, in the order of the schema."""
    table: dict[str, Setting] = {}
    for section, cls in sections().items():
        hints = get_type_hints(cls)
        for item in fields(cls):
            assert item.name not in table, f"{item.name} is declared in two sections"
            base, optional, many = _type_parts(hints[item.name])
            metadata = item.metadata
            table[item.name] = Setting(
                name=item.name,
                section=section,
                base=base,
                optional=optional,
                many=many,
                default=item.default,
                help=metadata["help"],
                own_choices=metadata["choices"],
                registry=metadata["registry"],
                synonyms=metadata["synonyms"],
                aliases=metadata["aliases"],
            )
    return table


def setting_named(name: str) -> Setting | None:
    """The setting of a YAML key: its name, or one of its other names."""
    others = (s for s in settings().values() if name in map(key_of, s.aliases))
    return settings().get(name) or next(others, None)


def value_of(config: Config, name: str) -> Any:
    """The value of a setting."""
    return getattr(getattr(config, settings()[name].section), name)


def assemble(values: Mapping[str, Any]) -> Config:
    """A configuration from values by setting name; defaults where there is none."""
    built = {
        section: cls(**{item.name: values[item.name] for item in fields(cls) if item.name in values})
        for section, cls in sections().items()
    }
    return Config(**built)


def flag_of(name: str) -> str:
    """The flag of a setting's name: ``num_layers`` -> ``--num-layers``."""
    return "--" + name.replace("_", "-")


def key_of(flag: str) -> str:
    """The inverse of :func:`flag_of`."""
    return flag.removeprefix("--").replace("-", "_")


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """Up to three candidates that resemble a misspelled name, best first."""
    candidates = list(candidates)
    return difflib.get_close_matches(name, candidates, n=3, cutoff=0.7) or [c for c in candidates if name in c][:3]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """``; did you mean x?`` or an empty string."""
    found = nearest(name, candidates)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _type_parts(hint: Any) -> tuple[type, bool, bool]:
    """(base type, optional, many) of ``X``, ``X | None``, ``tuple[X, ...]`` or ``tuple[X, ...] | None``."""
    optional = many = False
    if get_origin(hint) in (types.UnionType, Union):
        (hint,) = [part for part in get_args(hint) if part is not type(None)]
        optional = True
    if get_origin(hint) is tuple:
        hint, ellipsis = get_args(hint)
        assert ellipsis is ..., "only tuple[X, ...] is a list"
        many = True
    assert hint in _TYPE_NAMES, f"a setting cannot have type {hint}"
    return hint, optional, many
