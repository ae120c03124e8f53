"""FP8 products: rounding against the formats' definitions, scales and bounds by hand, the call of FP8 units."""

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_moe.kernels import quantisation_triton, scaled, selection
from megatron_moe.kernels.grouped import Groups, PlainGroupedProduct, grouped_product
from megatron_moe.kernels.quantisation import (
    E4M3,
    E5M2,
    Quantised,
    dequantise_blocks,
    dequantise_rows,
    quantise_blocks,
    quantise_rows,
)
from megatron_moe.kernels.scaled import FORMATS, ScaledGroupedProduct, ScaledProduct
from megatron_moe.kernels.selection import Fp8Kernels, choose_fp8
from tests.helpers.building import normal

FORMS = [E4M3, E5M2]
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
BLOCK = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(form: torch.dtype) -> list[float]:
    """All finite numbers of a format that are not negative, in order, from its bits (arXiv:2209.05433, table 1)."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if form == E4M3 else (5, 2, 15)
    made = []
    for exponent, mantissa in itertools.product(range(2**exponent_bits), range(2**mantissa_bits)):
        fraction = mantissa / 2**mantissa_bits
        made.append(math.ldexp(fraction, 1 - bias) if exponent == 0 else math.ldexp(1 + fraction, exponent - bias))
    return [number for number in made if number <= LARGEST[form]]


def rounded(value: float, form: torch.dtype) -> float:
    """The nearest number; of two, the one with an even mantissa, whose place in the order is even."""
    order = numbers(form)
    place = min(range(len(order)), key=lambda i: (abs(order[i] - abs(value)), i % 2))
    return math.copysign(order[place], value)


def scale_of(tile: list[float], form: torch.dtype) -> float:
    """The smallest power of two that brings a tile into the format, by trial."""
    exponent = -126
    while max(map(abs, tile)) / 2.0**exponent > LARGEST[form]:
        exponent += 1
    return 2.0**exponent


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_every_number_against_the_definition_of_the_format(form: torch.dtype, dtype: torch.dtype) -> None:
    rows = normal(1, 5, 10, dtype=dtype) * torch.tensor([1e-3, 1.0, 40.0, 1e5, 0.0], dtype=dtype).unsqueeze(1)
    rows[1, 1], rows[2, 3], rows[2, 4:7] = LARGEST[form], rows[2].abs().max() * 1e-4, 0.0  # exact, and below its unit
    found = quantise_rows(rows, form, BLOCK)
    assert found.values.shape == rows.shape and found.scales.shape == (5, 3)
    for row in range(5):
        for start in range(0, 10, BLOCK):
            tile = rows[row, start : start + BLOCK].tolist()
            scale = found.scales[row, start // BLOCK].item()
            assert scale == scale_of(tile, form) if any(tile) else scale > 0
            expected = [rounded(value / scale, form) for value in tile]
            assert found.values[row, start : start + BLOCK].double().tolist() == expected
            assert max(map(abs, expected)) in (0, *[n for n in numbers(form) if n > LARGEST[form] / 2 * 0.99])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_blocks_of_a_weight_are_rows_that_share_a_scale(form: torch.dtype) -> None:
    weight = normal(2, 2, 6, 10) * torch.logspace(-3, 3, 10, dtype=torch.float64)
    found = quantise_blocks(weight, form, BLOCK)
    assert found.scales.shape == (2, 2, 3)
    for expert, i, j in itertools.product(range(2), range(2), range(3)):
        box = expert, slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        block = weight[box].flatten().tolist()
        scale = scale_of(block, form)
        assert found.scales[expert, i, j] == scale
        assert found.values[box].double().flatten().tolist() == [rounded(value / scale, form) for value in block]


def test_what_a_rank_holds_does_not_change_a_tile() -> None:
    x, weight = normal(3, 6, 12), normal(4, 8, 12)
    rows, blocks = quantise_rows(x, E4M3, BLOCK), quantise_blocks(weight, E4M3, BLOCK)
    some = quantise_rows(x[2:5, 4:], E4M3, BLOCK)
    assert torch.equal(some.values.double(), rows.values[2:5, 4:].double())
    assert torch.equal(some.scales, rows.scales[2:5, 1:])
    slices = quantise_blocks(weight[4:, :8], E4M3, BLOCK)
    assert torch.equal(slices.values.double(), blocks.values[4:, :8].double())
    transposed = quantise_blocks(weight.T, E4M3, BLOCK)
    assert torch.equal(transposed.values.double(), blocks.values.T.double())
    assert torch.equal(transposed.scales, blocks.scales.T)


def test_the_error_of_a_product_is_that_of_rounding() -> None:
    """Each factor is off by half a unit of 2^-3, relative, or by half the smallest number, of its tile's scale."""
    x, weight = normal(5, 7, 320), normal(6, 200, 320)
    rows, blocks = quantise_rows(x, E4M3), quantise_blocks(weight, E4M3)
    found, exact = scaled.reference_product(rows, blocks, torch.float64), x @ weight.T

    def bound(values: Tensor, spread: Tensor) -> Tensor:
        return torch.maximum(values.abs() * 2.0**-4, spread * 2.0**-10)

    near_x = bound(x, rows.scales.double().repeat_interleave(128, 1)[:, :320])
    spread = blocks.scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :320]
    near_w = bound(weight, spread)
    assert ((found - exact).abs() <= near_x @ weight.abs().T + x.abs() @ near_w.T + near_x @ near_w.T).all()
    assert 0.01 < (found - exact).std() / exact.std() < 0.05


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x = normal(7, 2, 8)
    x[0, 1] = value
    product = scaled.reference_product(quantise_rows(x, E4M3), quantise_blocks(normal(8, 3, 8), E4M3), torch.float64)
    assert product[0].isnan().all() and product[1].isfinite().all()


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("keeps_quantised", [True, False])
def test_a_linear_multiplies_forward_and_back(name: str, keeps_quantised: bool) -> None:
    form, gradient_form = FORMATS[name]
    product = ScaledProduct(form, gradient_form, Fp8Kernels("torch"), keeps_quantised)
    x, weight, grad = normal(9, 2, 3, 8), normal(10, 5, 8), normal(11, 2, 3, 5)
    rows = dequantise_rows(quantise_rows(x, form), torch.float64)
    matrix = dequantise_blocks(quantise_blocks(weight, form), torch.float64)
    back = dequantise_rows(quantise_rows(grad, gradient_form), torch.float64)
    found, kept = product.forward(x, weight)
    torch.testing.assert_close(found, rows @ matrix.T)
    torch.testing.assert_close(product.input_gradient(grad, weight), back @ matrix)
    assert torch.equal(product.rows(kept, torch.float64), rows if keeps_quantised else x)
    assert sum(t.nbytes for t in kept) == (x.numel() + 4 * 6 if keeps_quantised else 8 * x.numel())


def checked_scaled_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    scale_a: Tensor,
    scale_recipe_a: Any,
    scale_b: Tensor,
    scale_recipe_b: Any,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Any = (),
    use_fast_accum: bool = False,
) -> Tensor:
    """Stands in for PyTorch's: asks what its ScaledBlas.cpp and cuBLASLt ask of tiles of 128, and multiplies."""
    (m, k), n = mat_a.shape, mat_b.shape[1]
    assert (scale_recipe_a, scale_recipe_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    assert mat_a.stride() == (k, 1) and mat_b.stride() == (1, k) and mat_b.shape[0] == k
    assert m % 4 == 0 and k % 16 == 0 and n % 16 == 0 and mat_a.dtype == mat_b.dtype == E4M3
    tiles, up = math.ceil(k / 128), math.ceil(k / 512) * 4
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert scale_a.shape == (m, tiles) and scale_a.stride(0) == 1 and (scale_a.stride(1) == m or tiles == 1)
    assert scale_b.shape == (up, math.ceil(n / 128)) and scale_b.stride(0) == 1
    assert scale_b.stride(1) == up or scale_b.shape[1] == 1
    rows, weight = Quantised(mat_a, scale_a), Quantised(mat_b.T, scale_b[:tiles].T)
    assert output_dtype is not None
    return scaled.reference_product(rows, weight, output_dtype)


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """Numbers for FP8 units: those of a Hopper GPU where there is one, else the stand-in's."""
    device = torch.device(DEVICE)
    if device.type == "cuda" and not choose_fp8("auto", "e4m3", device, torch.bfloat16).reason:
        return lambda seed, *shape: normal(seed, *shape, dtype=torch.bfloat16).to(device)
    assert list(inspect.signature(F.scaled_mm).parameters) == list(inspect.signature(checked_scaled_mm).parameters)
    monkeypatch.setattr(F, "scaled_mm", checked_scaled_mm)
    return normal


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-12 if found.dtype == torch.float64 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("shape", [(2, 3, 320, 200), (1, 4, 128, 256), (1, 1, 640, 16)], ids=str)
def test_units_get_what_they_ask_for(units: Callable[..., Tensor], shape: tuple[int, int, int, int]) -> None:
    *lengths, width, out = shape
    x, weight, grad = units(12, *lengths, width), units(13, out, width), units(14, *lengths, out)
    reference, hardware = (ScaledProduct(E4M3, E4M3, Fp8Kernels(name)) for name in ("torch", "scaled_mm"))
    close(hardware.forward(x, weight)[0], reference.forward(x, weight)[0])
    close(hardware.input_gradient(grad, weight), reference.input_gradient(grad, weight))


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0]], ids=str)
def test_experts(units: Callable[..., Tensor], counts: list[int]) -> None:
    groups, num = Groups(torch.tensor(counts), torch.device("cpu")), sum(counts)
    rows_RI, weight_LOI, grad_RO = units(15, num, 140), units(16, 3, 40, 140), units(17, num, 40)
    dtype, plain = rows_RI.dtype, PlainGroupedProduct("loop")
    rows = dequantise_rows(quantise_rows(rows_RI, E4M3), dtype)
    weight = dequantise_blocks(quantise_blocks(weight_LOI, E4M3), dtype)
    back = dequantise_rows(quantise_rows(grad_RO, E4M3), dtype)
    for implementation in ("torch", "scaled_mm"):
        product = ScaledGroupedProduct(ScaledProduct(E4M3, E4M3, Fp8Kernels(implementation)), "loop")
        found, kept = product.forward(rows_RI, weight_LOI, groups)
        assert found.shape == (num, 40) and torch.equal(product.rows(kept, dtype), rows)
        found_back = product.input_gradient(grad_RO, weight_LOI, groups)
        if num:
            close(found, grouped_product(rows, weight, groups, "loop"))
            close(found_back, plain.input_gradient(back, weight, groups))


def test_the_units_are_chosen_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, here = torch.device("cuda"), choose_fp8("torch", "e4m3", torch.device("cpu"), torch.bfloat16)
    assert here.line("e4m3", "blockwise") == (
        "fp8: e4m3, blockwise, emulated, with FP8's rounding and without its speed (cpu has no FP8 units), "
        "tiles by torch"
    )
    assert choose_fp8("triton", "e4m3", torch.device("cpu"), torch.float64) == here

    def on_gpu(cuda: str, capability: int, dtype: torch.dtype = torch.bfloat16, form: str = "e4m3") -> Fp8Kernels:
        selection._no_fp8_units.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        return choose_fp8("auto", form, gpu, dtype)

    assert on_gpu("12.10", 9).line("e4m3", "blockwise") == (
        "fp8: e4m3, blockwise, on FP8 units by scaled_mm, tiles by triton"
    )
    assert "take E4M3 alone" in on_gpu("12.10", 9, form="hybrid").reason
    assert "give bfloat16" in on_gpu("12.10", 9, torch.float32).reason
    assert on_gpu("12.8", 9).reason == "needs PyTorch for CUDA 12.9 or later, and this one is for 12.8"
    assert on_gpu("13.0", 10) == Fp8Kernels(
        "torch", "torch", "PyTorch has scaled products with tiles of 128 on Hopper GPUs only"
    )
    selection._no_fp8_units.cache_clear()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_triton(form: torch.dtype, dtype: torch.dtype) -> None:
    rows = normal(18, 3, 5, 1200, dtype=dtype) * torch.logspace(-8, 8, 5).to(dtype).unsqueeze(1)
    rows[0, 0, 0], rows[0, 1, 128:256] = math.inf, LARGEST[form] / 4  # the largest number itself: a scale of 1/4
    weight = normal(19, 2, 130, 300, dtype=dtype)
    weight[1, 129, 0] = math.nan
    assert quantise_rows(rows, form).scales[0, 1, 1] == 0.25
    for found, expected in (
        (quantisation_triton.quantise_rows(rows.to(DEVICE), form), quantise_rows(rows, form)),
        (quantisation_triton.quantise_blocks(weight.to(DEVICE), form), quantise_blocks(weight, form)),
    ):
        scales = found.scales.cpu()
        assert torch.equal(scales.nan_to_num(), expected.scales.nan_to_num())
        assert torch.equal(scales.isnan(), expected.scales.isnan()) and scales.isnan().sum() == 1
        values, theirs = found.values.cpu().float(), expected.values.float()
        tile = dequantise_rows if found.values.shape == rows.shape else dequantise_blocks
        no_number = tile(expected, torch.float32).isnan()
        assert torch.equal(values.where(~no_number, 0), theirs.where(~no_number, 0))
