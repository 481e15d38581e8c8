"""One answer between the scheduler that feeds it and whoever follows it.

The tokenizer has one id for each byte, so that most characters here are spread
over several ids. Tests turn the event loop by hand: `turn` lets every follower
read what there is.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import answers
from coordinator.answers import LiveAnswer
from coordinator.errors import Reason, SlackwaterError
from coordinator.stated_energy import StatedEnergy
from coordinator.tasks_port import (
    Accepted,
    AnswerEvent,
    AttemptBroken,
    AttemptStarted,
    AttemptSummary,
    Decision,
    Delta,
    Failed,
    Finished,
)
from coordinator.testing import FAKE_DIGEST, FakeTimers, FakeTokenizer, finished
from inference.assembler import Assembler
from inference.task import FinishReason, NodeId, PositionLogprobs, TaskId, TokenLogprob
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope
from protos.slackwater.common.v1.statement_pb2 import ENERGY_METHOD_ESTIMATE, ResultStatement

TOKENIZER = FakeTokenizer()
GRACE_S = 30.0
TEXT = "na\u00efve \U0001f469\u200d\U0001f467 STOP \u65e5\u672c end"
# Byte rows that are often whole characters, often not, and often stop strings.
PIECES = st.sampled_from([b"a", b"ST", b"OP", b"S", "\u00ef".encode(), "\U0001f469".encode(), b"\xf0\x9f", b"\xff"])
ID_ROWS = st.lists(PIECES, max_size=12).map(lambda pieces: tuple(b"".join(pieces)))
STOPS = st.lists(st.sampled_from(["STOP", "TO", "\u00efa", "aa"]), max_size=2, unique=True).map(tuple)


@dataclass
class Calls:
    stopped_at: list[int] = field(default_factory=list)
    abandoned: int = 0
    ended: int = 0
    timers: FakeTimers = field(default_factory=FakeTimers)

    def abandon(self) -> None:
        self.abandoned += 1

    def end(self) -> None:
        self.ended += 1


def new_answer(
    *, stop: Sequence[str] = (), streaming: bool = True, grace_s: float = GRACE_S
) -> tuple[LiveAnswer, Calls]:
    calls = Calls()
    answer = LiveAnswer(
        accepted=Accepted(
            task_id=TaskId("task"),
            model="model",
            manifest_digest=FAKE_DIGEST,
            prompt_tokens=7,
            resumable=True,
            seed=1,
        ),
        tokenizer=TOKENIZER,
        stop=stop,
        streaming=streaming,
        detach_grace_s=grace_s,
        call_later=calls.timers.call_later,
        on_stop_string=calls.stopped_at.append,
        on_abandoned=calls.abandon,
        on_ended=calls.end,
    )
    return answer, calls


class Reader:
    """Follows an answer in a task of its own, and holds its deltas to what they promise."""

    def __init__(self, answer: LiveAnswer, from_index: int = 0) -> None:
        self.from_index = from_index
        self.next_index = from_index
        self.events: list[AnswerEvent] = []
        self.ids: list[int] = []
        self.text = ""
        self.task = asyncio.create_task(self._read(answer))

    async def _read(self, answer: LiveAnswer) -> None:
        batches = answer.follow(self.from_index)
        try:
            async for batch in batches:
                assert batch, "a batch holds something"
                for event in batch:
                    self._take(event)
        finally:
            await batches.aclose()

    def _take(self, event: AnswerEvent) -> None:
        self.events.append(event)
        if isinstance(event, Delta):
            assert event.first_index == self.next_index, "neither a gap nor a repetition"
            self.next_index += len(event.token_ids)
            self.ids += event.token_ids
            self.text += event.text

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def text_of(ids: Sequence[int], stop: Sequence[str] = ()) -> str:
    """Return the text that an answer has shown after these ids."""
    return Assembler(TOKENIZER.detokenizer(), stop).feed(ids).text


def whole_of(ids: Sequence[int], stop: Sequence[str]) -> tuple[list[int], str]:
    """Return the ids that count, and the whole text of an answer."""
    assembler = Assembler(TOKENIZER.detokenizer(), stop)
    piece = assembler.feed(ids)
    return list(ids[: piece.stopped_at]), piece.text + assembler.finish()


def stops(ids: Sequence[int], stop: Sequence[str]) -> bool:
    return Assembler(TOKENIZER.detokenizer(), stop).feed(ids).stopped_at is not None


def feed(answer: LiveAnswer, ids: Sequence[int], first_index: int = 0, frame: int = 1) -> None:
    for start in range(0, len(ids), frame):
        answer.deliver(first_index + start, tuple(ids[start : start + frame]), ())


def failure(reason: Reason = Reason.NO_CAPACITY) -> SlackwaterError:
    return SlackwaterError(reason, "it failed")


def started(attempt: int, first_index: int = 0) -> AttemptStarted:
    return AttemptStarted(attempt=attempt, node_id=NodeId(f"node-{attempt}"), first_index=first_index)


def broken(attempt: int, delivered: int, reason: str = "stream_lost") -> AttemptBroken:
    return AttemptBroken(attempt=attempt, node_id=NodeId(f"node-{attempt}"), reason=reason, delivered_tokens=delivered)


# --- text and ids ------------------------------------------------------------------------------


@given(
    ids=ID_ROWS,
    stop=STOPS,
    cuts=st.sets(st.integers(0, 40)),
    streaming=st.booleans(),
    grace_s=st.sampled_from([0.0, GRACE_S]),
)
def test_ids_and_text_are_the_same_however_frames_cut_them(
    ids: tuple[int, ...], stop: tuple[str, ...], cuts: set[int], streaming: bool, grace_s: float
) -> None:
    """Mutation seen to fail here: keep all ids of the frame that completes a stop string."""

    async def run() -> None:
        answer, calls = new_answer(stop=stop, streaming=streaming, grace_s=grace_s)
        reader = Reader(answer)
        bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
        for start, end in pairwise(bounds):
            answer.deliver(start, ids[start:end], ())
            await turn()
        counted, text = whole_of(ids, stop)
        answer.finish(finished(answer.token_count))
        await turn()
        assert (reader.ids, reader.text) == (counted, text)
        assert answer.token_count == len(counted)
        assert calls.stopped_at == ([len(counted)] if stops(ids, stop) else [])
        assert isinstance(reader.events[0], Accepted)
        assert isinstance(reader.events[-1], Finished)
        assert reader.task.done()
        assert (calls.abandoned, calls.ended) == (0, 1)

    asyncio.run(run())


def test_what_a_node_sends_after_a_stop_is_dropped() -> None:
    """Mutation seen to fail here: no return where the answer has stopped."""

    async def run() -> None:
        answer, calls = new_answer(stop=["STOP"])
        reader = Reader(answer)
        feed(answer, b"go STOP it")
        feed(answer, b" and more", first_index=10)
        answer.finish(finished(7))
        await turn()
        assert (reader.text, reader.ids) == ("go ", list(b"go STOP"))
        assert calls.stopped_at == [7]

    asyncio.run(run())


def test_text_held_back_as_a_stop_string_comes_at_the_end_without_ids() -> None:
    async def run() -> None:
        answer, _ = new_answer(stop=["STOP"])
        reader = Reader(answer)
        feed(answer, b"a ST")
        await turn()
        assert reader.text == "a "
        answer.finish(finished(4))
        await turn()
        assert reader.events[-2:] == [Delta(first_index=4, token_ids=(), text="ST"), finished(4)]

    asyncio.run(run())


def test_logprobs_stay_beside_their_ids_and_end_with_them() -> None:
    """Mutation seen to fail here: keep all logprobs of the frame that completes a stop string."""

    async def run() -> None:
        answer, _ = new_answer(stop=["b"])
        reader = Reader(answer)
        positions = tuple(PositionLogprobs(TokenLogprob(token_id, -1.0, 1)) for token_id in b"abc")
        answer.deliver(0, tuple(b"abc"), positions)
        answer.finish(finished(2))
        late = Reader(answer, from_index=1)
        await turn()
        (delta,) = [event for event in reader.events if isinstance(event, Delta)]
        assert (delta.token_ids, delta.logprobs) == (tuple(b"ab"), positions[:2])
        (delta,) = [event for event in late.events if isinstance(event, Delta)]
        assert (delta.token_ids, delta.logprobs) == (tuple(b"b"), positions[1:2])

    asyncio.run(run())


# --- answers that do not stream ----------------------------------------------------------------


def test_what_does_not_stream_is_told_at_its_end_and_may_begin_again() -> None:
    """Mutation seen to fail here: discard leaves the assembler as it was."""

    async def run() -> None:
        answer, _ = new_answer(streaming=False, stop=["x"])
        reader = Reader(answer)
        feed(answer, b"first\xf0\x9f")
        await turn()
        assert not reader.ids
        answer.discard()
        assert answer.token_count == 0
        feed(answer, b"second")
        answer.finish(finished(6))
        await turn()
        assert (reader.text, bytes(reader.ids)) == ("second", b"second")

    asyncio.run(run())


def test_what_was_told_is_never_discarded() -> None:
    answer, _ = new_answer(grace_s=0.0)
    feed(answer, b"abc")
    with pytest.raises(AssertionError):
        answer.discard()


def test_a_stop_holds_although_the_node_was_given_up_in_the_same_moment() -> None:
    """One batch of a lying node completes a stop string and then contradicts itself.

    Mutations seen to fail here: discard in spite of the stop; finish as told.
    """

    async def run() -> None:
        answer, calls = new_answer(streaming=False, stop=["STOP"])
        reader = Reader(answer)
        feed(answer, b"go STOP it")
        answer.discard()
        answer.finish(finished(10, reason=FinishReason.LENGTH))
        await turn()
        assert (reader.text, len(reader.ids), calls.stopped_at) == ("go ", 7, [7])
        assert reader.events[-1] == finished(7)

    asyncio.run(run())


# --- following and attaching -------------------------------------------------------------------

# Feed so many ids; let the loop turn; attach from that index; let a follower leave.
FEED, TURN, ATTACH, LEAVE = "feed", "turn", "attach", "leave"
STEPS = st.lists(
    st.tuples(st.sampled_from([FEED, FEED, TURN, ATTACH, LEAVE]), st.integers(0, 12)), min_size=1, max_size=25
)


@given(ids=ID_ROWS, stop=STOPS, steps=STEPS)
def test_whoever_attaches_anywhere_at_any_time_misses_nothing_and_hears_nothing_twice(
    ids: tuple[int, ...], stop: tuple[str, ...], steps: list[tuple[str, int]]
) -> None:
    """Mutations seen to fail here: drop a delta that begins before the index; keep all its text; wake one."""

    async def run() -> None:
        answer, calls = new_answer(stop=stop)
        readers = [Reader(answer)]
        gone: list[Reader] = []
        fed = 0
        for step, amount in steps:
            if step == FEED and amount:
                answer.deliver(fed, ids[fed : fed + amount], ())
                if calls.stopped_at:
                    break
                fed = min(fed + amount, len(ids))
            elif step == TURN:
                await turn()
            elif step == ATTACH:
                readers.append(Reader(answer, min(amount, answer.token_count)))
            elif step == LEAVE and len(readers) > 1:
                gone.append(readers.pop(amount % len(readers)))
                await gone[-1].leave()
        # Those that left come back where they were.
        readers += [Reader(answer, reader.next_index) for reader in gone]
        fed = answer.token_count
        answer.finish(finished(fed))
        readers.append(Reader(answer, fed // 2))
        await turn()
        counted, text = whole_of(ids[:fed], stop)
        for reader in readers:
            assert reader.task.done()
            assert isinstance(reader.events[-1], Finished)
            assert reader.ids == counted[reader.from_index :]
            assert text_of(counted[: reader.from_index], stop) + reader.text == text
        for reader in gone:
            assert reader.ids == counted[reader.from_index : reader.next_index]

    asyncio.run(run())


def test_an_index_that_is_still_to_come_is_waited_for() -> None:
    async def run() -> None:
        answer, _ = new_answer()
        reader = Reader(answer, from_index=3)
        feed(answer, b"abcde", frame=2)
        answer.finish(finished(5))
        await turn()
        assert (bytes(reader.ids), reader.text) == (b"de", "de")

    asyncio.run(run())


def test_an_ended_answer_is_told_whole_to_whoever_comes_later() -> None:
    async def run() -> None:
        answer, calls = new_answer()
        answer.start_attempt(started(1))
        feed(answer, b"abc")
        answer.finish(finished(3))
        reader = Reader(answer)
        await turn()
        assert [type(event) for event in reader.events] == [Accepted, AttemptStarted, Delta, Delta, Delta, Finished]
        assert reader.text == "abc"
        assert calls.timers.waiting == 0

    asyncio.run(run())


def test_a_failure_is_the_last_event() -> None:
    async def run() -> None:
        answer, calls = new_answer()
        reader = Reader(answer)
        feed(answer, b"abc")
        error = failure()
        answer.fail(error)
        await turn()
        assert reader.events[-1] == Failed(error)
        assert reader.task.done()
        assert (answer.outcome, calls.ended) == (Failed(error), 1)

    asyncio.run(run())


# --- detaching ---------------------------------------------------------------------------------


def test_a_task_without_grace_is_given_up_at_once_when_its_follower_leaves() -> None:
    """Mutation seen to fail here: detach only where there is a grace."""

    async def run() -> None:
        answer, calls = new_answer(grace_s=0.0)
        reader = Reader(answer)
        feed(answer, b"abc")
        await turn()
        assert calls.abandoned == 0
        await reader.leave()
        assert calls.abandoned == 1
        assert calls.timers.waiting == 0

    asyncio.run(run())


def test_a_follower_that_leaves_after_the_end_gives_nothing_up() -> None:
    """The client closes between the last event and the end of the iterator."""

    async def run() -> None:
        answer, calls = new_answer(grace_s=0.0)
        answer.finish(finished(0))
        batches = answer.follow()
        assert await anext(batches) == (answer.accepted, finished(0))
        await batches.aclose()
        assert calls.abandoned == 0

    asyncio.run(run())


def test_a_task_is_given_up_when_nobody_has_followed_it_for_the_grace() -> None:
    """Whether its client left, or never came. Mutation seen to fail here: no timer before the first follower."""

    async def run() -> None:
        answer, calls = new_answer()
        calls.timers.advance(GRACE_S - 1)
        reader = Reader(answer)
        await turn()
        calls.timers.advance(GRACE_S * 2)
        assert calls.abandoned == 0
        await reader.leave()
        calls.timers.advance(GRACE_S - 1)
        assert calls.abandoned == 0
        calls.timers.advance(1)
        assert calls.abandoned == 1
        never, calls = new_answer()
        assert never.outcome is None
        calls.timers.advance(GRACE_S)
        assert calls.abandoned == 1

    asyncio.run(run())


def test_attaching_within_the_grace_keeps_the_task_and_one_of_two_followers_is_enough() -> None:
    """Mutation seen to fail here: start the timer although somebody follows."""

    async def run() -> None:
        answer, calls = new_answer()
        first, second = Reader(answer), Reader(answer)
        await turn()
        await first.leave()
        assert calls.timers.waiting == 0
        await second.leave()
        calls.timers.advance(GRACE_S - 1)
        Reader(answer)
        await turn()
        calls.timers.advance(GRACE_S)
        assert calls.abandoned == 0
        answer.fail(failure())
        await turn()

    asyncio.run(run())


def test_the_end_of_a_detached_task_stops_its_timer() -> None:
    """Mutation seen to fail here: no cancel in _end."""
    answer, calls = new_answer()
    answer.fail(failure())
    assert calls.timers.waiting == 0


def test_a_detached_task_piles_up_a_megabyte_of_text_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation seen to fail here: count what a follower reads as well."""
    assert answers.DETACHED_TEXT_CHARACTERS_MAX == 1_000_000
    monkeypatch.setattr(answers, "DETACHED_TEXT_CHARACTERS_MAX", 10)

    async def run() -> None:
        answer, calls = new_answer()
        reader = Reader(answer)
        await turn()
        feed(answer, b"x" * 50)
        await turn()
        await reader.leave()
        feed(answer, b"x" * 10, first_index=50)
        assert calls.abandoned == 0
        feed(answer, b"x", first_index=60)
        assert calls.abandoned == 1

    asyncio.run(run())


# --- the summary -------------------------------------------------------------------------------


def summary_of(
    attempt: int, first_index: int, delivered: int, outcome: str, *, energy: StatedEnergy | None = None
) -> AttemptSummary:
    return AttemptSummary(
        attempt=attempt,
        node_id=NodeId(f"node-{attempt}"),
        first_index=first_index,
        delivered_tokens=delivered,
        outcome=outcome,
        signed=energy is not None,
        energy=energy,
    )


def test_the_summary_tells_of_each_attempt_what_it_delivered_and_how_it_ended() -> None:
    answer, _ = new_answer(stop=["STOP"])
    assert answer.summary().status == "queued"
    answer.start_attempt(started(1))
    feed(answer, b"abc")
    running = answer.summary()
    assert (running.status, running.attempts) == ("running", (summary_of(1, 0, 3, "running"),))
    answer.break_attempt(broken(1, 3))
    answer.start_attempt(started(2, first_index=3))
    feed(answer, b"de", first_index=3)
    stated = ResultStatement(energy_mj=1500, energy_method=ENERGY_METHOD_ESTIMATE)
    signed = Finished(
        finish_reason=FinishReason.LENGTH,
        prompt_tokens=7,
        completion_tokens=5,
        header=SignedEnvelope(),
        statement=SignedEnvelope(payload=stated.SerializeToString()),
        node_public_key=b"",
    )
    answer.finish(signed)
    ended = answer.summary()
    assert (ended.status, ended.prompt_tokens, ended.completion_tokens, ended.error) == ("finished", 7, 5, None)
    assert ended.attempts == (
        summary_of(1, 0, 3, "stream_lost"),
        summary_of(2, 3, 2, "finished", energy=StatedEnergy(1500, "estimate")),
    )


def test_the_summary_tells_why_each_attempt_went_where_it_went_and_when_its_answer_began() -> None:
    """Mutation seen to fail here: no first token of an attempt that broke."""
    decision = Decision(why="late", engine_id="engine", cost_micro=7, first_token_ms=1.5, token_ms=2.5, tail=3.5)
    answer, _ = new_answer()
    answer.start_attempt(replace(started(1), decision=decision))
    feed(answer, b"abc")
    answer.break_attempt(replace(broken(1, 3), first_token_ms=4.5))
    (attempt,) = answer.summary().attempts
    assert (attempt.decision, attempt.first_token_ms) == (decision, 4.5)


def test_the_summary_calls_an_attempt_stopped_that_a_stop_string_ended() -> None:
    answer, _ = new_answer(stop=["STOP"])
    answer.start_attempt(started(1))
    feed(answer, b"STOP")
    answer.finish(finished(4))
    assert answer.summary().attempts == (summary_of(1, 0, 4, "stopped"),)


def test_the_summary_does_not_call_an_attempt_finished_whose_goodbye_was_lost() -> None:
    """Mutation seen to fail here: take the last attempt for the finishing one, whatever became of it."""
    answer, _ = new_answer()
    answer.start_attempt(started(1))
    feed(answer, b"ab")
    answer.break_attempt(broken(1, 2))
    answer.finish(finished(2))
    assert answer.summary().attempts == (summary_of(1, 0, 2, "stream_lost"),)


@pytest.mark.parametrize(
    ("reason", "status"), [(Reason.TASK_CANCELLED, "cancelled"), (Reason.ATTEMPTS_EXHAUSTED, "failed")]
)
def test_the_summary_carries_the_error_and_tells_a_cancellation_from_a_failure(reason: Reason, status: str) -> None:
    answer, _ = new_answer()
    error = failure(reason)
    answer.fail(error)
    assert (answer.summary().status, answer.summary().error) == (status, error)
