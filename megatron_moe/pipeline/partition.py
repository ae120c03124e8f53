"""Cuts a model into pipeline stages: by a written layout (Megatron-LM's syntax), or balanced by cost.

::

    Et*3|(tt|)*29,m|L      E embedding      t transformer layer      m multi-token prediction block
                           L final norm, output layer and loss       | ends a stage
                           x*3 repeats a symbol or (a group)         commas and spaces mean nothing

gives 32 stages: the embedding with layers 0 to 2, 29 stages of two layers, the prediction block alone, the
head alone. Where stages live is the business of the schedule (`Schedule.rank_of`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

_FLAG = "--pipeline-model-parallel-layout"
_MAX_SYMBOLS = 100_000  # a typing error in a repetition must not fill the memory


class LayoutError(ValueError):
    """A layout that cannot be read, or a model that cannot be cut as asked."""


@dataclass(frozen=True)
class StageLayout:
    """What one pipeline stage holds. A stage may be empty; it hands on what it receives."""

    layer_ids: tuple[int, ...] = ()
    embedding: bool = False
    head: bool = False
    mtp_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Symbol:
    name: str
    position: int  # in the text, for error messages


def parse_layout(text: str) -> tuple[StageLayout, ...]:
    """Reads a layout; raises LayoutError that points at the character that is wrong.

    There is exactly one E, the first symbol, and exactly one L, the last; m stand after all t and in one
    stage. How many layers and stages there must be is for `layout_problems`.
    """
    symbols = _Parser(text).symbols()
    _check_order(text, [symbol for symbol in symbols if symbol.name != "|"], symbols)
    stages, layer_id, mtp_id = [], 0, 0
    for stage in _split(symbols):
        names = [symbol.name for symbol in stage]
        num_layers, num_mtp = names.count("t"), names.count("m")
        stages.append(
            StageLayout(
                layer_ids=tuple(range(layer_id, layer_id + num_layers)),
                embedding="E" in names,
                head="L" in names,
                mtp_ids=tuple(range(mtp_id, mtp_id + num_mtp)),
            )
        )
        layer_id, mtp_id = layer_id + num_layers, mtp_id + num_mtp
    return tuple(stages)


class _Parser:
    """sequence = item*      item = atom ["*" number]      atom = E | t | m | L | "|" | "(" sequence ")" """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def symbols(self) -> list[_Symbol]:
        symbols = self._sequence()
        if self._peek() == ")":
            raise _error(self.text, self.position, "this parenthesis was never opened")
        return symbols

    def _peek(self) -> str:
        while self.text[self.position : self.position + 1] in (",", " "):
            self.position += 1
        return self.text[self.position : self.position + 1]

    def _sequence(self) -> list[_Symbol]:
        symbols: list[_Symbol] = []
        while self._peek() not in ("", ")"):
            symbols += self._item()
        return symbols

    def _item(self) -> list[_Symbol]:
        start, char = self.position, self.text[self.position]
        self.position += 1
        if char == "(":
            atom = self._sequence()
            if self._peek() != ")":
                raise _error(self.text, start, "this parenthesis is never closed")
            self.position += 1
        elif char in "EtmL|":
            atom = [_Symbol(char, start)]
        elif char == "*":
            raise _error(self.text, start, "there is nothing here to repeat")
        else:
            raise _error(self.text, start, f"'{char}' is not one of E, t, m, L, |, *, ( and )")
        return atom * self._repetitions(len(atom)) if self._peek() == "*" else atom

    def _repetitions(self, length: int) -> int:
        self.position += 1
        self._peek()
        start = self.position
        while self.text[self.position : self.position + 1].isdecimal():
            self.position += 1
        digits = self.text[start : self.position]
        if not digits:
            raise _error(self.text, start, "a number must follow the *")
        if int(digits) * length > _MAX_SYMBOLS:
            raise _error(self.text, start, f"this repeats to more than {_MAX_SYMBOLS} symbols")
        return int(digits)


def _error(text: str, position: int, message: str) -> LayoutError:
    pointer = f"    {text}\n    {' ' * position}^"
    return LayoutError(f"{_FLAG}, character {position + 1}: {message}\n{pointer}")


def _check_order(text: str, symbols: list[_Symbol], with_separators: list[_Symbol]) -> None:
    if not symbols or symbols[0].name != "E":
        position = symbols[0].position if symbols else 0
        raise _error(text, position, "the first symbol must be E, the embedding")
    if symbols[-1].name != "L":
        raise _error(text, symbols[-1].position, "the last symbol must be L, the output layer and loss")
    for name in "EL":
        places = [symbol.position for symbol in symbols if symbol.name == name]
        if len(places) > 1:
            extra = places[1] if name == "E" else places[0]
            raise _error(text, extra, f"there must be exactly one {name}, but there are {len(places)}")
    first_mtp = next((i for i, symbol in enumerate(symbols) if symbol.name == "m"), len(symbols))
    for symbol in symbols[first_mtp:]:
        if symbol.name == "t":
            raise _error(text, symbol.position, "transformer layers must stand before every m")
    stages_with_mtp = [stage for stage in _split(with_separators) if any(s.name == "m" for s in stage)]
    if len(stages_with_mtp) > 1:
        second = next(symbol for symbol in stages_with_mtp[1] if symbol.name == "m")
        raise _error(text, second.position, "all m must be in the same stage")


def _split(symbols: list[_Symbol]) -> list[list[_Symbol]]:
    stages: list[list[_Symbol]] = [[]]
    for symbol in symbols:
        if symbol.name == "|":
            stages.append([])
        else:
            stages[-1].append(symbol)
    return stages


def format_layout(stages: Sequence[StageLayout]) -> str:
    """The inverse of `parse_layout`, with repetitions: `Et*3|(t*2|)*29m|L`."""
    written = [
        "E" * stage.embedding + _repeat("t", len(stage.layer_ids)) + _repeat("m", len(stage.mtp_ids)) + "L" * stage.head
        for stage in stages
    ]
    *before, last = written
    runs = [(stage, len(list(run))) for stage, run in groupby(before)]
    return "".join(f"{stage}|" if count == 1 else f"({stage}|)*{count}" for stage, count in runs) + last


def _repeat(name: str, count: int) -> str:
    return name * count if count < 2 else f"{name}*{count}"


def layout_problems(stages: Sequence[StageLayout], num_layers: int, num_mtp: int, pp: int) -> list[str]:
    """Why these stages do not fit a model of so many layers on pp ranks: full sentences, none if they do."""
    found = []
    laid_out = sum(len(stage.layer_ids) for stage in stages)
    if laid_out != num_layers:
        found.append(f"{_FLAG} has {laid_out} transformer layers (t), but --num-layers is {num_layers}.")
    laid_out = sum(len(stage.mtp_ids) for stage in stages)
    if laid_out != num_mtp:
        found.append(f"{_FLAG} has {laid_out} prediction blocks (m), but --mtp-num-layers is {num_mtp}.")
    if len(stages) % pp:
        found.append(
            f"{_FLAG} has {len(stages)} stages, not a multiple of --pipeline-model-parallel-size {pp}; "
            f"add or remove '|' (a stage may be empty), or choose a size that divides {len(stages)}."
        )
    return found


def balance(
    costs_of_layers: Sequence[float], cost_embedding: float, cost_head: float, num_stages: int
) -> tuple[StageLayout, ...]:
    """The contiguous cut whose most expensive stage is cheapest; among these, the most even one.

    costs_of_layers[i] is what layer i costs (any unit: FLOPs, seconds, bytes), cost_embedding and cost_head
    what the first and the last stage cost on top. The first and the last stage may hold the embedding and
    the head alone; every other stage has at least one layer. Exact, O(num_stages * num_layers^2).

    Raises LayoutError if there are too few layers for so many stages.
    """
    num_layers = len(costs_of_layers)
    if num_stages < 1 or num_layers < num_stages - 2:
        raise LayoutError(
            f"{num_layers} layers cannot be cut into {num_stages} pipeline stages: besides the embedding "
            f"and the head there must be a layer for each; the most is {num_layers + 2} stages "
            f"(--pipeline-model-parallel-size times --num-virtual-stages-per-pipeline-rank)."
        )
    sums = [0.0, *accumulate(costs_of_layers)]

    def cost(stage: int, first: int, end: int) -> float:
        at_the_ends = cost_embedding * (stage == 0) + cost_head * (stage == num_stages - 1)
        return sums[end] - sums[first] + at_the_ends

    # Two passes of one recursion: the smallest possible maximum, then the most even cut under that maximum.
    (smallest_max, _) = _best_cut(num_layers, num_stages, cost, max)
    square = _squares_up_to(smallest_max, cost)
    _, ends = _best_cut(num_layers, num_stages, square, lambda a, b: a + b)
    starts = [0, *ends[:-1]]
    return tuple(
        StageLayout(tuple(range(start, end)), embedding=stage == 0, head=stage == num_stages - 1)
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True))
    )


def _squares_up_to(limit: float, cost: Callable[[int, int, int], float]) -> Callable[[int, int, int], float]:
    def square(stage: int, first: int, end: int) -> float:
        value = cost(stage, first, end)
        return value**2 if value <= limit else float("inf")

    return square


def _best_cut(
    num_layers: int,
    num_stages: int,
    cost: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The least combined cost(stage, first layer, end) over all cuts, and the end of each stage."""
    infinity = float("inf")
    best = [0.0] + [infinity] * num_layers  # best[end] after the stages so far
    choices: list[list[int]] = []
    for stage in range(num_stages):
        fewest = 0 if stage in (0, num_stages - 1) else 1
        row, choice = [infinity] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(num_layers + 1):
            for first in range(end - fewest + 1):
                if best[first] < infinity:
                    value = combine(best[first], cost(stage, first, end))
                    if value < row[end]:
                        row[end], choice[end] = value, first
        best = row
        choices.append(choice)
    ends = [num_layers]
    for choice in reversed(choices[1:]):
        ends.append(choice[ends[-1]])
    return best[num_layers], ends[::-1]
