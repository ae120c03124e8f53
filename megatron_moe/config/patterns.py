"""Megatron's small languages in configuration values, read without ``eval``."""

import ast


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
        try:
            value = _evaluate(ast.parse(pattern.strip(), mode="eval").body)
        except (SyntaxError, ValueError) as error:
            raise ValueError(
                f'--moe-layer-freq "{pattern}" cannot be read at "{error}"; give an integer such as 2 or a list such '
                f'as "[0]*3+[1]*{max(num_layers - 3, 1)}".'
            ) from None
        if isinstance(value, int):
            if value < 1:
                raise ValueError(f"--moe-layer-freq {value} must be at least 1.")
            flags = [i % value == 0 for i in range(num_layers)]
        else:
            if len(value) != num_layers or not set(value) <= {0, 1}:
                raise ValueError(
                    f'--moe-layer-freq "{pattern}" has {len(value)} entries, values {sorted(set(value))}; it needs one '
                    f"entry, 0 or 1, for each of the --num-layers {num_layers}."
                )
            flags = [bool(v) for v in value]
    return tuple(is_moe and i >= first_dense for i, is_moe in enumerate(flags))
