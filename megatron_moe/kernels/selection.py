"""Which implementation every operation uses: the one place that decides, and says why.

    --kernels auto | torch | triton | transformer-engine | apex
       + device, type of the numbers, what is installed   -->   Kernels: operation -> implementation, and the reason

An operation that the library asked for does not have falls back to the next, which the line at the start of a run
shows. A library asked for by name and not usable is an error that says how to get it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

LIBRARIES = ("triton", "transformer-engine", "apex")

# operation -> implementations besides PyTorch's, best first
OPERATIONS: dict[str, tuple[str, ...]] = {
    "scoring": ("triton",),
    "permutation": ("triton",),
    "swiglu": ("triton",),
    "cross_entropy": ("triton",),
    "norm": ("transformer-engine", "apex"),
    "adam": ("apex",),
}

# Types that a library's kernels take; Triton's here take all.
_FLOAT64 = frozenset({"triton"})


@dataclass(frozen=True)
class Kernels:
    """What :func:`choose` found.

    Attributes:
        chosen: implementation of each operation.
        reasons: why not the one that was asked for, or that would be best, by operation; none where it is.
    """

    chosen: Mapping[str, str]
    reasons: Mapping[str, str]

    def __getitem__(self, operation: str) -> str:
        return self.chosen[operation]

    def line(self) -> str:
        """One line for the start of a run: ``kernels: triton for scoring, swiglu; torch for norm (no GPU)``."""
        groups: dict[tuple[str, str], list[str]] = {}
        for operation, name in self.chosen.items():
            groups.setdefault((name, self.reasons.get(operation, "")), []).append(operation)
        parts = [
            f"{name} for {', '.join(operations)}" + f" ({reason})" * bool(reason)
            for (name, reason), operations in groups.items()
        ]
        return f"kernels: {'; '.join(parts)}"


def choose(requested: str, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The implementations of a run.

    Args:
        requested: value of ``--kernels``.
        dtype: of the activations.

    Raises:
        ValueError: the library asked for cannot be used here; says how to get it.
    """
    if device.type == "meta":  # a dry run computes nothing
        return _choose("torch", "cpu", dtype)
    return _choose(requested, device.type, dtype)


@cache
def _choose(requested: str, device: str, dtype: torch.dtype) -> Kernels:
    if requested in LIBRARIES:
        problem = missing(requested, device)
        if problem is not None:
            raise ValueError(f"--kernels {requested}: {problem}")
    chosen, reasons = {}, {}
    for operation, names in OPERATIONS.items():
        name, reason = _implementation(requested, names, device, dtype)
        chosen[operation] = name
        if reason:
            reasons[operation] = reason
    return Kernels(chosen, reasons)


def _implementation(requested: str, names: tuple[str, ...], device: str, dtype: torch.dtype) -> tuple[str, str]:
    """(implementation, why not what was asked for) of an operation that has these besides PyTorch's."""
    if requested == "torch":
        return "torch", ""
    if requested == "auto" and device != "cuda":
        return "torch", f"best on {device}"
    problems = []
    if requested in LIBRARIES and requested not in names:
        problems.append(f"{requested} has none")
    for name in sorted(names, key=lambda name: name != requested):
        problem = missing(name, device) if name != requested else None
        if problem is not None:
            problems.append(f"{name} is not usable")
        elif dtype == torch.float64 and name not in _FLOAT64:
            problems.append(f"{name} has no float64")
        else:
            return name, "; ".join(problems)
    return "torch", "; ".join(problems)


def missing(library: str, device: str) -> str | None:
    """Why a library cannot be used on a device, and what to do about it; None where it can."""
    return _PROBLEMS[library](device)


def _triton_problem(device: str) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed; pip install 'megatron-moe[triton]', or use --kernels torch."
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"Triton has no code for the device {device}; run on a GPU, set TRITON_INTERPRET=1 to interpret its "
            "kernels slowly for a test, or use --kernels torch."
        )
    return None


def _transformer_engine_problem(device: str) -> str | None:
    if find_spec("transformer_engine") is None:
        return (
            "Transformer Engine is not installed; pip install --no-build-isolation "
            "'megatron-moe[transformer-engine]' with CUDA's compilers at hand, or use --kernels auto."
        )
    return _needs_gpu("Transformer Engine", device)


def _apex_problem(device: str) -> str | None:
    spec = find_spec("apex")
    build = (
        "build NVIDIA's from https://github.com/NVIDIA/apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install "
        "--no-build-isolation . (it is not on PyPI), or use --kernels auto."
    )
    if spec is None:
        return f"Apex is not installed; {build}"
    if not any((Path(folder) / "multi_tensor_apply").is_dir() for folder in spec.submodule_search_locations or ()):
        return (
            "the installed package apex is not NVIDIA's; the one on PyPI is a toolkit for the web framework Pyramid. "
            f"pip uninstall apex, then {build}"
        )
    if find_spec("amp_C") is None or find_spec("fused_layer_norm_cuda") is None:
        return f"NVIDIA Apex is installed without its CUDA extensions; {build}"
    return _needs_gpu("NVIDIA Apex", device)


def _needs_gpu(library: str, device: str) -> str | None:
    return None if device == "cuda" else f"{library} runs on GPUs only, and this is {device}; use --kernels auto."


_PROBLEMS = {
    "triton": _triton_problem,
    "transformer-engine": _transformer_engine_problem,
    "apex": _apex_problem,
}


@dataclass(frozen=True)
class Fp8Kernels:
    """How products in FP8 are computed.

    Attributes:
        product: ``scaled_mm``, on the device's units for FP8, or ``torch``, the same products without them.
        quantisation: what rounds and finds scales: ``triton`` in one pass, or ``torch``.
        reason: why the products are not on such units.
    """

    product: str
    quantisation: str = "torch"
    reason: str = ""

    def line(self, fp8_format: str, fp8_recipe: str) -> str:
        """One line for the start of a run: ``fp8: e4m3, blockwise, on FP8 units by scaled_mm, tiles by triton``."""
        how = f"on FP8 units by {self.product}"
        if self.product == "torch":
            how = f"emulated, with FP8's rounding and without its speed ({self.reason})"
        return f"fp8: {fp8_format}, {fp8_recipe}, {how}, tiles by {self.quantisation}"


def choose_fp8(requested: str, fp8_format: str, device: torch.device, dtype: torch.dtype) -> Fp8Kernels:
    """What multiplies FP8 here: PyTorch's scaled product with tiles of 128, which is there for E4M3 on Hopper GPUs.

    Args:
        requested: value of ``--kernels``, for the rounding.
        fp8_format: value of ``--fp8-format``.
        dtype: of the activations.
    """
    reason, quantisation = _no_fp8_units(fp8_format, device, dtype), "torch"
    if device.type == "cuda" and not reason:  # which have the instruction for the rounding, too
        quantisation, _ = _implementation(requested, ("triton",), device.type, dtype)
    return Fp8Kernels("torch" if reason else "scaled_mm", quantisation, reason)


@cache
def _no_fp8_units(fp8_format: str, device: torch.device, dtype: torch.dtype) -> str:
    if device.type not in ("cuda", "meta"):
        return f"{device.type} has no FP8 units"
    if dtype != torch.bfloat16:
        return "FP8 units give bfloat16; use --bf16"
    if fp8_format != "e4m3":  # check_deepseek_recipe in PyTorch's ScaledBlas
        return "PyTorch's scaled products with tiles of 128 take E4M3 alone; use --fp8-format e4m3"
    if device.type == "meta":  # a dry run is for a machine that has them
        return ""
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"PyTorch {torch.__version__} has no torch.nn.functional.scaled_mm"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "PyTorch has scaled products with tiles of 128 on Hopper GPUs only"
    if tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2])) < (12, 9):
        return f"needs PyTorch for CUDA 12.9 or later, and this one is for {torch.version.cuda}"
    return ""


def functions(operation: str, kernels: str) -> ModuleType:
    """The module with an operation's functions: PyTorch's, or the one beside it whose name ends in the library."""
    suffix = "" if kernels == "torch" else "_" + kernels.replace("-", "_")
    return import_module(f"megatron_moe.kernels.{operation}{suffix}")
