"""The transcript: every event once, no text lost or doubled, however often the stream breaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slackwater._task_messages import event_from_proto
from slackwater._transcript import TOKENS_MAX, ReattachPause, Transcript
from slackwater.errors import MalformedAnswer, SlackwaterError
from slackwater.events import Accepted, AttemptBroken, AttemptStarted, Delta, Finished
from slackwater.testing import ScriptedAnswer

ACCEPTED = Accepted(task_id="t", model="m", manifest_digest="d", prompt_tokens=1, resumable=True, seed=1)

texts = st.text(max_size=4)


def read(script: ScriptedAnswer, breaks_after: list[int]) -> tuple[Transcript, list[object]]:
    """Play streams that break after so many events each, then one that does not."""
    transcript = Transcript()
    seen: list[object] = []
    for limit in [*breaks_after, None]:
        transcript.reattached()
        for event in script.events(transcript.next_index)[:limit]:
            converted = event_from_proto(event)
            assert not isinstance(converted, SlackwaterError)
            new = transcript.accept(converted)
            if new is not None:
                seen.append(new)
        if transcript.finished is not None:
            break
    return transcript, seen


# Mutations tried: `_tail_repeated` not set in `reattached` (tail doubled), `end <= next_index` dropped
# (MalformedAnswer after a break inside the answer), attempts not compared (doubled AttemptStarted).
@given(
    pieces=st.lists(texts, min_size=1, max_size=6),
    tail=texts,
    ids_per_piece=st.integers(1, 3),
    seam=st.none() | st.integers(0, 5),
    breaks_after=st.lists(st.integers(0, 14), max_size=8),
)
def test_breaking_the_stream_after_any_number_of_events_changes_nothing(
    pieces: list[str], tail: str, ids_per_piece: int, seam: int | None, breaks_after: list[int]
) -> None:
    seam = seam if seam is not None and seam < len(pieces) else None
    script = ScriptedAnswer(pieces=pieces, tail=tail, ids_per_piece=ids_per_piece, seam=seam, task_id="t")
    undisturbed, expected = read(script, [])
    broken, seen = read(script, breaks_after)
    assert broken.text == undisturbed.text == script.text
    assert broken.token_ids == undisturbed.token_ids == script.token_ids
    assert [type(event) for event in seen] == [type(event) for event in expected]
    assert broken.completion().broken_attempts == undisturbed.completion().broken_attempts


def test_a_gap_in_the_ids_is_refused() -> None:
    transcript = Transcript()
    transcript.accept(ACCEPTED)
    transcript.accept(Delta(first_index=0, token_ids=(5, 6), text="a"))
    with pytest.raises(MalformedAnswer, match="expected was 2"):
        transcript.accept(Delta(first_index=3, token_ids=(7,), text="b"))
    with pytest.raises(MalformedAnswer, match="expected was 2"):
        transcript.accept(Delta(first_index=1, token_ids=(6, 7), text="b"))
    with pytest.raises(MalformedAnswer, match="expected was 2"):
        transcript.accept(Delta(first_index=3, token_ids=(), text="b"))


def test_a_delta_that_was_seen_is_dropped_with_its_text() -> None:
    transcript = Transcript()
    transcript.accept(Delta(first_index=0, token_ids=(5, 6), text="a"))
    assert transcript.accept(Delta(first_index=0, token_ids=(5, 6), text="a")) is None
    assert transcript.text == "a"


def test_another_tasks_acceptance_is_refused() -> None:
    transcript = Transcript()
    transcript.accept(ACCEPTED)
    other = Accepted(task_id="u", model="m", manifest_digest="d", prompt_tokens=1, resumable=True, seed=1)
    with pytest.raises(MalformedAnswer, match="task u"):
        transcript.accept(other)


def test_a_repeated_tail_that_differs_is_refused() -> None:
    transcript = Transcript()
    transcript.accept(Delta(first_index=0, token_ids=(), text="abc"))
    transcript.reattached()
    with pytest.raises(MalformedAnswer, match="not the same"):
        transcript.accept(Delta(first_index=0, token_ids=(), text="abd"))


def test_an_endless_answer_is_refused() -> None:
    transcript = Transcript(from_index=5)
    with pytest.raises(MalformedAnswer, match="more than"):
        transcript.accept(Delta(first_index=5, token_ids=tuple(range(TOKENS_MAX + 1)), text=""))


def test_logprobs_come_one_for_each_id() -> None:
    script = ScriptedAnswer(pieces=["a"], task_id="t")
    delta = script.events()[2]
    for _ in range(2):
        delta.delta.logprobs.add()
    event = event_from_proto(delta)
    assert isinstance(event, Delta)
    with pytest.raises(MalformedAnswer, match="2 logprobs came with 1 ids"):
        Transcript().accept(event)


def test_a_finish_without_an_acceptance_is_no_answer() -> None:
    transcript = Transcript()
    finished = event_from_proto(ScriptedAnswer(pieces=["a"], task_id="t").events()[-1])
    assert isinstance(finished, Finished)
    transcript.accept(finished)
    with pytest.raises(MalformedAnswer, match="had not accepted"):
        transcript.completion()


def test_attempts_are_told_once() -> None:
    transcript = Transcript()
    started = AttemptStarted(attempt=1, node_id="n", first_index=0)
    broken = AttemptBroken(attempt=1, node_id="n", reason="node_silent", delivered_tokens=0)
    assert [transcript.accept(event) for event in (started, started, broken, broken)] == [started, None, broken, None]


def test_the_first_attachment_is_immediate_and_the_pauses_grow_to_their_maximum() -> None:
    pause = ReattachPause(window_s=30.0)
    pauses = [pause.next_pause_s(0.0, 1.0) for _ in range(9)]
    assert pauses == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_the_window_ends_and_progress_opens_it_again() -> None:
    pause = ReattachPause(window_s=10.0)
    assert pause.next_pause_s(100.0, 0.0) == 0.0
    assert pause.next_pause_s(110.5, 0.0) is None
    pause.progressed()
    assert pause.next_pause_s(110.5, 0.0) == 0.0


def test_what_the_coordinator_asks_for_is_waited_but_not_past_the_window() -> None:
    pause = ReattachPause(window_s=10.0)
    assert pause.next_pause_s(0.0, 0.0, retry_after_s=3.0) == 3.0
    assert pause.next_pause_s(3.0, 0.0, retry_after_s=8.0) is None


# The first version computed 2 ** failures, which overflowed after 1,025 of them.
@given(failures=st.integers(1, 2000), jitter=st.floats(0, 1))
def test_no_number_of_failures_makes_a_pause_longer_than_its_maximum(failures: int, jitter: float) -> None:
    pause = ReattachPause(window_s=30.0)
    for _ in range(failures):
        pause_s = pause.next_pause_s(0.0, jitter)
        assert pause_s is not None
        assert 0.0 <= pause_s <= 2.0
