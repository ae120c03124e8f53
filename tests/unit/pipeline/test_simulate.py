"""The text form of actions, the simulator, its refusals and proofs of deadlock, and the passes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_moe.pipeline.actions import (
    Action,
    Kind,
    Pair,
    Schedule,
    ScheduleError,
    Step,
    parse,
    parse_schedule,
    stage_to_rank,
)
from megatron_moe.pipeline.deadlock import DeadlockError, prove_no_deadlock
from megatron_moe.pipeline.passes import add_communication, add_grad_reduction
from megatron_moe.pipeline.schedules import make_schedule
from megatron_moe.pipeline.simulate import Durations, simulate

with_microbatch = st.builds(
    Action,
    st.sampled_from([kind for kind in Kind if kind is not Kind.REDUCE_GRAD]),
    st.integers(0, 99),
    st.integers(0, 999),
)
steps = st.one_of(
    with_microbatch,
    st.builds(Action, st.just(Kind.REDUCE_GRAD), st.integers(0, 99)),
    st.builds(
        Pair,
        st.builds(Action, st.just(Kind.F), st.integers(0, 9), st.integers(0, 9)),
        st.builds(Action, st.just(Kind.B), st.integers(0, 9), st.integers(0, 9)),
    ),
)


@given(steps)
def test_text_form_round_trips(step: Step) -> None:
    assert parse(str(step)) == step


def test_schedule_text_round_trips() -> None:
    schedule = add_grad_reduction(add_communication(make_schedule("dualpipe-v", 3, 7)))
    assert parse_schedule(str(schedule), "dualpipe-v", 7, 6, "v") == schedule


@pytest.mark.parametrize("text", ["", "F0", "1F", "1X0", "1F0 ", "-1F0", "1REDUCE_GRAD3", "(1F0)", "(1B0;1F0)"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not a"):
        parse(text)


def test_placements() -> None:
    assert [stage_to_rank("loop", stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [stage_to_rank("v", stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


def written(text: str, num_microbatches: int, num_stages: int) -> Schedule:
    return parse_schedule(text, "by hand", num_microbatches, num_stages, "loop")


def test_times_of_single_actions() -> None:
    """Durations differ per stage, communication takes 10; worked out by hand."""
    durations = Durations(forward=[1.0, 2.0], backward=3.0, weight=[4.0, 5.0], comm=10.0)
    timeline = simulate(written("0F0 0I0 0W0\n1F0 1B0", 1, 2), durations)
    assert {str(event.step): (event.start, event.end) for event in timeline.events} == {
        "0F0": (0, 1),
        "1F0": (11, 13),
        "1B0": (13, 21),
        "0I0": (31, 34),
        "0W0": (34, 38),
    }
    assert timeline.length == 38
    assert timeline.busy == (8, 10)
    assert timeline.step_bubble == (30, 28)
    assert timeline.span_bubble == (30, 0)


def test_a_pair_waits_for_both_inputs_and_gives_both_results_at_its_end() -> None:
    text = "0F0 0F1 0B0 0B1\n1F0 (1F1;1B0) 1B1"
    starts = {str(event.step): event.start for event in simulate(written(text, 2, 2)).events}
    assert starts == {"0F0": 0, "0F1": 1, "1F0": 1, "(1F1;1B0)": 2, "0B0": 5, "1B1": 5, "0B1": 7}


def test_a_receive_that_is_reached_late_holds_up_the_transfer() -> None:
    slow = Durations(comm=0.5)
    early = written("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", 1, 2)
    assert simulate(early, slow).length == 1 + 0.5 + 1 + 2 + 0.5 + 2
    text = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    late = {str(event.step): event.start for event in simulate(written(text, 2, 2), slow).events}
    assert late["1F1"] == 3.0  # sent at 2, received from 2.5 on, when 1F0 has ended


def test_a_scrambled_schedule_is_refused_with_the_waiting_ranks_named() -> None:
    scrambled = written("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", 2, 2)
    with pytest.raises(DeadlockError) as error:
        simulate(scrambled)
    assert "rank 0 waits at 0B0 for 1B0 of rank 1; rank 1 waits at 1F1 for 0F1 of rank 0" in str(error.value)


def test_a_rank_that_waits_for_itself_is_named() -> None:
    with pytest.raises(DeadlockError, match="rank 0 waits at 0B0 for 0F0"):
        simulate(written("0B0 0F0", 1, 1))


def test_sends_that_block_each_other_are_refused() -> None:
    """Both ranks send first: fine if sends are asynchronous, a deadlock if they block."""
    text = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    crossed = written(text, 2, 2)
    simulate(crossed)
    with pytest.raises(DeadlockError) as error:
        prove_no_deadlock(crossed)
    expected = "rank 0 waits at 0SEND_F1 for 1RECV_F1 of rank 1; rank 1 waits at 1SEND_B0 for 0RECV_B0 of rank 0"
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0 0B0\n1F0",
            "the backward for the input of stage 1, micro-batch 0, is there 0 times instead of 1",
        ),
        ("0F0 0F0 0B0\n1F0 1B0", "the forward of stage 0, micro-batch 0, is there 2 times"),
        ("0F0 0B0 0W0\n1F0 1B0", "the backward for the weights of stage 0, micro-batch 0, is there 2 times"),
        ("0F0 0B0\n1F0 1W0 1I0", "rank 1 has 1W0 before the backward for the input"),
        ("0F0 0B0 1F0\n1B0", "rank 0 has 1F0, but stage 1 lives on rank 1"),
        ("0F0 0B0 2F0\n1F0 1B0", "rank 0 has 2F0, but there are only 2 stages"),
        ("0F0 0B0 0F1\n1F0 1B0", "the forward of stage 0, micro-batch 1, is there 1 times instead of 0"),
        ("0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1B0 1SEND_B0", "1RECV_F0 is there 0 times instead of 1"),
        ("0SEND_F0 0F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0", "0SEND_F0 before the action that makes"),
        ("0F0 0REDUCE_GRAD 0B0\n1F0 1B0", "0REDUCE_GRAD before the last weight gradient"),
    ],
)
def test_what_is_missing_double_or_misplaced_is_named(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(written(text, 1, 2))


def test_a_receive_after_its_consumer_is_a_deadlock() -> None:
    text = "0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1RECV_F0 1B0 1SEND_B0"
    for run in (simulate, prove_no_deadlock):
        with pytest.raises(DeadlockError, match="rank 1 waits at 1F0 for 0F0 of rank 0"):
            run(written(text, 1, 2))


def test_where_the_passes_put_things() -> None:
    complete = add_grad_reduction(add_communication(make_schedule("1f1b", 2, 2)))
    assert str(complete).splitlines() == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
    ]


def test_each_send_follows_its_producer_and_stages_on_one_rank_do_not_send() -> None:
    complete = add_communication(make_schedule("zb-v", 3, 6))
    for rank, steps_of_rank in enumerate(complete.ranks):
        producer: Step | None = None
        for step in steps_of_rank:
            action = step.parts[0]
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                assert producer is not None
                assert (action.stage, action.microbatch) == (
                    producer.parts[0].stage,
                    producer.parts[0].microbatch,
                )
                assert complete.rank_of(action.partner.stage) != rank
            else:
                producer = step


def test_receives_of_a_busy_rank_stand_before_what_keeps_it_busy() -> None:
    """Rank 1 computes for 10; what rank 0 sends meanwhile must be able to arrive meanwhile."""
    durations = Durations(forward=[1.0, 10.0], comm=2.0)
    last = add_communication(make_schedule("gpipe", 2, 3), durations).ranks[1]
    assert [str(step) for step in last[:6]] == ["1RECV_F0", "1RECV_F1", "1RECV_F2", "1F0", "1F1", "1F2"]


def test_schedules_are_values() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    assert schedule == make_schedule("1f1b", 2, 4)
    assert replace(schedule, name="other") != schedule
