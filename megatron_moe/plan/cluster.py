"""A cluster in numbers: rates of a device, of its links to node and network, and how much of them is reached."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

_RANGES = {
    "gpus_per_node": (1, 1024),
    "memory_gb": (0.1, 10_000),
    "memory_gb_per_s": (0.1, 1e6),
    "peak_tflops": (1e-5, 1e5),
    "node_gb_per_s": (1e-3, 1e5),
    "node_microseconds": (0.0, 1e6),
    "network_gb_per_s": (1e-3, 1e5),
    "network_microseconds": (0.0, 1e6),
    "efficiency": (0.01, 1.0),
}
_FP8 = "float8"
_NAMES = {
    "peak_tflops": ("bfloat16", "float32", "float64"),
    "efficiency": ("matmul", "attention", "memory", "node", "network"),
}


@dataclass(frozen=True)
class Cluster:
    """Rates are per device and one direction; GB are 1e9 bytes.

    Attributes:
        gpus_per_node: devices that the fast link joins; each has its own share of the network.
        peak_tflops: of matrix products, by type; float8 where the device multiplies it in tiles of 128.
        efficiency: the part that is reached of matrix products, attention, device memory, node link and network.
    """

    name: str
    gpus_per_node: int
    memory_gb: float
    memory_gb_per_s: float
    peak_tflops: dict[str, float]
    node_gb_per_s: float
    node_microseconds: float
    network_gb_per_s: float
    network_microseconds: float
    efficiency: dict[str, float]

    def compute_seconds(self, work: Mapping[str, float], dtype: str) -> dict[str, float]:
        """Seconds of what a device computes, by kind of operation.

        Args:
            work: FLOPs and bytes (``operations.WORK``); products in FP8 take those of ``dtype`` where the cluster has
                no rate of its own for them.
            dtype: of the activations.
        """
        peak, reached = self.peak_tflops[dtype] * 1e12, self.efficiency
        scaled = self.peak_tflops.get(_FP8, self.peak_tflops[dtype]) * 1e12
        return {
            "matrix products": ((work["matmul"] - work["fp8"]) / peak + work["fp8"] / scaled) / reached["matmul"],
            "attention": work["attention"] / (peak * reached["attention"]),
            "other operations": work["touched"] / (self.memory_gb_per_s * 1e9 * reached["memory"]),
        }


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster file.

    Raises:
        ValueError: everything that is missing, unknown or absurd, in full sentences.
    """
    try:
        data = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--cluster {path} cannot be read: {error}") from error
    if not isinstance(data, Mapping):
        raise ValueError(f"--cluster {path} is no list of keys and values; see configs/clusters/.")
    problems = list(_problems(data))
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    return Cluster(name=Path(path).stem, **data)


def _problems(data: Mapping[str, Any]) -> Any:
    known = [f.name for f in fields(Cluster) if f.name != "name"]
    yield from (f"{key} is missing." for key in known if key not in data)
    yield from (f"{key} is unknown; the keys are {', '.join(known)}." for key in data if key not in known)
    for key, (low, high) in _RANGES.items():
        if key not in data:
            continue
        value = data[key]
        optional = {_FP8} if key == "peak_tflops" else set()
        if key in _NAMES and not (isinstance(value, Mapping) and set(_NAMES[key]) == set(value) - optional):
            more = f", if it is there {', '.join(optional)}," * bool(optional)
            yield f"{key} needs a number for each of {', '.join(_NAMES[key])}{more} and no other."
            continue
        numbers = value if isinstance(value, Mapping) else {"": value}
        for name, number in numbers.items():
            where = f"{key} of {name}" if name else key
            whole = key != "gpus_per_node" or isinstance(number, int)
            if isinstance(number, bool) or not isinstance(number, int | float) or not whole:
                yield f"{where} must be a {'whole ' * (not whole)}number, not {number!r}."
            elif not low <= number <= high:
                yield f"{where} is {number:g}, which is absurd; it must be from {low:g} to {high:g}."
