"""Parts of configurations that say where a token looks: rotary embedding, windows of attention."""

import math
from collections.abc import Sequence
from typing import Any

from megatron_moe.config.schema import Config
from megatron_moe.convert.errors import ConversionError
from megatron_moe.convert.fields import Between, Ours, Part, Theirs


def pattern_text(flags: Sequence[bool]) -> str:
    """A pattern of layers as a setting says it: ``[0]*3+[1]*58``, ``[1,0]*12``."""
    for period in range(1, 5):
        repeats = len(flags) // period
        if list(flags) == list(flags[:period]) * repeats:
            return f"[{','.join(str(int(flag)) for flag in flags[:period])}]*{repeats}"
    runs: list[list[int]] = []
    for flag in flags:
        if runs and runs[-1][0] == flag:
            runs[-1][1] += 1
        else:
            runs.append([int(flag), 1])
    return "+".join(f"[{value}]*{count}" for value, count in runs)


_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_SCALED = {
    "linear": {"factor": "rotary_scaling_factor"},
    "llama3": {
        "factor": "rotary_scaling_factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {
        "factor": "rotary_scaling_factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "yarn_correction_range_round_to_int",
    },
}
_OPTIONAL = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def rope(theta: float, percent: float = 1.0) -> Part:
    """Rotary frequencies, in the words of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters).

    Args:
        theta, percent: the family's defaults.
    """

    def read(theirs: Theirs) -> Ours:
        said = _rope_said(theirs)
        kind = said.pop("rope_type", "default")
        ours: Ours = {
            "position_embedding_type": "rope",
            "rotary_base": float(said.pop("rope_theta", theta)),
            "rotary_percent": float(said.pop("partial_rotary_factor", percent)),
        }
        if kind == "default":
            for extra in ("factor", "original_max_position_embeddings"):
                said.pop(extra, None)
        elif kind in _SCALED:
            ours |= {"rope_type": kind} | _scaling(kind, said, theirs)
        else:
            known = ", ".join(("default", *_SCALED))
            raise ConversionError(f"config.json has rope type {kind!r}, which is not supported here ({known} are).")
        if said:
            raise ConversionError(f"config.json says more of the rotary embedding than is known here: {said}.")
        return ours

    def write(config: Config) -> Ours:
        model = config.model
        said: Ours = {"rope_theta": model.rotary_base, "rope_type": "default"}
        scaling: Ours | None = None
        if model.rope_type != "rope":
            values = {t: getattr(model, o) for t, o in _SCALED[model.rope_type].items()}
            if model.rope_type == "yarn" and (model.mscale, model.mscale_all_dim) != (1.0, 0.0):
                values |= {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
            scaling = {"type": model.rope_type, "rope_type": model.rope_type, **values}
            said |= {"rope_type": model.rope_type, **values}
        theirs: Ours = {"rope_theta": model.rotary_base, "rope_scaling": scaling, "rope_parameters": said}
        if percent != 1.0 or model.rotary_percent != 1.0:
            said["partial_rotary_factor"] = theirs["partial_rotary_factor"] = model.rotary_percent
        return theirs

    return Between(_ROPE_KEYS, read, write)


def _rope_said(theirs: Theirs) -> dict[str, Any]:
    """All that is said of the rotary embedding, old words and new, in the new ones."""
    old = {k: theirs[k] for k in ("rope_theta", "partial_rotary_factor") if theirs.get(k) is not None}
    old |= theirs.get("rope_scaling") or {}
    new = dict(theirs.get("rope_parameters") or {})
    for said in (old, new):
        kind = said.pop("type", None)
        if kind is not None:
            said.setdefault("rope_type", kind)
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            raise ConversionError(
                f"config.json says {name} {old[name]!r} and, in rope_parameters, {new[name]!r}; remove the wrong one."
            )
    return {name: value for name, value in (old | new).items() if value is not None}


def _scaling(kind: str, said: dict[str, Any], theirs: Theirs) -> Ours:
    ours: Ours = {}
    said.setdefault("original_max_position_embeddings", theirs.get("max_position_embeddings"))
    for name, setting in _SCALED[kind].items():
        value = said.pop(name, _OPTIONAL.get(name))
        if value is None:
            raise ConversionError(f"config.json has rope type {kind!r} without {name!r}.")
        ours[setting] = value if isinstance(value, bool) or name.startswith("original") else float(value)
    said.pop("original_max_position_embeddings", None)
    if kind == "yarn":
        ours |= _mscale(ours["rotary_scaling_factor"], said)
    return ours


def _mscale(factor: float, said: dict[str, Any]) -> Ours:
    """The factors of cosines and sines, and of the scores: only where both are given do they differ from 1 and 0."""
    rotated, all_dim = said.pop("mscale", None), said.pop("mscale_all_dim", None)
    if all_dim and not rotated:
        raise ConversionError("config.json has mscale_all_dim without mscale, which is not supported here.")
    found = {"mscale": float(rotated), "mscale_all_dim": float(all_dim)} if rotated and all_dim else {}
    attention_factor = said.pop("attention_factor", None)
    if attention_factor is not None:
        strength = 0.1 * math.log(max(factor, 1.0))
        numerator = found.get("mscale", 1.0) * strength + 1
        implied = numerator / (found.get("mscale_all_dim", 0.0) * strength + 1)
        if not math.isclose(attention_factor, implied, rel_tol=1e-6):
            raise ConversionError(
                f"config.json has attention_factor {attention_factor}; only {implied}, which follows from the factor, "
                "is supported here."
            )
    return found


def _window(width: int | None, in_window: Sequence[bool]) -> Ours:
    """A window of theirs counts the token itself, ours those to its left."""
    if width is None or not any(in_window):
        return {"window_size": [], "window_attn_skip_freq": None}
    pattern = None if all(in_window) else pattern_text(in_window)
    return {"window_size": [width - 1, 0], "window_attn_skip_freq": pattern}


def _width(config: Config) -> int | None:
    return config.model.window_size[0] + 1 if config.model.window_size else None


def window_everywhere() -> Part:
    """``sliding_window``, null or for all layers."""

    def read(theirs: Theirs) -> Ours:
        return _window(theirs.get("sliding_window"), [True] * theirs["num_hidden_layers"])

    return Between(("sliding_window",), read, lambda config: {"sliding_window": _width(config)})


def window_by_layer() -> Part:
    """``layer_types`` says which layers attend in the window; without it the even ones do (GPT-OSS)."""

    def read(theirs: Theirs) -> Ours:
        num_layers, types = theirs["num_hidden_layers"], theirs.get("layer_types")
        if types is None:
            types = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
        if set(types) - {"sliding_attention", "full_attention"} or len(types) != num_layers:
            raise ConversionError(f"config.json has layer_types {types}, which {num_layers} layers cannot have here.")
        return _window(theirs.get("sliding_window", 128), [t == "sliding_attention" for t in types])

    def write(config: Config) -> Ours:
        types = ["full_attention" if w is None else "sliding_attention" for w in config.model.windows]
        return {"sliding_window": _width(config), "layer_types": types}

    return Between(("sliding_window", "layer_types"), read, write)


def no_window() -> Part:
    """``sliding_window`` with ``use_sliding_window``, which is refused: versions differ in which layers it means."""

    def read(theirs: Theirs) -> Ours:
        if theirs.get("use_sliding_window") and theirs.get("sliding_window"):
            raise ConversionError("config.json has use_sliding_window true, which is not supported in this family.")
        if any(t != "full_attention" for t in theirs.get("layer_types") or ()):
            raise ConversionError(
                "config.json has layer_types other than full_attention, not supported in this family."
            )
        return {"window_size": []}

    def write(config: Config) -> Ours:
        return {"use_sliding_window": False, "sliding_window": None}

    return Between(("use_sliding_window", "sliding_window", "layer_types", "max_window_layers"), read, write)
