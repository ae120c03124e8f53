"""Choices of names for tests of the configuration: the defaults of the schema and a few more."""

import pytest

from megatron_moe.config.settings import Registries, settings


@pytest.fixture(scope="session")
def registries() -> Registries:
    names: dict[str, list[str]] = {}
    for setting in settings().values():
        if setting.registry is not None:
            default = setting.default if setting.many else (setting.default,)
            names.setdefault(setting.registry, ["first_other", "second_other", "none"]).extend(default)
    return {registry: tuple(choices) for registry, choices in names.items()}
