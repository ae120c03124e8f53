"""Micro-batches and the loader that reads them ahead."""

import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe.data.batch import CollateOptions, collate
from megatron_moe.data.loader import StepLoader
from megatron_moe.data.mock_dataset import MockDataset

EOD = 9


def test_the_picture_of_the_docstring() -> None:
    options = CollateOptions(10, EOD, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    batch = collate([np.array([1, 2, EOD, 3, 4, 5])], [77], options)
    assert batch.tokens.tolist() == [[1, 2, EOD, 3, 4]]
    assert batch.labels.tolist() == [[2, EOD, 3, 4, 5]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.loss_mask.tolist() == [[True, True, False, True, True]]
    assert batch.padding_mask.tolist() == [[False] * 5]
    assert batch.sample_ids.tolist() == [77]
    dtypes = [torch.int64, torch.int64, torch.bool, torch.int64, torch.int64, torch.bool, torch.int64]
    assert [getattr(batch, name).dtype for name in batch.__dataclass_fields__] == dtypes

    plain = collate([np.array([1, 2, EOD, 3, 4, 5])], [77], CollateOptions(10, EOD))
    assert plain.position_ids.tolist() == [[0, 1, 2, 3, 4]]
    assert plain.document_ids.tolist() == [[0] * 5]
    assert plain.loss_mask.all()


@given(st.lists(st.lists(st.sampled_from([1, 2, EOD]), min_size=9, max_size=9), min_size=1, max_size=3))
def test_resets_follow_megatrons_loop(samples: list[list[int]]) -> None:
    """Against the rule as Megatron writes it: one end of document after the other."""
    options = CollateOptions(10, EOD, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    batch = collate([np.array(sample) for sample in samples], range(len(samples)), options)
    for row, sample in enumerate(samples):
        tokens = sample[:-1]
        position_ids, document_ids, previous = list(range(8)), [0] * 8, 0
        for end in [i for i, token in enumerate(tokens) if token == EOD]:
            for later in range(end + 1, 8):
                position_ids[later] -= end + 1 - previous
                document_ids[later] += 1
            previous = end + 1
        assert batch.position_ids[row].tolist() == position_ids
        assert batch.document_ids[row].tolist() == document_ids
        assert batch.loss_mask[row].tolist() == [token != EOD for token in tokens]


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 6 has token id 10, .* 10 entries \(ids 0..9\): wrong tokenizer"):
        collate([np.array([1, 2]), np.array([1, 10])], [5, 6], CollateOptions(10))
    with pytest.raises(ValueError, match="token id -1"):
        collate([np.array([-1, 2])], [5], CollateOptions(10))
    with pytest.raises(ValueError, match="--eod-mask-loss needs to know where documents end"):
        CollateOptions(10, eod_mask_loss=True)


def loader(source: object, num_workers: int, dp_rank: int = 0, dp_size: int = 1, micro: int = 2) -> StepLoader:
    return StepLoader(
        source,  # pyright: ignore[reportArgumentType]
        CollateOptions(100),
        batch_size_at=lambda consumed: 4 if consumed < 8 else 8,
        micro_batch_size=micro,
        dp_rank=dp_rank,
        dp_size=dp_size,
        num_workers=num_workers,
    )


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_steps_come_in_order_and_restart_anywhere(num_workers: int) -> None:
    mock = MockDataset(100, 8, 0, "mock")
    stream = loader(mock, num_workers).steps(0)
    steps = [next(stream) for _ in range(4)]
    stream.close()
    ids = [[batch.sample_ids.tolist() for batch in step] for step in steps]
    assert ids == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8, 9], [10, 11], [12, 13], [14, 15]],
        [[16, 17], [18, 19], [20, 21], [22, 23]],
    ]
    for batch in steps[3]:
        for row, sample_id in enumerate(batch.sample_ids.tolist()):
            assert batch.tokens[row].tolist() == mock[sample_id][:-1].tolist()
    resumed = loader(mock, num_workers).steps(16)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(next(resumed), steps[3], strict=True))
    resumed.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("data")]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_slow_disk_is_read_while_the_step_computes(num_workers: int) -> None:
    """By the order of events: when a step asks for its batch, all of it has been read during the steps before."""

    class Slow:
        name = "train/slow"

        def __init__(self) -> None:
            self.read = Counter[int]()
            self.changed = threading.Condition()

        def __getitem__(self, sample_id: int) -> np.ndarray:
            time.sleep(0.005)
            with self.changed:
                self.read[sample_id] += 1
                self.changed.notify_all()
            return np.zeros(5, dtype=np.int64)

        def have_been_read(self, last: int) -> bool:
            with self.changed:
                return self.changed.wait_for(
                    lambda: set(range(last)) <= set(self.read), timeout=5 if num_workers else 0
                )

    source, stride = Slow(), 8
    steps = loader(source, num_workers).steps(8)  # past the growth of the batch: 8 samples a step
    source.read.update(range(8))
    for step in range(1, 6):
        next(steps)
        computing_while = source.have_been_read(8 + (step + 2) * stride)  # this step's, and those of the next two
        assert computing_while == (num_workers > 0)
    steps.close()
    assert max(source.read.values()) == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_comes_at_its_step_and_says_where(num_workers: int) -> None:
    class Broken:
        name = "train/broken"

        def __getitem__(self, sample_id: int) -> np.ndarray:
            if sample_id == 6:
                raise OSError("disk is gone")
            return np.zeros(5, dtype=np.int64)

    stream = loader(Broken(), num_workers).steps(0)
    assert len(next(stream)) == 2
    with pytest.raises(OSError, match="disk is gone") as caught:
        next(stream)
    assert caught.value.__notes__ == ["while reading samples 6..7 of train/broken"]


def test_bad_loader_settings() -> None:
    with pytest.raises(ValueError, match="--num-workers -1"):
        loader(MockDataset(9, 2, 0, "m"), -1)
    with pytest.raises(ValueError, match="--global-batch-size 4"):
        next(loader(MockDataset(9, 2, 0, "m"), 1, dp_size=3).steps(0))
