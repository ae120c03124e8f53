"""What can go wrong in a conversion, told so that the user can mend it."""


class ConversionError(ValueError):
    """A folder, a configuration or a tensor that cannot be converted."""


def listed(what: str, names: list[str], limit: int = 20) -> str:
    """``what: a, b, c and 7 more``, or an empty string for no names."""
    if not names:
        return ""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"{what}: {', '.join(names[:limit])}{more}"
