"""Activations against their formulas and finite differences."""

import math

import pytest
import torch

from megatron_moe.kernels.activation import activate
from tests.helpers.building import normal

GATED = ("swiglu", "geglu")
FORMULAS = {
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
    "geglu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "squared_relu": lambda x: torch.where(x > 0, x * x, 0.0),
}


@pytest.mark.parametrize("name", list(FORMULAS))
def test_formula_and_gradient(name):
    x = normal(1, 5, 2 if name in GATED else 1, 4).requires_grad_()
    given = x.detach().clone()
    expected = FORMULAS[name](x[:, 0]) * (x[:, 1] if name in GATED else 1.0)
    torch.testing.assert_close(activate(x, name), expected, rtol=1e-13, atol=1e-15)
    assert torch.autograd.gradcheck(lambda x: activate(x, name), (x,))
    assert torch.equal(x, given), "nothing is computed in place of the input"


def test_swiglu_saves_nothing_but_its_input():
    x = normal(1, 5, 2, 4).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        activate(x, "swiglu")
    assert {t.untyped_storage().data_ptr() for t in saved} == {x.untyped_storage().data_ptr()}


@pytest.mark.parametrize("name", list(FORMULAS))
def test_no_rows(name):
    x = torch.zeros(0, 2 if name in GATED else 1, 4, requires_grad=True)
    y = activate(x, name)
    y.sum().backward()
    assert y.shape == (0, 4) and x.grad.shape == x.shape
