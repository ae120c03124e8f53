"""Grouped products against one einsum over a one-hot of the experts."""

import sys
import types

import pytest
import torch

from megatron_moe.kernels.grouped import (
    Groups,
    add_grouped_outer_product,
    choose_backend,
    grouped_product,
    grouped_product_transposed,
)
from tests.helpers.building import normal

NUM, OUT, IN = 4, 8, 12  # experts, outputs, inputs
COUNTS = {
    "all": [3, 1, 2, 5],
    "empty first": [0, 4, 1, 2],
    "empty last": [2, 3, 1, 0],
    "one": [0, 0, 7, 0],
    "none": [0, 0, 0, 0],
}


def general_grouped_gemm(
    A,
    B,
    out,
    quantization_params,
    out_dtype,
    layout="TN",
    m_splits=None,
    gelu=False,
    grad=False,
    accumulate=False,
    bias=None,
    use_bias=False,
    use_split_accumulator=False,
    D_dtype=None,
    single_output=False,
):
    """Stands in for Transformer Engine 2.20.2's, whose parameters these are; matrices as its C++ reads them."""
    assert len(A) == len(B) == len(quantization_params) > 0 and not (gelu or use_bias or any(quantization_params))
    assert all(t.is_contiguous() for t in (*A, *B, *out))
    products = [(b.T if layout[1] == "T" else b) @ (a.T if layout[0] == "T" else a) for a, b in zip(A, B, strict=True)]
    assert len(out) == (1 if single_output else len(A))
    into = out[0].split(m_splits) if single_output else out
    for place, product in zip(into, products, strict=True):
        place.copy_(place + product if accumulate else product)
    return out, [], []


@pytest.fixture
def transformer_engine(monkeypatch):
    module = types.ModuleType("transformer_engine.pytorch.cpp_extensions")
    module.general_grouped_gemm = general_grouped_gemm  # type: ignore[attr-defined]
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield
    sys.modules.pop("megatron_moe.kernels.grouped_transformer_engine", None)


@pytest.mark.parametrize("counts", list(COUNTS.values()), ids=list(COUNTS))
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("loop", torch.float64),
        ("loop", torch.float32),
        ("grouped_mm", torch.float32),
        ("transformer-engine", torch.float32),
    ],
    ids=str,
)
def test_against_einsum(backend, dtype, counts, transformer_engine):
    num_rows, counts_L = sum(counts), torch.tensor(counts)
    groups = Groups(counts_L, torch.device("cpu"))
    rows_RI, grad_RO = normal(1, num_rows, IN, dtype=dtype), normal(2, num_rows, OUT, dtype=dtype)
    weight_LOI = normal(3, NUM, OUT, IN, dtype=dtype)
    expert_R = torch.repeat_interleave(torch.arange(NUM), counts_L)
    of_RL = torch.nn.functional.one_hot(expert_R, NUM).to(dtype)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}

    for found, expected in (
        (
            grouped_product(rows_RI, weight_LOI, groups, backend),
            torch.einsum("ri,loi,rl->ro", rows_RI, weight_LOI, of_RL),
        ),
        (
            grouped_product_transposed(grad_RO, weight_LOI, groups, backend),
            torch.einsum("ro,loi,rl->ri", grad_RO, weight_LOI, of_RL),
        ),
        (
            outer_product(grad_RO, rows_RI, groups, backend),
            torch.einsum("ro,ri,rl->loi", grad_RO, rows_RI, of_RL),
        ),
    ):
        torch.testing.assert_close(found, expected, **tolerance)


def outer_product(*arguments):
    """Written over garbage, and then half of it added once more to its other half."""
    out_LOI = torch.full((NUM, OUT, IN), float("nan"), dtype=arguments[0].dtype)
    add_grouped_outer_product(out_LOI, *arguments, beta=0.0)
    out_LOI *= 0.5
    halved = arguments[0] * 0.5, *arguments[1:]
    add_grouped_outer_product(out_LOI, *halved, beta=1.0)
    return out_LOI


def test_outer_product_in_another_precision():
    """Gradients of a lower precision are accumulated in the buffer's."""
    groups = Groups(torch.tensor([3, 0, 2] + [0] * (NUM - 3)), torch.device("cpu"))
    rows_RI, grad_RO = normal(1, 5, IN, dtype=torch.float32), normal(2, 5, OUT, dtype=torch.float32)
    wide, narrow = torch.full((2, NUM, OUT, IN), float("nan"), dtype=torch.float64)
    add_grouped_outer_product(wide, grad_RO.double(), rows_RI.double(), groups, "loop", 0.0)
    add_grouped_outer_product(narrow, grad_RO, rows_RI, groups, "loop", 0.0)
    torch.testing.assert_close(narrow, wide, rtol=1e-5, atol=1e-6)


def test_choice_of_backend():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_backend("auto", torch.bfloat16, cpu, (64, 128)) == "loop"
    assert choose_backend("auto", torch.bfloat16, cuda, (64, 128)) == "grouped_mm"
    assert choose_backend("auto", torch.float64, cuda, (64, 128)) == "loop"
    assert choose_backend("auto", torch.bfloat16, cuda, (64, 12)) == "loop"
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        choose_backend("grouped_mm", torch.bfloat16, cuda, (64, 12))
    assert choose_backend("grouped_mm", torch.float32, cpu, (64, 128)) == "grouped_mm"
    with pytest.raises(ValueError, match="Use loop"):
        choose_backend("grouped_mm", torch.float64, cpu, (64, 128))
    with pytest.raises(ValueError, match=r"--moe-expert-backend transformer-engine: .* is not installed; pip install"):
        choose_backend("transformer-engine", torch.bfloat16, cuda, (64, 128))
    assert choose_backend("transformer-engine", torch.bfloat16, torch.device("meta"), (64, 128)) == "grouped_mm"
