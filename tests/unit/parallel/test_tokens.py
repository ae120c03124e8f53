"""Which tokens a rank holds: balanced chunks, logical order after a gather, numbers of the token."""

import pytest
import torch

from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.layout import MeshSizes
from megatron_moe.parallel.tokens import SequenceLayout, context_positions
from tests.helpers.building import fake_context, token_batch
from tests.helpers.ranks import MAX_RANKS
from tests.parity import harness


def test_zigzag_positions():
    assert context_positions(16, 1, 0).tolist() == list(range(16))
    assert context_positions(16, 2, 0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert context_positions(16, 2, 1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    held = [context_positions(48, 4, rank) for rank in range(4)]
    assert sorted(torch.cat(held).tolist()) == list(range(48))
    assert len({int((positions + 1).sum()) for positions in held}) == 1, "causal work is the same on every rank"


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_rows_of_a_rank(sequence_parallel):
    sizes = MeshSizes(tp=2, cp=2)
    layouts = [SequenceLayout(16, fake_context(sizes, rank), sequence_parallel) for rank in range(4)]
    rows = [layout.local_S.tolist() for layout in layouts]
    if sequence_parallel:
        assert rows == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    else:
        assert rows[0] == rows[1] == [0, 1, 2, 3, 12, 13, 14, 15]
        assert rows[2] == rows[3] == [4, 5, 6, 7, 8, 9, 10, 11]
    assert [layout.context_S.tolist() for layout in layouts[:2]] == [[0, 1, 2, 3, 12, 13, 14, 15]] * 2
    assert not any(layout.whole for layout in layouts)
    assert SequenceLayout(16, ParallelContext.single(), False).whole


def test_numbers_belong_to_the_token():
    ids_SB = torch.arange(32).view(16, 2)
    alone = token_batch(ids_SB)
    whole = alone.uniform(alone.index_SB, 3, "jitter", 5, torch.float64)
    assert alone.index_SB[5].tolist() == [5, 21], "sample * sequence length + position"
    for rank in range(4):
        mine = token_batch(ids_SB, fake_context(MeshSizes(tp=2, cp=2), rank), sequence_parallel=True)
        found = mine.uniform(mine.local(mine.index_SB), 3, "jitter", 5, torch.float64)
        assert torch.equal(found, whole[mine.layout.local_S])
    others = [(3, "dropout", alone), (4, "jitter", alone), (3, "jitter", token_batch(ids_SB, iteration=2))]
    for layer, use, batch in others:
        assert not torch.equal(batch.uniform(batch.index_SB, layer, use, 5, torch.float64), whole)


def test_document_bounds():
    documents_SB = torch.tensor([[0, 0], [0, 1], [1, 1], [1, 1], [1, 2], [2, 2], [2, 3], [3, 3]])
    batch = token_batch(
        torch.zeros(8, 2, dtype=torch.int64), fake_context(MeshSizes(cp=2), 0), documents_SB=documents_SB
    )
    assert batch.document_bounds == [[(0, 0), (0, 1)], [(1, 1), (1, 1)], [(1, 2), (2, 2)], [(2, 3), (3, 3)]]
    assert token_batch(torch.zeros(8, 2, dtype=torch.int64)).document_bounds is None


def gather_on_rank(rank: int, sizes: MeshSizes) -> None:
    """Gathering this rank's rows gives the logical order; gradients come back summed and scattered."""
    ctx = ParallelContext.create(sizes, rank=rank, groups=harness._groups)
    whole = torch.arange(16 * 3, dtype=torch.float64).view(16, 3)
    for sequence_parallel in (False, True):
        layout = SequenceLayout(16, ctx, sequence_parallel)
        local = whole[layout.local_S].requires_grad_()
        gathered = layout.gather(local)
        assert torch.equal(gathered, whole)
        (gathered * (whole + ctx.cp.rank + 10 * ctx.tp.rank)).sum().backward()
        expected = layout.axis.size * whole + sum(
            (peer >> 1) + 10 * (peer & 1)
            for peer in layout.axis.ranks  # rank = tp + 2 cp
        )
        assert torch.equal(local.grad, expected[layout.local_S])
        assert torch.equal(layout.gather_context(whole[layout.context_S]), whole)


def test_gather_restores_the_logical_order(ranks):
    sizes = MeshSizes(tp=2, cp=2)
    ranks.run(MAX_RANKS, harness.make_groups, sizes)
    ranks.run(sizes.world, gather_on_rank, sizes)
