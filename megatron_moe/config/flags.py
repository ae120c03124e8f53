"""The command line: one argparse flag per setting, one group per section, and the few flags that are actions.

Nothing is converted while argparse reads: each flag that was typed is recorded with its words, so that all
mistakes can be reported at once, and so that only what was typed overrides the files.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_moe.config.errors import ConfigError, sentence
from megatron_moe.config.settings import Registries, Setting, nearest, section_title, sections, settings
from megatron_moe.config.values import from_words

_METAVARS = {int: "N", float: "X", str: "TEXT", bool: ""}


@dataclass(frozen=True)
class Actions:
    """What to do instead of training, or before it; these are flags only, not YAML keys."""

    config: tuple[str, ...] = ()
    dump_config: bool = False
    print_topology: bool = False
    dry_run: bool = False
    check_cluster: str | None = None
    world_size: int | None = None


@dataclass(frozen=True)
class Typed:
    """One flag as it was typed, with its words, or with the value that the flag itself means."""

    name: str
    flag: str
    words: tuple[str, ...] = ()
    value: Any = None
    fixed: bool = False


class _Record(argparse.Action):
    """Record a flag and the words after it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert option_string is not None
        _append(namespace, Typed(self.dest, option_string, words=tuple(values)))


class _RecordFixed(argparse.Action):
    """Record a flag that means a value by itself: a boolean or a synonym."""

    def __init__(self, option_strings: Sequence[str], dest: str, meanings: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)
        self.meanings = meanings

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        assert option_string is not None
        _append(namespace, Typed(self.dest, option_string, value=self.meanings[option_string], fixed=True))


class _Formatter(argparse.HelpFormatter):
    """Flags on one line, their help below; ``N`` and not ``[N ...]`` for flags that take one value."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8, width=110)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        setting = settings().get(action.dest)
        if isinstance(action, _Record) and setting is not None and not setting.many:
            return str(action.metavar)
        return super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """argparse that accepts ``--num_layers`` for ``--num-layers`` and raises ConfigError."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._negative_number_matcher = re.compile(r"^-\.?\d")  # -1e-4 is a value, not a flag

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and leaving."""
        raise ConfigError([message])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, with underscores in the names of flags turned into dashes."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_dashed(word) for word in words], namespace)


def build_parser(registries: Registries, description: str | None = None) -> Parser:
    """The parser of all flags. Its namespace holds ``typed``, a list of :class:`Typed`, and the actions."""
    parser = Parser(
        usage="%(prog)s [--config FILE]... [--FLAG VALUE]...",
        description=description,
        epilog="Every flag is also a YAML key of the same name. Defaults < files, in their order < flags.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    _add_actions(parser)
    for section in sections():
        title, about = section_title(section)
        group = parser.add_argument_group(title, about[:1].upper() + about[1:])
        for setting in settings().values():
            if setting.section == section:
                _add_setting(group, setting, registries)
    return parser


def read_typed(
    argv: Sequence[str], registries: Registries, description: str | None = None
) -> tuple[dict[str, tuple[Any, str]], Actions, list[str]]:
    """What was typed: (value and flag by setting name, actions, problems)."""
    parser = build_parser(registries, description)
    namespace, extras = parser.parse_known_args(list(argv))
    problems = _unknown_flags(extras, parser)
    values: dict[str, tuple[Any, str]] = {}
    for typed in getattr(namespace, "typed", []):
        setting = settings()[typed.name]
        try:
            value = typed.value if typed.fixed else from_words(setting, typed.words)
        except ValueError as error:
            problems.append(f"{typed.flag}: {error}.")
            continue
        problem = setting.choice_problem(value, registries)
        if problem is not None:
            problems.append(sentence(f"{typed.flag}: {problem}"))
        values[typed.name] = (value, typed.flag)
    chosen = {name: value for name, value in vars(namespace).items() if name in Actions.__dataclass_fields__}
    return values, Actions(**{**chosen, "config": tuple(chosen.get("config", ()))}), problems


def _add_actions(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Actions", "Where values come from, and what to do with them.")
    group.add_argument(
        "--config",
        action="append",
        metavar="FILE",
        help="YAML file; may be repeated, later files override earlier.",
    )
    group.add_argument(
        "--dump-config", action="store_true", help="Print every value and where it comes from, and exit."
    )
    group.add_argument(
        "--print-topology",
        action="store_true",
        help="Print the ranks of every communication group, and exit.",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="Print what this layout needs of memory, sends and computes, without a device, and exit.",
    )
    group.add_argument(
        "--check-cluster",
        metavar="FILE",
        help="Measure devices and the links of this layout, name slow ones, write FILE for the planner, and exit.",
    )
    group.add_argument(
        "--world-size",
        type=_positive,
        metavar="N",
        help="Number of ranks for the actions above. Default: those running.",
    )


def _add_setting(group: Any, setting: Setting, registries: Registries) -> None:
    text = help_text(setting, registries).replace("%", "%%")
    if setting.base is bool:
        off = f"--no-{setting.flag[2:]}"
        meanings = {setting.flag: True, off: False}
        group.add_argument(setting.flag, off, dest=setting.name, action=_RecordFixed, meanings=meanings, help=text)
    else:
        metavar = _METAVARS[setting.base]
        names = (setting.flag, *setting.aliases)
        group.add_argument(*names, dest=setting.name, action=_Record, nargs="*", metavar=metavar, help=text)
    for synonym, value in setting.synonyms.items():
        same = f"The same as {as_typed(setting, value)}."
        meanings = {synonym: value}
        group.add_argument(synonym, dest=setting.name, action=_RecordFixed, meanings=meanings, help=same)


def help_text(setting: Setting, registries: Registries) -> str:
    """The field's documentation with its choices and its default."""
    parts = [setting.help]
    choices = setting.choices(registries)
    if choices:
        parts.append(f"One of: {', '.join(choices)}.")
    default = as_shown(setting.default)
    if default is not None:
        parts.append(f"[default: {default}]")
    return " ".join(parts)


def as_shown(value: Any) -> str | None:
    """A default as help shows it; None where the help itself says what happens."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or None
    return str(value)


def as_typed(setting: Setting, value: Any) -> str:
    """A setting and a value as they would be typed: ``--no-bias``, ``--num-layers 4``."""
    if isinstance(value, bool):
        return setting.flag if value else f"--no-{setting.flag[2:]}"
    if value is None or value == ():
        return f"{setting.flag} none"
    return f"{setting.flag} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def _unknown_flags(extras: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """A sentence for each flag that does not exist; words after one are taken to be its values."""
    known = [name.lstrip("-") for name in parser._option_string_actions]
    problems = []
    after_unknown = False
    for word in extras:
        if word.startswith("-"):
            flag = word.partition("=")[0]
            found = " or ".join(f"--{name}" for name in nearest(flag.lstrip("-"), known))
            problems.append(f"unknown flag {flag}; " + (f"did you mean {found}?" if found else "--help lists all."))
            after_unknown = True
        elif not after_unknown:
            problems.append(f"unexpected word {word!r}: every value follows its flag.")
    return problems


def _append(namespace: argparse.Namespace, typed: Typed) -> None:
    namespace.typed = [*getattr(namespace, "typed", []), typed]


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _positive(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value
