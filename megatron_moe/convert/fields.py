"""A family's configuration as parts that are read in both directions: keys of config.json <-> settings of ours.

    Key("rms_norm_eps", "norm_epsilon", default=1e-6)      one for one
    Fixed("hidden_act", "silu")                            theirs must say so; nothing of ours depends on it
    Implied("activation", "swiglu")                        ours follows from the family

Keys that are in no part and not neutral are refused: an unknown key may change the function. What ours cannot say in
theirs is found by reading back what was written (:mod:`megatron_moe.convert.configuration`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_moe.config.schema import Config
from megatron_moe.config.settings import value_of
from megatron_moe.convert.errors import ConversionError

Theirs = Mapping[str, Any]
Ours = dict[str, Any]


class Part(Protocol):
    """Some keys of theirs and the settings of ours that say the same."""

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys of config.json that it knows."""
        ...

    def read(self, theirs: Theirs) -> Ours:
        """Settings by name. Raises ConversionError for what we cannot express."""
        ...

    def write(self, config: Config) -> Ours:
        """Keys of config.json, old and new."""
        ...


REQUIRED: Any = object()


def value_in(theirs: Theirs, names: tuple[str, ...], default: Any = REQUIRED) -> Any:
    """The value of the first key that is there.

    Raises:
        ConversionError: two synonyms disagree, or no key is there and there is no default.
    """
    found = {name: theirs[name] for name in names if name in theirs}
    if len({repr(value) for value in found.values()}) > 1:
        raise ConversionError(f"config.json says {found}, which are names of one thing; remove the wrong one.")
    if found:
        return next(iter(found.values()))
    if default is REQUIRED:
        raise ConversionError(f"config.json has no {names[0]!r}.")
    return default


@dataclass(frozen=True)
class Key:
    """One key for one setting.

    Attributes:
        names: of theirs, all of them written; older and newer versions of transformers read different ones.
        setting: of ours.
        default: what transformers takes where the key is missing.
        to_ours, to_theirs: where the values differ.
    """

    names: tuple[str, ...]
    setting: str
    default: Any = REQUIRED
    to_ours: Callable[[Any], Any] = lambda value: value
    to_theirs: Callable[[Any], Any] = lambda value: value

    @property
    def keys(self) -> tuple[str, ...]:
        return self.names

    def read(self, theirs: Theirs) -> Ours:
        return {self.setting: self.to_ours(value_in(theirs, self.names, self.default))}

    def write(self, config: Config) -> Ours:
        return dict.fromkeys(self.names, self.to_theirs(value_of(config, self.setting)))


def key(names: str, setting: str, default: Any = REQUIRED) -> Key:
    """A key by names that are separated by spaces."""
    return Key(tuple(names.split()), setting, default)


def negated(name: str, setting: str, default: bool) -> Key:
    """A switch that ours has the other way round."""
    return Key((name,), setting, default, lambda value: not value, lambda value: not value)


@dataclass(frozen=True)
class Fixed:
    """A key of theirs that has only one value which we can express; ``also`` are others that mean the same."""

    name: str
    value: Any
    also: tuple[Any, ...] = ()
    written: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, theirs: Theirs) -> Ours:
        found = theirs.get(self.name, self.value)
        if found != self.value and found not in self.also:
            raise ConversionError(
                f"config.json has {self.name} {found!r}, which changes what the model computes and is not supported: "
                f"only {self.value!r} is."
            )
        return {}

    def write(self, config: Config) -> Ours:
        return {self.name: self.value} if self.written else {}


@dataclass(frozen=True)
class Implied:
    """A setting of ours that every model of the family has; reading back tells where a model of ours has not."""

    setting: str
    value: Any

    @property
    def keys(self) -> tuple[str, ...]:
        return ()

    def read(self, theirs: Theirs) -> Ours:
        return {self.setting: self.value}

    def write(self, config: Config) -> Ours:
        return {}


@dataclass(frozen=True)
class Between:
    """A few keys and settings that only make sense together; read and write are functions."""

    names: tuple[str, ...]
    reader: Callable[[Theirs], Ours]
    writer: Callable[[Config], Ours]

    @property
    def keys(self) -> tuple[str, ...]:
        return self.names

    def read(self, theirs: Theirs) -> Ours:
        return self.reader(theirs)

    def write(self, config: Config) -> Ours:
        return self.writer(config)
