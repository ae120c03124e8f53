"""The order of samples: epochs, splits, blends and ranks."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe.data.blend import BlendedDataset, blend_indices, parse_data_path
from megatron_moe.data.gpt_dataset import GPTDataset
from megatron_moe.data.indexed_builder import IndexedDatasetBuilder
from megatron_moe.data.indexed_dataset import IndexedDataset
from megatron_moe.data.mock_dataset import MockDataset
from megatron_moe.data.sampler import micro_batches
from megatron_moe.data.shuffle import hash64, key64, permutation
from megatron_moe.data.splits import document_ranges, parse_split


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """57 documents of 0 to 22 tokens, in which every token id is different."""
    prefix = tmp_path_factory.mktemp("corpus") / "data"
    next_id = 0
    with IndexedDatasetBuilder(prefix, np.dtype(np.int32)) as builder:
        for document_id in range(57):
            length = document_id * 7 % 23
            builder.add_document(list(range(next_id, next_id + length)))
            next_id += length
        builder.finalize()
    return IndexedDataset(prefix)


def samples(corpus: IndexedDataset, ids: range, *, seq_length: int = 16, seed: int = 1, name: str = "t"):
    dataset = GPTDataset(corpus, range(corpus.num_documents), seq_length, seed, name)
    return [dataset[i].tolist() for i in ids], dataset


@settings(max_examples=20, deadline=None)
@given(seq_length=st.integers(1, 40), epoch=st.integers(0, 3))
def test_an_epoch_predicts_every_token_at_most_once(corpus: IndexedDataset, seq_length: int, epoch: int) -> None:
    _, dataset = samples(corpus, range(0), seq_length=seq_length)
    first = epoch * dataset.samples_per_epoch
    got = [dataset[i] for i in range(first, first + dataset.samples_per_epoch)]
    labels = np.concatenate([sample[1:] for sample in got])
    assert {len(sample) for sample in got} == {seq_length + 1}
    assert len(np.unique(labels)) == len(labels)
    assert corpus.num_tokens - 1 - len(labels) < seq_length  # only the tail is dropped


def test_a_sample_is_documents_end_to_end(corpus: IndexedDataset) -> None:
    """Consecutive ids run on inside a document and break only where one document ends and another begins."""
    borders = set(corpus.document_offsets(range(57)).tolist())
    (sample, *_), _ = samples(corpus, range(5), seq_length=64)
    for token, following in itertools.pairwise(sample):
        assert following == token + 1 or (token + 1 in borders and following in borders)


def test_order_is_keyed_by_seed_name_and_epoch_alone(corpus: IndexedDataset) -> None:
    _, dataset = samples(corpus, range(0))
    n = dataset.samples_per_epoch
    forward, _ = samples(corpus, range(4 * n))
    # Another reader, other order of access, further than the first: the same samples.
    far = dict(zip(range(6 * n - 1, -1, -1), samples(corpus, range(6 * n - 1, -1, -1))[0], strict=True))
    assert [far[i] for i in range(4 * n)] == forward
    assert forward[:n] != forward[n : 2 * n]
    assert samples(corpus, range(n), seed=2)[0] != forward[:n]
    assert samples(corpus, range(n), name="u")[0] != forward[:n]


def test_shuffle_is_pinned() -> None:
    """These numbers may never change: a resumed run would silently see other samples."""
    assert hash64(np.arange(3), np.uint64(0)).tolist() == [
        16294208416658607535,
        7960286522194355700,
        487617019471545679,
    ]  # the first outputs of SplitMix64 with seed 0, as published
    order = permutation(1000, 1234, "train/data", 0, "documents")
    assert sorted(order.tolist()) == list(range(1000))
    assert order[:6].tolist() == [435, 275, 309, 500, 404, 135]
    assert key64("a", "b") != key64("ab", "")


def test_too_little_data_says_how_much(corpus: IndexedDataset) -> None:
    with pytest.raises(ValueError, match=r"x: 21 tokens in 3 of the 57 documents .* one sample of 65 tokens"):
        GPTDataset(corpus, range(3), 64, 0, "x")
    with pytest.raises(ValueError, match=r"x: 0 tokens in 0 of the 57 documents"):
        GPTDataset(corpus, range(57, 57), 64, 0, "x")


@given(
    weights=st.lists(st.integers(0, 10**6), min_size=1, max_size=3).filter(any),
    num_documents=st.integers(0, 10**12),
)
def test_splits_cover_all_documents_in_proportion(weights: list[int], num_documents: int) -> None:
    ranges = document_ranges(parse_split(",".join(map(str, weights))), num_documents)
    assert ranges[0].start == 0 and ranges[2].stop == num_documents
    assert ranges[0].stop == ranges[1].start and ranges[1].stop == ranges[2].start
    for weight, documents in zip(weights + [0, 0], ranges, strict=False):
        exact = Fraction(weight, sum(weights)) * num_documents
        assert abs(documents.stop - documents.start - exact) <= 1
        assert weight > 0 or len(documents) == 0


@pytest.mark.parametrize("text", ["", "a,1", "1,-1", "0,0,0", "1,2,3,4", "nan", "inf,1", "1,,2"])
def test_bad_splits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--split"):
        parse_split(text)


weight_lists = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(weights=weight_lists, start=st.integers(0, 10**9), count=st.integers(1, 300))
def test_a_blend_keeps_its_proportions_and_skips_nothing(weights: list[float], start: int, count: int) -> None:
    shares = np.array(weights) / sum(weights)
    dataset_ids, sample_ids = blend_indices(shares, start, count)
    again_ids, again = blend_indices(shares, start + count // 2, count)
    overlap = count - count // 2
    assert again_ids[:overlap].tolist() == dataset_ids[count // 2 :].tolist()
    assert again[:overlap].tolist() == sample_ids[count // 2 :].tolist()
    drawn: Counter[int] = Counter()
    for position, (dataset_id, sample_id) in enumerate(zip(dataset_ids, sample_ids, strict=True)):
        expected = (start + position) * shares[dataset_id]
        assert abs(sample_id - expected) <= (1 + len(shares) * shares[dataset_id]) / 2 + 1e-3
        if dataset_id in drawn:
            assert sample_id == drawn[dataset_id] + 1
        drawn[dataset_id] = sample_id


def test_a_blend_from_its_start_draws_each_dataset_from_0() -> None:
    dataset_ids, sample_ids = blend_indices(np.array([0.5, 0.25, 0.25]), 0, 8)
    assert dataset_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 0]
    assert sample_ids.tolist() == [0, 0, 0, 1, 2, 1, 1, 3]


def test_blended_dataset_reads_across_its_chunks() -> None:
    sources = [MockDataset(100, 4, 0, name) for name in ("a", "b")]
    blend = BlendedDataset(sources, [3, 1], "train")
    dataset_ids, sample_ids = blend_indices(np.array([0.75, 0.25]), 4090, 10)
    for i in range(10):
        expected = sources[dataset_ids[i]][int(sample_ids[i])]
        assert blend[4090 + i].tolist() == expected.tolist()


def test_data_path_is_one_prefix_or_pairs() -> None:
    assert parse_data_path(("p",)) == ((1.0, "p"),)
    assert parse_data_path(("0.3", "p", "7", "q")) == ((0.3, "p"), (7.0, "q"))
    for values, message in (
        ((), "has 0 values"),
        (("1", "p", "2"), "has 3 values"),
        (("p", "q"), "value 1, 'p', should be a weight > 0"),
        (("1", "p", "0", "q"), "value 3, '0'"),
        (("nan", "p"), "value 1, 'nan'"),
        (("1", "p", "2", "p"), "names p twice"),
    ):
        with pytest.raises(ValueError, match=f"--valid-data-path:? {message}"):
            parse_data_path(values, "--valid-data-path")


@given(
    dp_size=st.sampled_from([1, 2, 3, 4, 6]),
    micro=st.sampled_from([1, 2, 4]),
    consumed=st.integers(0, 10**12),
)
def test_a_step_reads_the_same_samples_under_every_layout(dp_size: int, micro: int, consumed: int) -> None:
    plans = [micro_batches(consumed, 48, micro, rank, dp_size) for rank in range(dp_size)]
    assert sorted(i for plan in plans for ids in plan for i in ids) == list(range(consumed, consumed + 48))
    assert all(len(ids) == micro for plan in plans for ids in plan)
    # Micro-batch m of all ranks together is one block.
    in_order = [i for m in range(len(plans[0])) for plan in plans for i in plan[m]]
    assert in_order == list(range(consumed, consumed + 48))


def test_indivisible_batches_are_explained() -> None:
    with pytest.raises(ValueError, match=r"--global-batch-size 10 .* 2 x data-parallel size 2 = 4. Use 8 or 12"):
        micro_batches(0, 10, 2, 0, 2)


def test_mock_data_is_pure_and_can_be_learned() -> None:
    mock = MockDataset(50, 4096, 7, "mock/train")
    sample = mock[3]
    assert sample.tolist() == MockDataset(50, 4096, 7, "mock/train")[3].tolist()
    assert sample.tolist() != mock[4].tolist()
    assert sample.dtype == np.int64 and sample.min() >= 0 and sample.max() < 50
    follows: dict[int, Counter[int]] = {}
    for token, following in zip(sample[:-1].tolist(), sample[1:].tolist(), strict=True):
        follows.setdefault(token, Counter())[following] += 1
    usual = sum(counter.most_common(1)[0][1] for counter in follows.values())
    assert 0.9 < usual / 4096 < 0.98
