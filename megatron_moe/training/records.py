"""Records: what a run reports, one flat dict per logged iteration and one per evaluation.

    {"iteration": 120, "consumed_samples": 1920, "consumed_tokens": 491520, "lm_loss": 4.81,
     "learning_rate": 9e-4, "grad_norm": 0.83, "tokens_per_second": 5200.0, "step_seconds": 0.79, "mfu": 0.31,
     "aux_loss": 1.02, "dropped_share": 0.0, "expert_load": {"layer 1": [0.12, 0.13, ...], "layer 3": [...]},
     "moe_layers": {"layer 1": {"aux_loss": 1.01, "load_max_over_mean": 1.2, "dispatch_bytes": 8388608, ...}, ...}}
    {"iteration": 120, "evaluation": true, "valid_loss": 4.90, "valid_ppl": 134.4}

Loss in nats per token. `expert_load` is each expert's share of the copies that its layer's router made; `moe_layers`
has what the record says of all layers for each of them, and the bytes that all ranks sent in the forward pass to bring
tokens to experts and back. A module of multi-token prediction is a further layer there, numbered after the model's:
`layer 4` of a model of four layers, counted from 0. `mtp_1_loss` and so on are the losses of these modules, before
their weight: sums over the tokens that have a target that far ahead, over the tokens of `lm_loss`. Numbers of a
balance loss are before its coefficient.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read_records(path: str | Path) -> list[Record]:
    """The records of a metrics.jsonl. A last line cut off by a crash is left out.

    Raises ValueError, naming file and line, for any other line that is not a JSON object with an iteration.
    """
    lines = Path(path).read_bytes().split(b"\n")
    # What follows the last newline is empty, or a record whose writing was interrupted.
    return [_parse(line, path, number) for number, line in enumerate(lines[:-1], 1) if line.strip()]


def _parse(line: bytes, path: str | Path, number: int) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{path}, line {number}: not JSON ({error}). Remove the line, or move the file away."
        ) from None
    if not isinstance(record, dict) or "iteration" not in record:
        raise ValueError(f"{path}, line {number}: not a record of a run, for it names no iteration.")
    return record


def max_over_mean(loads: Sequence[float]) -> float:
    """Busiest expert over the mean: 1 is perfect balance, also said where no expert had a token."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
