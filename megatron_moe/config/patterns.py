"""Megatron's small languages in configuration values, read without ``eval``."""

import ast
from collections.abc import Callable


def _evaluate(node: ast.expr) -> list[int] | int:
    """Value of an expression made of integers, lists, ``+`` and ``*``."""
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.List(elts=elements):
            values = [_evaluate(element) for element in elements]
            if all(isinstance(value, int) for value in values):
                return values  # type: ignore[return-value]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(a, list) and isinstance(b, list):
                return a + b
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(a, list) and isinstance(b, int):
                return a * b
            if isinstance(a, int) and isinstance(b, list):
                return b * a
    raise ValueError(ast.unparse(node))


def experts_of_layers(text: str, num_moe_layers: int) -> tuple[int, ...]:
    """Experts of each MoE layer, from a list expression such as ``[8]*2+[16]*2``.

    Raises:
        ValueError: the list cannot be read, holds less than one expert, or does not have ``num_moe_layers`` entries.
    """
    flag, example = f'--moe-num-experts-per-layer "{text}"', f'"[8]*{max(num_moe_layers - 1, 1)}+[16]"'
    try:
        counts = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f'{flag} cannot be read at "{error}"; give a list such as {example}.') from None
    if isinstance(counts, int) or len(counts) != num_moe_layers:
        entries = "is no list" if isinstance(counts, int) else f"has {len(counts)} entries"
        raise ValueError(f"{flag} {entries}; it needs one entry for each of the {num_moe_layers} MoE layers.")
    if min(counts, default=1) < 1:
        raise ValueError(
            f"{flag} has a layer of {min(counts)} experts; give at least 1, or make it dense with --moe-layer-freq."
        )
    return tuple(counts)


def moe_layer_pattern(pattern: str | None, num_layers: int, first_dense: int) -> tuple[bool, ...]:
    """For each layer whether it is MoE.

    ``None`` is GShard's interleaving (every second layer, the odd ones); an integer N is Megatron's
    ``i % N == 0``; a list expression such as ``([0]*3+[1]*58)`` names each layer.

    Raises:
        ValueError: the pattern cannot be read, or its length is not ``num_layers``.
    """
    if pattern is None:
        flags = [i % 2 == 1 for i in range(num_layers)]
    else:
        flags = _layer_flags("--moe-layer-freq", pattern, num_layers, lambda i, n: i % n == 0)
    return tuple(is_moe and i >= first_dense for i, is_moe in enumerate(flags))


def window_pattern(pattern: str | None, num_layers: int) -> tuple[bool, ...]:
    """For each layer whether its attention has the window.

    ``None`` is every layer; an integer N is Megatron's: all but every N-th, the first of which is layer N - 1; a list
    expression such as ``[1,0]*12`` names each layer.

    Raises:
        ValueError: the pattern cannot be read, or its length is not ``num_layers``.
    """
    if pattern is None:
        return (True,) * num_layers
    return tuple(_layer_flags("--window-attn-skip-freq", pattern, num_layers, lambda i, n: (i + 1) % n != 0))


def _layer_flags(flag: str, pattern: str, num_layers: int, of_integer: Callable[[int, int], bool]) -> list[bool]:
    """A list expression, or what an integer means for (layer, integer)."""
    try:
        value = _evaluate(ast.parse(pattern.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f'{flag} "{pattern}" cannot be read at "{error}"; give an integer such as 2 or a list such '
            f'as "[0]*3+[1]*{max(num_layers - 3, 1)}".'
        ) from None
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"{flag} {value} must be at least 1.")
        return [of_integer(i, value) for i in range(num_layers)]
    if len(value) != num_layers or not set(value) <= {0, 1}:
        raise ValueError(
            f'{flag} "{pattern}" has {len(value)} entries, values {sorted(set(value))}; it needs one '
            f"entry, 0 or 1, for each of the --num-layers {num_layers}."
        )
    return [bool(v) for v in value]
