"""One dataclass field = one flag = one YAML key: how a field says its documentation, choices and synonyms."""

from dataclasses import field
from typing import Any


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    registry: str | None = None,
    synonyms: dict[str, Any] | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """Declare a configuration field.

    Args:
        default: value where nobody sets it.
        help: the only place where the field is documented; shown by ``--help`` and in ``docs/flags.md``.
        choices: closed list of admitted strings.
        registry: name of a registry whose keys are the choices; the top floor supplies them, so that
            configuration imports nothing.
        synonyms: other spellings that set a fixed value, e.g. ``{"--swiglu": "swiglu"}``.
        aliases: other names of the flag and the key, which take the same values.
    """
    metadata = {"help": help, "choices": choices, "registry": registry}
    return field(default=default, metadata={**metadata, "synonyms": synonyms or {}, "aliases": aliases})
