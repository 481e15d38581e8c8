"""A fake engine's steps take what the curve of a real one says, and prompts are computed in turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.fake_steps import StepPlan, StepTimes

TIMES = StepTimes(
    step_base_ms=10.0,
    step_sequence_ms=0.5,
    step_kv_token_ms=0.001,
    prefill_token_ms=0.1,
    request_ms=5.0,
    step_tokens_max=100,
)


def test_a_step_takes_its_base_and_what_each_part_adds() -> None:
    """Mutations seen to fail here: each of the four terms left out."""
    plan = StepPlan[str](TIMES)
    assert plan.next(4, 1000) == (pytest.approx(0.010 + 0.002 + 0.001), [])
    plan.add("a", 50)
    # The answer that begins is one of the step's.
    assert plan.next(4, 1000) == (pytest.approx(0.010 + 0.0025 + 0.001 + 0.005), ["a"])


def test_a_long_prompt_takes_several_steps_and_the_next_one_what_is_left_of_them() -> None:
    """Mutations seen to fail here: answers take no room from prompts; a prompt is whole at once."""
    plan = StepPlan[str](TIMES)
    plan.add("long", 150)
    plan.add("short", 30)
    steps = [plan.next(20, 0)[1] for _ in range(3)]
    assert steps == [[], ["long"], ["short"]]


def test_a_prompt_that_is_given_up_is_not_computed() -> None:
    plan = StepPlan[str](TIMES)
    plan.add("a", 50)
    plan.drop("a")
    plan.drop("never there")
    assert plan.next(0, 0) == (pytest.approx(0.010), [])


@given(st.lists(st.integers(1, 400), max_size=20), st.integers(0, 150))
def test_every_prompt_is_completed_once_and_in_turn(prompts: list[int], answers: int) -> None:
    plan = StepPlan[int](TIMES)
    for number, tokens in enumerate(prompts):
        plan.add(number, tokens)
    done: list[int] = []
    for _ in range(sum(prompts) + 1):
        done += plan.next(answers, 0)[1]
    assert done == list(range(len(prompts)))
