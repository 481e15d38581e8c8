"""Decisions in plain words: each reason has its own, and what came is set against what was expected."""

from dataclasses import replace

import pytest
from slackwater.cli.arguments import micro_credits
from slackwater.cli.explain import WAITING, WHY, why_lines
from slackwater.cli.session import UsageError
from slackwater.events import AttemptRecord, Decision, Task, TaskError, Usage, Waiting

from coordinator.scheduler.records import WaitingFor, Why

DECISION = Decision(why="late", engine_id="engine", cost_micro=7_000, first_token_ms=1_500.0, token_ms=10.0, tail=2.0)
ATTEMPT = AttemptRecord(
    attempt=1,
    node_id="attic",
    first_index=0,
    delivered_tokens=8,
    outcome="finished",
    signed=True,
    energy_j=None,
    energy_method="",
    decision=DECISION,
    first_token_ms=250.0,
)
TASK = Task(task_id="task-1", status="finished", usage=Usage(3, 8), attempts=(ATTEMPT,), error=None)


def lines(**changes: object) -> list[str]:
    return list(why_lines(replace(TASK, **changes)))[1:]


def of_attempt(**changes: object) -> str:
    (line,) = lines(attempts=(replace(ATTEMPT, **changes),))
    return line


def test_every_reason_has_words() -> None:
    """Mutations seen to fail here: a row of either table deleted."""
    assert WHY.keys() == {why.value for why in Why}
    assert WAITING.keys() == {reason.value for reason in WaitingFor}


def test_an_attempt_is_one_line_of_why_what_was_expected_and_what_came() -> None:
    (line,) = lines()
    assert line == (
        "attempt 1 on attic: no engine that would keep the target became free in time, so the one that would be done "
        "first; its owner asked for 0.007000 credits. Its first token was expected after 1.5 s, 19 times in 20 after "
        "3.0 s at most, and 10 ms for each that follows; it came after 250 ms. It finished after 8 tokens."
    )


def test_each_end_has_its_words() -> None:
    """Mutation seen to fail here: "none came" said of an attempt that still runs."""
    lost = of_attempt(outcome="stream_lost", delivered_tokens=1)
    assert lost.endswith("It broke off after 1 token: stream lost.")
    silent = of_attempt(outcome="node_silent", delivered_tokens=0, first_token_ms=None)
    assert silent.endswith("none came. It broke off after 0 tokens: node silent.")
    running = of_attempt(outcome="running", delivered_tokens=0, first_token_ms=None)
    assert running.endswith("that follows; none has come yet. It runs with 0 tokens.")
    assert of_attempt(outcome="stopped").endswith("A stop string ended it after 8 tokens.")


def test_what_an_older_coordinator_did_not_keep_is_said_to_be_missing() -> None:
    assert of_attempt(decision=None, first_token_ms=None) == (
        "attempt 1 on attic: why it was chosen was not kept. It finished after 8 tokens."
    )


def test_a_reason_of_a_newer_coordinator_is_shown_as_it_is() -> None:
    assert "hedged; its owner" in of_attempt(decision=replace(DECISION, why="hedged"))
    assert lines(attempts=(), waiting=Waiting(reason="moon", waited_ms=5))[0] == "It has waited for 5 ms: moon."


def test_a_task_that_waits_says_for_what_and_how_long() -> None:
    assert lines(attempts=(), waiting=Waiting(reason="no_free_slot", waited_ms=12_340)) == [
        "It has waited for 12.3 s: every engine is full."
    ]


def test_a_failure_is_said_at_the_end_and_no_name_reaches_a_terminal_with_its_control_characters() -> None:
    """Mutation seen to fail here: the line as it came."""
    assert lines(error=TaskError(reason="QUEUE_TIMEOUT", message="no slot"))[-1] == "It failed: no slot (QUEUE_TIMEOUT)"
    assert "attempt 1 on [31mevil: " in of_attempt(node_id="\x1b[31mevil")


def test_a_price_is_told_in_credits() -> None:
    """Mutation seen to fail here: cut off instead of rounded."""
    assert (micro_credits(0.5), micro_credits(0.000001), micro_credits(0.000249)) == (500_000, 1, 249)
    for wrong in (0.0, -1.0, float("nan"), float("inf"), 1e10):
        with pytest.raises(UsageError):
            micro_credits(wrong)
