"""Ramp-up of the global batch and the length of a run."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe.config.schema import TrainingConfig
from megatron_moe.training.batch_size import batch_size_at, run_length


def ramp(start: int, increment: int, samples: int, end: int, **length: int) -> TrainingConfig:
    return TrainingConfig(global_batch_size=end, rampup_batch_size=(start, increment, samples), **length)


def test_worked_example():
    config = ramp(16, 8, 600, 32)  # two steps of 300 samples: 16, 24, then 32
    sizes = {consumed: batch_size_at(config, consumed) for consumed in (0, 299, 300, 599, 600, 10**12)}
    assert sizes == {0: 16, 299: 16, 300: 24, 599: 24, 600: 32, 10**12: 32}
    assert batch_size_at(TrainingConfig(global_batch_size=7), 5) == 7
    assert batch_size_at(ramp(8, 4, 100, 8), 0) == 8, "nothing to grow"


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 10), st.integers(1, 12), st.integers(1, 5000))
def test_grows_in_equal_steps(start, increment, num_increments, samples):
    config = ramp(start, increment, samples, start + increment * num_increments)
    sizes = [batch_size_at(config, consumed) for consumed in range(samples + 1)]
    assert sizes[0] == start and sizes[-1] == start + increment * num_increments
    assert all(b - a >= 0 and (b - a) % increment == 0 for a, b in pairwise(sizes))
    for consumed, size in enumerate(sizes[:-1]):  # Megatron: floor(consumed / (samples / n)) increments
        assert size == start + increment * int(consumed * num_increments // samples)


def test_length_of_a_run():
    assert run_length(TrainingConfig(global_batch_size=8, train_iters=5)) == (5, 40)
    assert run_length(ramp(16, 8, 600, 32, train_iters=2)) == (2, 32)
    iterations, samples = run_length(ramp(16, 8, 600, 32, train_samples=1000))
    consumed = 0
    for _ in range(iterations):
        assert consumed < 1000
        consumed += batch_size_at(ramp(16, 8, 600, 32), consumed)
    assert consumed == samples >= 1000
    assert run_length(ramp(16, 8, 600, 32, train_iters=iterations)) == (iterations, samples)


@pytest.mark.parametrize("train_samples", [1, 8, 9, 16])
def test_samples_round_down_to_whole_steps(train_samples):
    iterations, samples = run_length(TrainingConfig(global_batch_size=8, train_samples=train_samples))
    assert samples == 8 * iterations and samples <= train_samples < samples + 8
