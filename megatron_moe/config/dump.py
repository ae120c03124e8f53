"""The resolved configuration as a YAML file for ``--config`` that says where each value came from.

::

    model:
      num_layers: 8        # from configs/quickstart.yaml:3
      hidden_size: 256     # default
"""

from collections.abc import Mapping
from typing import Any

import yaml

from megatron_moe.config.schema import Config
from megatron_moe.config.settings import section_title, sections, settings, value_of

_WIDEST_COLUMN = 60  # comments line up unless a value is longer than this


def dump(config: Config, provenance: Mapping[str, str] | None = None) -> str:
    """All values by section. Without a provenance there are no comments."""
    blocks = []
    for section in sections():
        names = [name for name, setting in settings().items() if setting.section == section]
        lines = [f"  {name}: {scalar(value_of(config, name))}" for name in names]
        if provenance is not None:
            width = max((len(line) for line in lines if len(line) <= _WIDEST_COLUMN), default=0)
            lines = [f"{line:{width}}  # {_origin(provenance[name])}" for line, name in zip(lines, names, strict=True)]
        title, description = section_title(section)
        blocks.append("\n".join([f"# {title}: {description}", f"{section}:", *lines]))
    return "\n\n".join(blocks) + "\n"


def scalar(value: Any) -> str:
    """A value as YAML on one line."""
    value = list(value) if isinstance(value, tuple) else value
    options: dict[str, Any] = {"width": float("inf"), "allow_unicode": True, "default_flow_style": True}
    text = _one_document(yaml.safe_dump(value, **options))
    if not text.isprintable():  # line breaks and the like: escapes keep them, and keep them on one line
        text = _one_document(yaml.safe_dump(value, default_style='"', **options))
    return text


def _one_document(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\n...")


def _origin(source: str) -> str:
    return source if source == "default" or source.startswith("implied") else f"from {source}"
