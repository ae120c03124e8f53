"""Training, validation and test splits as ranges of documents.

--split 969,30,1 over 10,000 documents:   train 0..9690   valid 9690..9990   test 9990..10000
"""

import math
from fractions import Fraction

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(text: str) -> tuple[Fraction, Fraction, Fraction]:
    """Reads ``"969,30,1"`` into three exact fractions that sum to 1; missing trailing weights are 0.

    Raises ValueError when there are not one to three finite numbers >= 0 with a positive sum.
    """
    example = "Give up to three weights for train, valid and test, such as 969,30,1."
    parts = [part.strip() for part in text.split(",")]
    if not 1 <= len(parts) <= 3:
        raise ValueError(f"--split {text!r} has {len(parts)} weights. {example}")
    weights = []
    for name, part in zip(SPLIT_NAMES, parts, strict=False):
        try:
            finite = math.isfinite(float(part))
        except ValueError:
            finite = False
        if not finite or "_" in part or float(part) < 0:
            raise ValueError(f"--split {text!r}: the {name} weight {part!r} is not a number >= 0. {example}")
        weights.append(Fraction(part))
    weights += [Fraction(0)] * (3 - len(weights))
    if sum(weights) == 0:
        raise ValueError(f"--split {text!r}: all weights are 0. {example}")
    total = sum(weights)
    return weights[0] / total, weights[1] / total, weights[2] / total


def document_ranges(fractions: tuple[Fraction, Fraction, Fraction], num_documents: int) -> tuple[range, range, range]:
    """Cuts ``num_documents`` documents into consecutive ranges, one per split; every document is in one.

    Borders are rounded to the nearest document with exact arithmetic, so they are the same everywhere.
    """
    borders = [0]
    for fraction in fractions:
        borders.append(borders[-1] if fraction == 0 else round(sum(fractions[: len(borders)]) * num_documents))
    return range(borders[0], borders[1]), range(borders[1], borders[2]), range(borders[2], borders[3])
