"""Rank algebra: Megatron's worked example, and what must hold on every mesh."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe.config.schema import ParallelConfig
from megatron_moe.parallel.layout import (
    GROUP_AXES,
    MeshSizes,
    all_groups,
    coordinates,
    describe,
    ends,
    peers,
    rank_at,
)

SIXTEEN = MeshSizes(tp=2, cp=2, dp=2, pp=2, etp=1, ep=4)

# Megatron-LM's RankGenerator, order tp-cp-ep-dp-pp, by hand.
SIXTEEN_GROUPS = {
    "tp": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
    "cp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "dp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
    "pp": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
    "seq": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    "dp_cp": [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
    "stage": [list(range(8)), list(range(8, 16))],
    "world": [list(range(16))],
    "etp": [[rank] for rank in range(16)],
    "ep": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    "edp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
}


def groups_of(sizes: MeshSizes, group: str) -> list[list[int]]:
    return [list(ranks) for ranks in dict.fromkeys(peers(rank, group, sizes) for rank in range(sizes.world))]


@st.composite
def meshes(draw: st.DrawFn) -> MeshSizes:
    tp, cp, dp, pp = (draw(st.integers(1, 4)) for _ in range(4))
    stage = tp * cp * dp
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage // etp + 1) if stage // etp % n == 0]))
    return MeshSizes(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep)


def test_worked_example_of_sixteen_ranks():
    assert {group: groups_of(SIXTEEN, group) for group in GROUP_AXES} == SIXTEEN_GROUPS
    assert SIXTEEN.edp == 2
    assert [ends(rank, SIXTEEN) for rank in (3, 11)] == [(3, 11), (3, 11)]
    assert ends(1, MeshSizes(pp=3)) == (1,), "a middle stage has no end of the pipeline"


@settings(deadline=None)
@given(meshes(), st.sampled_from(["dense", "expert"]))
def test_coordinates_and_ranks_are_inverse(sizes, view_name):
    view = sizes.view(view_name)
    positions = [coordinates(rank, view) for rank in range(sizes.world)]
    assert [rank_at(position, view) for position in positions] == list(range(sizes.world))
    assert all(0 <= position[axis] < size for position in positions for axis, size in view)


@settings(max_examples=30, deadline=None)
@given(meshes())
def test_groups_partition_the_world(sizes):
    for group, (view_name, axes) in GROUP_AXES.items():
        view = sizes.view(view_name)
        groups = groups_of(sizes, group)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(sizes.world))
        for ranks in groups:
            assert all(peers(rank, group, sizes) == tuple(ranks) for rank in ranks)
            fixed = [{k: v for k, v in coordinates(r, view).items() if k not in axes} for r in ranks]
            assert all(position == fixed[0] for position in fixed)


@settings(max_examples=30, deadline=None)
@given(meshes())
def test_both_views_have_the_same_pipelines(sizes):
    for rank in range(sizes.world):
        dense, expert = coordinates(rank, sizes.view("dense")), coordinates(rank, sizes.view("expert"))
        assert dense["pp"] == expert["pp"]
        through = tuple(rank_at(expert | {"pp": stage}, sizes.view("expert")) for stage in range(sizes.pp))
        assert peers(rank, "pp", sizes) == through


@settings(max_examples=30, deadline=None)
@given(meshes())
def test_every_group_is_made_once_and_only_if_it_communicates(sizes):
    made = all_groups(sizes)
    assert len(set(made)) == len(made)
    assert all(len(ranks) > 1 for ranks in made)
    needed = {peers(rank, group, sizes) for rank in range(sizes.world) for group in GROUP_AXES}
    needed |= {ends(rank, sizes) for rank in range(sizes.world)}
    assert set(made) == {ranks for ranks in needed if len(ranks) > 1}


def test_sizes_follow_from_configuration():
    config = ParallelConfig(tensor_model_parallel_size=2, context_parallel_size=2, expert_model_parallel_size=4)
    assert MeshSizes.of(config, 16) == MeshSizes(tp=2, cp=2, dp=4, pp=1, etp=2, ep=4)
    assert MeshSizes.of(config, 16).edp == 2
    with pytest.raises(ValueError, match="world size 6 is not a multiple of tp 2 x cp 2 x pp 1"):
        MeshSizes.of(config, 6)
    with pytest.raises(ValueError, match="world size 12 is not a multiple of etp 2 x ep 4 x pp 1"):
        MeshSizes.of(config, 12)


DESCRIPTION = """\
world 8 = pp 2 x dp 2 x cp 1 x tp 2   (dense view)
        = pp 2 x edp 1 x ep 4 x etp 1   (expert view)

rank    pp   dp   cp   tp  | edp   ep  etp
   0     0    0    0    0  |   0    0    0
   1     0    0    0    1  |   0    1    0
   2     0    1    0    0  |   0    2    0
   3     0    1    0    1  |   0    3    0
   4     1    0    0    0  |   0    0    0
   5     1    0    0    1  |   0    1    0
   6     1    1    0    0  |   0    2    0
   7     1    1    0    1  |   0    3    0

  tp groups: [0, 1] [2, 3] [4, 5] [6, 7]
  cp groups: [0] [1] [2] [3] [4] [5] [6] [7]
  dp groups: [0, 2] [1, 3] [4, 6] [5, 7]
  pp groups: [0, 4] [1, 5] [2, 6] [3, 7]
 etp groups: [0] [1] [2] [3] [4] [5] [6] [7]
  ep groups: [0, 1, 2, 3] [4, 5, 6, 7]
 edp groups: [0] [1] [2] [3] [4] [5] [6] [7]"""


def test_description():
    found = describe(MeshSizes(tp=2, dp=2, pp=2, ep=4))
    assert [line.rstrip() for line in found.splitlines()] == [line.rstrip() for line in DESCRIPTION.splitlines()]
    assert "  tp groups: [0] [1] [2] [3] [4] [5] [6] [7] ...\n" in describe(MeshSizes(dp=20)), "long lists are cut"
