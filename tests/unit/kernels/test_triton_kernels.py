"""Triton kernels against their PyTorch references: interpreted on a CPU, compiled where there is a GPU."""

import math

import pytest
import torch
from torch import Tensor

from megatron_moe.kernels import cross_entropy, cross_entropy_triton, permutation_triton, scoring
from megatron_moe.kernels.scoring import ScoringRule, score_topk
from megatron_moe.kernels.swiglu import swiglu
from megatron_moe.moe.permute import Copies, add_rows, copy_rows, expert_order
from megatron_moe.moe.routing import PlaceTable, Routing
from tests.helpers.building import normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(seed, *shape, dtype=dtype).to(DEVICE)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def both(run, *inputs: Tensor | None):
    """(outputs and gradients of PyTorch, of Triton) of a function of differentiable inputs and the kernels' name."""
    results = []
    for kernels in ("torch", "triton"):
        leaves = [x if x is None else x.detach().clone().requires_grad_() for x in inputs]
        outputs = run(*leaves, kernels)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        grads = [numbers(100 + i, *y.shape).to(y.dtype) for i, y in enumerate(outputs) if y.requires_grad]
        torch.autograd.backward([y for y in outputs if y.requires_grad], grads)
        results.append([*(y.detach() for y in outputs), *(x.grad for x in leaves if x is not None)])
    return zip(results[1], results[0], strict=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "weighed"), [((3, 2, 5), True), ((2, 2, 2, 2049), False), ((0, 2, 4), True)])
def test_swiglu(shape, weighed, dtype):
    weights = numbers(2, *shape[:-2], 1, dtype=dtype) if weighed else None
    for found, expected in both(swiglu, numbers(1, *shape, dtype=dtype), weights):
        close(found, expected, dtype)


def test_swiglu_formula():
    x, weights = numbers(1, 3, 2, 4).requires_grad_(), numbers(2, 3, 1).requires_grad_()
    expected = torch.nn.functional.silu(x[:, 0]) * x[:, 1] * weights
    torch.testing.assert_close(swiglu(x, weights), expected, rtol=1e-14, atol=1e-15)
    assert torch.autograd.gradcheck(swiglu, (x, weights))
    assert torch.autograd.gradcheck(lambda x: swiglu(x), (x,))


RULES = [
    ScoringRule(3, sigmoid=False, normalised=True, scale=1.0),
    ScoringRule(2, sigmoid=False, normalised=False, scale=1.3),
    ScoringRule(4, sigmoid=True, normalised=True, scale=2.5),
]


@pytest.mark.parametrize(
    ("rule", "tokens", "experts", "biased", "decided", "dtype"),
    [
        (RULES[0], 130, 5, False, False, torch.float32),  # three blocks of tokens
        (RULES[1], 9, 70, True, False, torch.float64),
        (RULES[2], 5, 8, True, False, torch.float32),
        (RULES[2], 70, 7, False, True, torch.float64),
        (RULES[1], 0, 8, False, False, torch.float32),
    ],
)
def test_scoring(rule, tokens, experts, biased, decided, dtype):
    bias_E = numbers(2, experts, dtype=dtype) if biased else None
    logits_TE = numbers(1, tokens, experts, dtype=dtype)
    decided_TK = numbers(3, tokens, experts).argsort(1)[:, : rule.num_slots].contiguous() if decided else None
    for found, expected in both(lambda x, kernels: score_topk(x, bias_E, rule, decided_TK, kernels), logits_TE):
        close(found, expected, dtype)


@pytest.mark.filterwarnings("ignore:.*NaN|invalid value:RuntimeWarning")  # of the interpreter, about NaN
def test_scoring_order_of_what_is_equal_or_not_finite():
    inf, nan = math.inf, math.nan
    logits_TE = torch.tensor(
        [
            [1.0, 2.0, 2.0, 1.0, 2.0],  # ties
            [-inf, -inf, -inf, -inf, -inf],  # nothing that differs, and nothing chosen twice
            [0.0, -0.0, -1.0, 0.0, -0.0],  # zeros are equal
            [-1.0, nan, inf, -nan, 3.0],
            [-inf, -5.0, -inf, -4.0, -inf],
        ],
        device=DEVICE,
    )
    rule = ScoringRule(4, sigmoid=False, normalised=True, scale=1.0)
    for dtype in (torch.float32, torch.float64):
        found, expected = (score_topk(logits_TE.to(dtype), None, rule, kernels=name) for name in ("triton", "torch"))
        assert torch.equal(found.ids_TK, expected.ids_TK)
        assert torch.equal(found.positions_TK, expected.positions_TK)
        assert torch.equal(found.counts_E, expected.counts_E)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_scoring_backward_in_closed_form(rule):
    logits_TE = numbers(1, 6, 7).requires_grad_()
    scored = score_topk(logits_TE, None, rule)
    grads = numbers(3, *scored.weights_TK.shape), numbers(4, 6, 7)
    (expected,) = torch.autograd.grad((scored.weights_TK, scored.scores_TE), logits_TE, grads)
    found = scoring.score_topk_backward(*grads, logits_TE.detach(), scored, rule)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_table_gives_the_order_of_the_stable_sort():
    rule = ScoringRule(3, sigmoid=False, normalised=True, scale=1.0)
    scored = score_topk(numbers(1, 50, 6) + 3 * torch.arange(6, device=DEVICE), None, rule, kernels="triton")
    ids_N, tokens_N = scored.ids_TK.flatten(), torch.arange(150, device=DEVICE) // 3
    routing = Routing(tokens_N, ids_N, scored.weights_TK.flatten())
    expected = expert_order(routing, 6, 50)
    found = expert_order(routing._replace(table=PlaceTable(scored.positions_TK.flatten(), scored.counts_E)), 6, 50)
    assert torch.equal(found.order_N, expected.order_N) and torch.equal(found.counts_E, expected.counts_E)
    assert torch.equal(found.copies.token_ids_R, expected.copies.token_ids_R)
    assert torch.equal(found.copies.starts_T, expected.copies.starts_T)
    # The rows of a token, in the order of its experts or of its slots.
    found_T3, expected_T3 = (order.copies.rows_R.view(50, 3).sort(1).values for order in (found, expected))
    assert torch.equal(found_T3, expected_T3)


def some_copies(tokens: int, rows: int, kernels: str = "torch") -> Copies:
    """Tokens of any number of rows, some of none."""
    ids_R = torch.randint(max(tokens, 1), (rows,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return Copies.of(ids_R, tokens, kernels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "rows", "width"), [(5, 15, 5), (3, 4, 2050), (4, 0, 3), (0, 0, 3)])
def test_permutation(tokens, rows, width, dtype):
    x_TD, rows_RD = numbers(1, tokens, width, dtype=dtype), numbers(2, rows, width, dtype=dtype)
    weights_R = numbers(3, rows, dtype=dtype)
    for found, expected in (
        *both(lambda x, kernels: copy_rows(x, some_copies(tokens, rows, kernels)), x_TD),
        *both(lambda y, kernels: add_rows(y, some_copies(tokens, rows, kernels)), rows_RD),
        *both(lambda x, weights, kernels: copy_rows(x, some_copies(tokens, rows, kernels), weights), x_TD, weights_R),
    ):
        close(found, expected, dtype)


def test_permutation_formula():
    copies, x_TD = some_copies(5, 9), numbers(1, 5, 4).requires_grad_()
    rows_RD, weights_R = numbers(2, 9, 4).requires_grad_(), numbers(3, 9).requires_grad_()
    assert torch.equal(copy_rows(x_TD, copies), x_TD[copies.token_ids_R])
    assert torch.equal(copy_rows(x_TD, copies, weights_R), x_TD[copies.token_ids_R] * weights_R[:, None])
    expected_TD = torch.zeros_like(x_TD).index_add(0, copies.token_ids_R, rows_RD)
    torch.testing.assert_close(add_rows(rows_RD, copies), expected_TD, rtol=1e-13, atol=1e-15)
    assert torch.autograd.gradcheck(lambda rows: add_rows(rows, copies), (rows_RD,))
    assert torch.autograd.gradcheck(lambda x, weights: copy_rows(x, copies, weights), (x_TD, weights_R))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "stored", "columns"), [(6, 5, 5), (3, 2051, 2049), (2, 4, 0), (0, 8, 8)])
def test_cross_entropy_shard(tokens, stored, columns, dtype):
    logits_NV = 5 * numbers(1, tokens, stored, dtype=dtype)
    labels_N = torch.tensor([0, columns - 1, -1, columns + 3, 1, -7], device=DEVICE)[:tokens]
    grad_N, rescale_N = numbers(2, tokens).to(torch.promote_types(dtype, torch.float32)), None
    results = []
    for module in (cross_entropy_triton, cross_entropy):
        found = module.shard_statistics(logits_NV.clone(), labels_N, columns)
        rescale_N = 1 / found.sum_N.clamp(min=1.0)
        grad_NV = module.shard_gradient(found.kept_NV, labels_N, columns, found.peak_N, rescale_N, grad_N, dtype)
        results.append((*found[1:], grad_NV))
    for found, expected in zip(*results, strict=True):
        close(found, expected, dtype)


def test_offsets_beyond_32_bits():
    # Rows so far apart that their addresses do not fit; memory that nobody touches is not there.
    far = torch.empty_strided((3, 8), (2**30, 1), dtype=torch.bfloat16, device=DEVICE)
    far.copy_(numbers(1, 3, 8, dtype=torch.bfloat16))
    ids_R = torch.tensor([2, 0, 1], device=DEVICE)
    one_each_T = torch.arange(3, device=DEVICE)
    assert torch.equal(permutation_triton.spread(far, ids_R), far[[2, 0, 1]])
    assert torch.equal(permutation_triton.collect(far, ids_R, one_each_T), far[[2, 0, 1]])
    ones = torch.ones_like(far.contiguous())
    close(permutation_triton.row_products(ones, far, ids_R), far.sum(1), torch.bfloat16)
    close(permutation_triton.row_products(far, ones, ids_R), far.sum(1)[ids_R], torch.bfloat16)
    labels_N, near = torch.tensor([0, 1, 2], device=DEVICE), far.contiguous()
    for found, expected in zip(
        cross_entropy_triton.shard_statistics(far, labels_N, 8)[1:],
        cross_entropy.shard_statistics(near, labels_N, 8)[1:],
        strict=True,
    ):
        close(found, expected, torch.float32)
