"""Schedules against the published closed forms, against torch.distributed.pipelining, and for every size."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from megatron_moe.pipeline.actions import Kind, Pair, Schedule, ScheduleError
from megatron_moe.pipeline.deadlock import prove_no_deadlock
from megatron_moe.pipeline.passes import add_communication, add_grad_reduction
from megatron_moe.pipeline.schedules import SCHEDULES, Times, make_schedule, schedule_problems
from megatron_moe.pipeline.simulate import Durations, Timeline, peak_activations, per_rank_durations, simulate

SIZES = [(1, 3), (2, 4), (3, 6), (4, 8), (4, 12), (8, 16), (8, 24)]
EQUAL = Times(1.0, 1.0, 1.0)
UNEQUAL = [Times(1.0, 1.5, 0.5), Times(2.0, 1.25, 1.0), Times(0.75, 0.5, 0.5)]  # W is the shortest
W_LARGER = Times(1.0, 0.9, 1.0)


def timed(schedule: Schedule, times: Times) -> Timeline:
    return simulate(schedule, per_rank_durations(times, schedule.chunks_per_rank))


def step_bubbles(name: str, pp: int, m: int, times: Times, v: int | None = None) -> set[float]:
    return {round(bubble, 9) for bubble in timed(make_schedule(name, pp, m, v), times).step_bubble}


@pytest.mark.parametrize("times", [EQUAL, W_LARGER, *UNEQUAL])
@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_bubble_of_gpipe_1f1b_and_interleaved(pp: int, m: int, times: Times) -> None:
    one_trip = (pp - 1) * (times.forward + times.backward + times.weight)
    assert step_bubbles("gpipe", pp, m, times) == {round(one_trip, 9)}
    assert step_bubbles("1f1b", pp, m, times) == {round(one_trip, 9)}
    for v in (2, 3):
        assert step_bubbles("interleaved-1f1b", pp, pp * 3, times, v) == {round(one_trip / v, 9)}


@pytest.mark.parametrize("times", [EQUAL, *UNEQUAL])
@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_bubble_of_zb_h1(pp: int, m: int, times: Times) -> None:
    expected = (pp - 1) * (times.forward + times.backward - times.weight)
    assert step_bubbles("zb-h1", pp, m, times) == {round(expected, 9)}


def test_bubble_of_zb_h1_when_weight_gradients_are_longer() -> None:
    """The published (p-1)(F+B-W) would give 2.7 and 0.75 here: it needs W <= B, and W <= F too."""
    assert step_bubbles("zb-h1", 4, 8, W_LARGER) == {3.0}
    assert step_bubbles("zb-h1", 4, 8, Times(0.25, 1.0, 1.0)) == {3.0}


@pytest.mark.parametrize(("pp", "m"), [size for size in SIZES if size[1] >= 2 * size[0]])
def test_bubbles_of_the_v_schedules(pp: int, m: int) -> None:
    zb_v = timed(make_schedule("zb-v", pp, m), EQUAL)
    assert zb_v.span_bubble == pytest.approx([0.0] * pp)
    assert zb_v.step_bubble == pytest.approx([(pp - 1) / 2] * pp)  # what remains is the start, half a stage a rank
    assert timed(make_schedule("dualpipe-v", pp, m), EQUAL).step_bubble == pytest.approx([pp - 1] * pp)


def test_published_bubble_fractions() -> None:
    """p = 8, m = 20: 25.9 % for 1F1B, 10.4 % for ZB-H1 and DualPipeV."""
    fractions = {
        name: round(100 * timed(make_schedule(name, 8, 20), EQUAL).bubble_fraction[0], 1)
        for name in ("1f1b", "zb-h1", "dualpipe-v")
    }
    assert fractions == {"1f1b": 25.9, "zb-h1": 10.4, "dualpipe-v": 10.4}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("times", [EQUAL, W_LARGER, Times(0.5, 2.0, 2.0), *UNEQUAL])
def test_closed_forms_of_the_registry_are_what_the_simulator_finds(name: str, times: Times) -> None:
    for pp, m in [(1, 3), (2, 4), (4, 8), (6, 12), (5, 2), (5, 5)]:
        if schedule_problems(name, pp, m):
            continue
        schedule = make_schedule(name, pp, m)
        form = SCHEDULES[name].closed_form(pp, m, schedule.chunks_per_rank, times)
        if form is not None:
            timeline = timed(schedule, times)
            found = timeline.step_bubble if form.of == "step" else timeline.span_bubble
            assert max(found) == pytest.approx(form.value), form.text


@pytest.mark.parametrize(("pp", "m"), SIZES)
def test_peak_activations(pp: int, m: int) -> None:
    """In micro-batches of one stage; a deferred weight gradient holds 0.5 where a forward holds 1."""

    def peaks(name: str, v: int | None = None, num_microbatches: int = m) -> list[float]:
        return list(peak_activations(make_schedule(name, pp, num_microbatches, v), held_for_weight=0.5))

    assert peaks("gpipe") == [m] * pp
    assert peaks("1f1b") == [min(m, pp - i) for i in range(pp)]
    assert peaks("interleaved-1f1b", 3, 3 * pp) == [min(9 * pp, 2 * (pp - i - 1) + 2 * pp + 1) for i in range(pp)]
    if m >= 2 * pp:
        assert peaks("zb-h1") == [(pp - i) + 0.5 * i for i in range(pp)]
        assert max(peaks("zb-v")) == 2 * pp  # two stages per rank: p micro-batches of a rank
        assert max(peaks("dualpipe-v")) == 2 * pp + 1


def test_weight_gradients_count_until_they_are_done() -> None:
    assert set(peak_activations(make_schedule("zb-h1", 4, 12), held_for_weight=1.0)) == {4.0}
    assert peak_activations(make_schedule("zb-h1", 4, 12), held_for_weight=0.0) == (4.0, 3.0, 2.0, 1.0)


@st.composite
def admitted(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    pp = draw(st.integers(1, 5))
    if name == "interleaved-1f1b":
        return make_schedule(name, pp, pp * draw(st.integers(1, 4)), draw(st.integers(2, 4)))
    fewest = 2 * pp if name == "dualpipe-v" else 1
    return make_schedule(name, pp, draw(st.integers(fewest, fewest + 9)))


@settings(max_examples=80, deadline=None)
@given(admitted())
def test_every_admitted_schedule_is_valid_and_finishes(schedule: Schedule) -> None:
    plain = simulate(schedule)
    complete = add_grad_reduction(add_communication(schedule))
    prove_no_deadlock(complete)
    assert simulate(complete).length == pytest.approx(plain.length)  # communication is free here
    reductions = [a.stage for r in range(schedule.num_ranks) for a in complete.actions(r) if a.kind is Kind.REDUCE_GRAD]
    assert sorted(reductions) == list(range(schedule.num_stages))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("durations", [Durations(comm=0.5), Durations(1.0, 1.3, 0.9, comm=0.2)])
def test_receives_are_early_enough_to_hide_communication(name: str, durations: Durations) -> None:
    """Explicit sends and receives cost at most 1 % over results that travel by themselves."""
    schedule = make_schedule(name, 4, 8)
    ideal = simulate(schedule, durations).length
    assert ideal <= simulate(add_communication(schedule), durations).length <= 1.01 * ideal


def test_pairs_of_dualpipe_v_never_hold_one_microbatch_twice() -> None:
    schedule = make_schedule("dualpipe-v", 4, 10)
    pairs = [step for steps in schedule.ranks for step in steps if isinstance(step, Pair)]
    assert len(pairs) > 4 * 10
    assert all(pair.forward.microbatch > pair.backward.microbatch for pair in pairs)


@pytest.mark.parametrize(
    ("name", "pp", "m", "v", "words"),
    [
        ("interleaved-1f1b", 4, 6, 2, ["--pipeline-model-parallel-size 4", "4 or 8"]),
        ("interleaved-1f1b", 4, 8, 1, ["at least 2 stages", "--num-virtual-stages-per-pipeline-rank is 1"]),
        ("dualpipe-v", 4, 7, None, ["so 8 with", "there are 7", "choose zb-v"]),
        ("1f1b", 2, 4, 2, ["1 stage per rank", "leave it out"]),
        ("zb-v", 2, 4, 3, ["2 stages per rank"]),
        ("1f1b", 0, 4, None, ["--pipeline-model-parallel-size must be at least 1"]),
        ("gpipe", 2, 0, None, ["at least 1 micro-batch"]),
        ("2f2b", 2, 4, None, ["--pipeline-schedule 2f2b is not known", "dualpipe-v"]),
    ],
)
def test_refusals_name_flag_value_and_way_out(name: str, pp: int, m: int, v: int | None, words: list[str]) -> None:
    with pytest.raises(ScheduleError) as error:
        make_schedule(name, pp, m, v)
    for word in words:
        assert word in str(error.value)


# What torch.distributed.pipelining does, as the same text. Its classes want stages with a process group and
# make their lists in __init__, so the functions that make the list of one rank are called on a stand-in.


def torch_ranks(name: str, pp: int, m: int, v: int) -> list[str]:
    def stand_in(rank: int) -> SimpleNamespace:
        return SimpleNamespace(
            rank=rank, pp_group_size=pp, _n_microbatches=m, num_stages=pp * v, _num_stages=pp * v,
            n_local_stages=v, number_of_rounds=m // pp, microbatches_per_round=pp,
        )  # fmt: skip

    classes = {
        "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
        "zb-v": torch_schedules.ScheduleZBVZeroBubble,
        "dualpipe-v": torch_schedules.ScheduleDualPipeV,
    }
    lists = [classes[name]._calculate_single_rank_operations(stand_in(rank), rank) for rank in range(pp)]
    return [
        " ".join(str(action).removesuffix("OVERLAP_F_B") for action in actions if action is not None)
        for actions in lists
    ]


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "dualpipe-v"])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (3, 6), (4, 8), (4, 12)])
def test_same_order_as_torch(name: str, pp: int, m: int) -> None:
    ours, theirs = str(make_schedule(name, pp, m, 2)).splitlines(), torch_ranks(name, pp, m, 2)
    if name == "zb-v":  # The last weight gradients, which nobody waits for, may come in another order.
        ours, theirs = ([[a for a in line.split() if "W" not in a] for line in lines] for lines in (ours, theirs))
    assert ours == theirs
