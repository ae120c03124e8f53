"""Counter-based random numbers: uniform, and a function of the token alone."""

import subprocess
import sys

import pytest
import torch

from megatron_moe.parallel.random import hash_key, token_uniform

MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    """The finaliser, in Python's unbounded integers (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def expected_uniform(key: int, token: int, column: int, num_columns: int) -> float:
    golden = 0x9E3779B97F4A7C15
    counter = token * num_columns + column + 1
    first = splitmix64((counter * golden + key) & MASK)
    return (splitmix64((first + golden) & MASK) >> 40) / 2**24


def test_golden_keys():
    # Written down once: a change would silently change every run.
    assert hash_key(1234, "layers.0.attention.query.weight") == 0x3AFAEAE379D8E622
    assert hash_key(1, 23) != hash_key(12, 3), "parts are told apart"
    script = "from megatron_moe.parallel.random import hash_key; print(hash_key(5, 'a', 7))"
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "99"}
    )
    assert int(other.stdout) == hash_key(5, "a", 7), "stable across processes"


@pytest.mark.parametrize("key", [0, 12345, MASK, 1 << 63])
def test_numbers_are_those_of_the_algorithm(key):
    tokens = [0, 1, 7, 2**31, 2**40 + 3]
    found = token_uniform(key, torch.tensor(tokens), 3, torch.float64)
    expected = [[expected_uniform(key, token, column, 3) for column in range(3)] for token in tokens]
    assert found.tolist() == expected


def test_a_number_depends_on_its_token_alone():
    ids = torch.arange(1000)
    whole = token_uniform(99, ids, 5, torch.float64)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(token_uniform(99, ids[order], 5, torch.float64), whole[order])
    assert torch.equal(token_uniform(99, ids.view(10, 100), 5, torch.float64), whole.view(10, 100, 5))
    assert torch.equal(token_uniform(99, ids[7:8], 5, torch.float64), whole[7:8])
    single = token_uniform(99, ids, 5, torch.float32)
    assert single.dtype == torch.float32 and torch.equal(single.double(), whole), "precision changes no decision"


def test_numbers_are_uniform_and_uncorrelated():
    x = token_uniform(hash_key(1, 2), torch.arange(1 << 16), 4, torch.float64)
    assert float(x.min()) >= 0.0 and float(x.max()) < 1.0
    counts = torch.histc(x, 256, 0.0, 1.0)
    chi_square = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert 150 < chi_square < 370  # 255 degrees of freedom: mean 255, deviation 22.6
    other = token_uniform(hash_key(1, 3), torch.arange(1 << 16), 4, torch.float64)
    pairs = {
        "columns": (x[:, 0], x[:, 1]),
        "next tokens": (x[:-1, 0], x[1:, 0]),
        "tokens one row apart": (x[:-1, 3], x[1:, 0]),
        "keys": (x[:, 0], other[:, 0]),
    }
    for what, (a, b) in pairs.items():
        correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
        assert abs(correlation) < 0.02, what  # deviation 0.004
