"""Strict conversion of what was typed, or read from a file, into the value of a setting.

========== ================================================ =============================
setting     command line                                    YAML
========== ================================================ =============================
int        ``4``                                            ``4``
float      ``4``, ``1e-4``                                  ``4``, ``1.0e-4``, ``1e-4``
bool       ``--x``, ``--no-x``                              ``true``, ``false``
str        any word                                         any scalar, kept as written
optional   ``none`` or ``null`` sets it back to None        also ``null``
tuple      any number of words; ``none`` for no element     a list, or one element alone
========== ================================================ =============================
"""

import math
from collections.abc import Sequence
from typing import Any

from megatron_moe.config.settings import Setting

_NOTHING = ("none", "null")


def from_words(setting: Setting, words: Sequence[str]) -> Any:
    """Value of a setting from the words that follow its flag.

    Raises:
        ValueError: what was expected and what was found, without the name of the setting.
    """
    if len(words) == 1 and _means_nothing(setting, words[0]):
        return () if setting.many else None
    if setting.many:
        return tuple(_from_word(setting, word) for word in words)
    if len(words) != 1:
        found = "none was given" if not words else f"{len(words)} were given: {' '.join(words)}"
        raise ValueError(f"one value is expected and {found}")
    return _from_word(setting, words[0])


def from_value(setting: Setting, value: Any) -> Any:
    """Value of a setting from a plain Python value, as YAML or JSON gives it.

    Raises:
        ValueError: what was expected and what was found, without the name of the setting.
    """
    if _means_nothing(setting, value):
        return () if setting.many else None
    if not setting.many:
        return _from_scalar(setting, value)
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(_from_scalar(setting, item) for item in items)


def describe(value: Any) -> str:
    """A value as an error message shows it: ``text 'abc'``, ``the integer 3``."""
    if value is None:
        return "null"
    kinds = {bool: "the boolean", int: "the integer", float: "the number", str: "text"}
    if type(value) in kinds:
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        return f"{kinds[type(value)]} {shown}"
    return f"a {'list' if isinstance(value, list | tuple) else type(value).__name__}"


def _means_nothing(setting: Setting, value: Any) -> bool:
    """Whether a value sets an optional setting to None, or a list to the empty one."""
    if not (setting.optional or setting.many):
        return False
    if setting.many and setting.registry is not None:
        return value is None  # a registry may offer "none" as a name
    return value is None or (isinstance(value, str) and value.lower() in _NOTHING)


def _from_word(setting: Setting, word: str) -> Any:
    if setting.base is str:
        return word
    try:
        return _finite(setting.base(word))
    except ValueError:
        raise ValueError(f"expected {setting.type_name}, got {word!r}") from None


def _from_scalar(setting: Setting, value: Any) -> Any:
    base = setting.base
    if type(value) is base and base is not float:
        return value
    if base is float and type(value) in (int, float, str):  # YAML 1.1 reads 1e-4, without a dot, as text
        try:
            return _finite(float(value))
        except (ValueError, OverflowError):
            pass  # reported below, with every other wrong type
    hint = "; put it in quotes" if base is str and not isinstance(value, list | tuple | dict) else ""
    raise ValueError(f"expected {setting.type_name}, got {describe(value)}{hint}")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(value)
    return value
