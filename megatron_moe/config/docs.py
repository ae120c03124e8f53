"""The page of all flags, ``docs/flags.md``, as text: a function of the dataclasses and nothing else."""

from collections.abc import Iterator

from megatron_moe.config.flags import as_shown, as_typed
from megatron_moe.config.settings import Registries, Setting, section_title, sections, settings

_HEAD = """\
# Flags

Written by `tools/generate_flag_docs.py` from `megatron_moe/config/schema/`; do not edit.

Every flag is a YAML key of the same name, with `_` or `-`, flat or below the name of its section. Defaults
are overridden by the files of `--config` in their order, and those by flags. The value `none` unsets a flag
that has no default. `--dump-config` prints every value and where it comes from.
"""


def flag_page(registries: Registries) -> str:
    """Markdown with one table a section.

    Args:
        registries: choices to list; where a registry is missing its name is given instead.
    """
    return _HEAD + "".join(f"\n{block}" for section in sections() for block in _section(section, registries))


def _section(section: str, registries: Registries) -> Iterator[str]:
    title, description = section_title(section)
    yield f"## {title}\n"
    yield f"`{section}:` {description}\n"
    rows = [_row(setting, registries) for setting in settings().values() if setting.section == section]
    yield "\n".join(["| Flag | Type | Default | Meaning |", "|---|---|---|---|", *rows]) + "\n"


def _row(setting: Setting, registries: Registries) -> str:
    default = as_shown(setting.default)
    kind = f"{setting.base.__name__}{' ...' if setting.many else ''}"
    shown = "" if default is None else f"`{default}`"
    cells = (f"`{setting.flag}`", kind, shown, _meaning(setting, registries))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _meaning(setting: Setting, registries: Registries) -> str:
    parts = [setting.help.replace("*", "\\*")]
    if setting.registry is not None and setting.registry not in registries:
        parts.append(f"One of the registered {setting.registry.replace('_', ' ')}.")
    elif choices := setting.choices(registries):
        parts.append(f"One of {', '.join(f'`{choice}`' for choice in choices)}.")
    parts += [f"Also `{alias}`." for alias in setting.aliases]
    parts += [f"`{synonym}` is `{as_typed(setting, value)}`." for synonym, value in setting.synonyms.items()]
    return " ".join(parts)
