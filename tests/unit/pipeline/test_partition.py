"""The layout language and the balanced cut."""

from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe.pipeline.partition import (
    LayoutError,
    StageLayout,
    balance,
    format_layout,
    layout_problems,
    parse_layout,
)


def test_layout_of_deepseek_v3() -> None:
    """61 layers and one prediction block on 16 ranks with 2 stages each."""
    stages = parse_layout("Et*3|(tt|)*29,m|L")
    assert len(stages) == 32
    assert stages[0] == StageLayout((0, 1, 2), embedding=True)
    assert stages[1] == StageLayout((3, 4))
    assert stages[29] == StageLayout((59, 60))
    assert stages[30] == StageLayout(mtp_ids=(0,))
    assert stages[31] == StageLayout(head=True)
    assert layout_problems(stages, num_layers=61, num_mtp=1, pp=16) == []


@pytest.mark.parametrize(
    ("text", "layers", "mtp"),
    [
        ("EtL", [1], [0]),
        ("E|tt||t*2,L", [0, 2, 0, 2], [0, 0, 0, 0]),
        ("E (t | t)*2 L", [1, 2, 1], [0, 0, 0]),
        ("E((t|)*2t|)*2mmL", [1, 1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 2]),
        ("Et*0|(t,t)mL", [0, 2], [0, 1]),
        ("Et , * 2 |L", [2, 0], [0, 0]),
    ],
)
def test_layout_examples(text: str, layers: list[int], mtp: list[int]) -> None:
    stages = parse_layout(text)
    assert [len(stage.layer_ids) for stage in stages] == layers
    assert [len(stage.mtp_ids) for stage in stages] == mtp
    assert [layer for stage in stages for layer in stage.layer_ids] == list(range(sum(layers)))
    assert [stage.embedding for stage in stages] == [i == 0 for i in range(len(stages))]
    assert [stage.head for stage in stages] == [i == len(stages) - 1 for i in range(len(stages))]
    assert parse_layout(format_layout(stages)) == stages


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("Et*3|xt|L", 5, "'x' is not one of"),
        ("E(tt|L", 1, "never closed"),
        ("Ett)|L", 3, "never opened"),
        ("Et*|L", 3, "a number must follow"),
        ("E(*3)L", 2, "nothing here to repeat"),
        ("Et*999999L", 3, "more than 100000"),
        ("t|tL", 0, "first symbol must be E"),
        ("", 0, "first symbol must be E"),
        ("Et|t", 3, "last symbol must be L"),
        ("EtE|L", 2, "exactly one E, but there are 2"),
        ("EtL|L", 2, "exactly one L, but there are 2"),
        ("Em|tL", 3, "before every m"),
        ("Etm|m|L", 4, "all m must be in the same stage"),
    ],
)
def test_layout_errors_point_at_the_character(text: str, position: int, message: str) -> None:
    with pytest.raises(LayoutError) as error:
        parse_layout(text)
    first, shown, pointer = str(error.value).split("\n")
    assert message in first
    assert f"character {position + 1}" in first
    assert shown.strip() == text
    assert pointer.index("^") - 4 == position


def test_layout_problems_are_sentences_with_flags() -> None:
    problems = layout_problems(parse_layout("Ett|tmL|"[:-1]), num_layers=4, num_mtp=0, pp=3)
    assert len(problems) == 3
    assert "3 transformer layers (t), but --num-layers is 4" in problems[0]
    assert "--mtp-num-layers is 0" in problems[1]
    assert "--pipeline-model-parallel-size 3" in problems[2]


def stage_costs(stages: tuple[StageLayout, ...], costs: list[int], embedding: int, head: int) -> list[int]:
    return [
        sum(costs[i] for i in stage.layer_ids) + embedding * stage.embedding + head * stage.head for stage in stages
    ]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=7),
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(1, 5),
)
def test_balance_is_the_best_cut_there_is(costs: list[int], embedding: int, head: int, num_stages: int) -> None:
    if len(costs) < num_stages - 2:
        with pytest.raises(LayoutError, match=f"cannot be cut into {num_stages} pipeline stages"):
            balance(costs, embedding, head, num_stages)
        return
    stages = balance(costs, embedding, head, num_stages)
    found = stage_costs(stages, costs, embedding, head)
    assert [i for stage in stages for i in stage.layer_ids] == list(range(len(costs)))
    assert all(stage.layer_ids for stage in stages[1:-1])
    assert parse_layout(format_layout(stages)) == stages

    every_cut = [
        [b - a for a, b in zip((0, *inner), (*inner, len(costs)), strict=True)]
        for inner in combinations_with_replacement(range(len(costs) + 1), num_stages - 1)
    ]
    scores = []
    for sizes in every_cut:
        starts = [sum(sizes[:i]) for i in range(num_stages)]
        values = [sum(costs[s : s + n]) for s, n in zip(starts, sizes, strict=True)]
        values[0] += embedding
        values[-1] += head
        scores.append(((max(values), sum(v * v for v in values)), all(sizes[1:-1])))
    assert max(found) == min(score[0] for score, _ in scores)  # even with empty stages in the middle
    assert (max(found), sum(v * v for v in found)) == min(score for score, filled in scores if filled)


def test_balance_relieves_the_stages_with_embedding_and_head() -> None:
    """Dense layers cost 1, MoE layers 2; the head costs as much as three MoE layers."""
    stages = balance([1.0, 1.0, *[2.0] * 14], cost_embedding=0.5, cost_head=6.0, num_stages=4)
    assert format_layout(stages) == "Et*5|t*4|t*5|t*2L"
