"""The simulator's engine answers as the queue that knows all requests beforehand, and can be left at any time."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.batching import Answer, Request, serve
from coordinator.planning.curves import EngineCurve
from coordinator.planning.simulation.engine import Engine, What

CURVE = EngineCurve(
    step_base_ms=10.0,
    step_sequence_ms=1.0,
    step_kv_token_ms=0.01,
    prefill_token_ms=0.1,
    request_ms=5.0,
    kv_tokens_max=300,
    slots_max=4,
    step_tokens_max=64,
)
REQUESTS = st.lists(
    st.builds(
        lambda gap, prompt, answer, kept: (gap, prompt, answer, min(kept, prompt - 1)),
        st.one_of(st.floats(0.0, 2_000.0), st.sampled_from([0.0, 10.0, 11.0])),
        st.integers(1, 200),
        st.integers(1, 60),
        st.integers(0, 200),
    ),
    min_size=1,
    max_size=25,
)
Drawn = list[tuple[float, int, int, int]]


def arriving(drawn: Drawn) -> list[Request]:
    now_ms, requests = 0.0, []
    for gap_ms, prompt, answer, kept in drawn:
        now_ms += gap_ms
        requests.append(Request(now_ms, prompt, answer, kept))
    return requests


class Watched:
    """An engine whose happenings are kept, by request."""

    def __init__(self, curve: EngineCurve = CURVE) -> None:
        self.engine: Engine[int] = Engine(curve)
        self.first_ms: dict[int, float] = {}
        self.last_ms: dict[int, float] = {}

    def submit(self, number: int, request: Request) -> None:
        self.engine.submit(
            number,
            request.prompt_tokens,
            request.answer_tokens,
            request.arrival_ms,
            cached_tokens=request.cached_tokens,
        )

    def advance(self, to_ms: float) -> None:
        for happening in self.engine.advance(to_ms):
            times = self.first_ms if happening.what is What.FIRST_TOKEN else self.last_ms
            assert happening.key not in times, "told twice"
            times[happening.key] = happening.at_ms

    def finish(self) -> None:
        while self.engine.next_ms < math.inf:
            self.advance(self.engine.next_ms)


def answers(requests: Sequence[Request], looked_at_ms: Sequence[float] = ()) -> tuple[list[Answer], int]:
    """Serve them one by one, looking at the engine at those times. Return also how often places were given up."""
    watched = Watched()
    moments: list[tuple[float, int, Request | None]] = [
        *((one.arrival_ms, number, one) for number, one in enumerate(requests)),
        # After those who come in the same moment, as the caller may not look before they are told.
        *((at_ms, len(requests), None) for at_ms in looked_at_ms),
    ]
    for at_ms, number, request in sorted(moments, key=lambda moment: moment[:2]):
        if request is None:
            watched.advance(at_ms)
        else:
            watched.submit(number, request)
    watched.finish()
    wait_ms = CURVE.request_ms
    assert len(watched.engine) == 0
    assert watched.engine.kv_tokens == 0
    return [
        Answer(watched.first_ms[number] + wait_ms, watched.last_ms[number] + wait_ms, 0)
        for number in range(len(requests))
    ], watched.engine.preemptions


@given(drawn=REQUESTS)
def test_it_gives_the_answers_of_the_queue_that_knows_all_requests(drawn: Drawn) -> None:
    requests = arriving(drawn)
    served = serve(CURVE, requests)
    simulated, preemptions = answers(requests)
    assert simulated == [replace(answer, preemptions=0) for answer in served]
    assert preemptions == sum(answer.preemptions for answer in served)


@given(drawn=REQUESTS, looked_at_ms=st.lists(st.floats(0.0, 20_000.0), max_size=20))
def test_looking_changes_nothing(drawn: Drawn, looked_at_ms: list[float]) -> None:
    requests = arriving(drawn)
    assert answers(requests, looked_at_ms) == answers(requests)


def stepped(requests: Sequence[Request]) -> list[tuple[float, float]]:
    """Return first and last times of prompts that come one by one: one step after the other, nothing at once."""
    now_ms, waiting, running, times = 0.0, list(enumerate(requests)), {}, {}
    while waiting or running:
        if not running and waiting[0][1].arrival_ms > now_ms:
            now_ms = waiting[0][1].arrival_ms
        begun = None
        if waiting and waiting[0][1].arrival_ms <= now_ms:
            begun = waiting.pop(0)
        held = sum(one.prompt_tokens + done for one, done in running.values())
        batch = len(running)
        if begun is not None:
            held += begun[1].prompt_tokens + 1
            batch += 1
        now_ms += CURVE.step_ms(batch, held) + (CURVE.prefill_ms(begun[1].prompt_tokens) if begun else 0.0)
        running = {number: (one, done + 1) for number, (one, done) in running.items()}
        if begun is not None:
            running[begun[0]] = (begun[1], 1)
            times[begun[0]] = (now_ms, now_ms)
        for number, (one, done) in list(running.items()):
            if done == one.answer_tokens:
                times[number] = (times[number][0], now_ms)
                del running[number]
    return [times[number] for number in range(len(requests))]


@given(
    drawn=st.lists(st.tuples(st.floats(300.0, 900.0), st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=12)
)
def test_blocks_of_steps_are_the_steps_one_after_the_other(drawn: list[tuple[float, int, int]]) -> None:
    """An oracle that takes every step by itself. Prompts fit into one step, and memory is never full."""
    requests = arriving([(gap, prompt, answer, 0) for gap, prompt, answer in drawn])
    simulated, preemptions = answers(requests)
    assert preemptions == 0
    for answer, (first_ms, last_ms) in zip(simulated, stepped(requests), strict=True):
        assert answer.first_token_ms == pytest.approx(first_ms + CURVE.request_ms)
        assert answer.last_token_ms == pytest.approx(last_ms + CURVE.request_ms)


@given(drawn=REQUESTS, share=st.floats(0.0, 1.0))
def test_tokens_at_any_time_lie_between_first_and_last(drawn: Drawn, share: float) -> None:
    requests = arriving(drawn)
    expected, _ = answers(requests)
    watched = Watched()
    for number, request in enumerate(requests):
        watched.submit(number, request)
    at_ms = requests[-1].arrival_ms + share * (expected[-1].last_token_ms - requests[-1].arrival_ms)
    watched.advance(at_ms)
    for number, (request, answer) in enumerate(zip(requests, expected, strict=True)):
        if number in watched.last_ms:
            assert answer.last_token_ms - CURVE.request_ms <= at_ms
            continue
        tokens = watched.engine.tokens(number, at_ms)
        assert 0 <= tokens < request.answer_tokens
        assert (tokens > 0) == (answer.first_token_ms - CURVE.request_ms <= at_ms)


def test_tokens_grow_by_one_a_step() -> None:
    """Fails when the steps that ended in this block are left out, or are rounded up."""
    watched = Watched(replace(CURVE, step_kv_token_ms=0.0))
    watched.submit(0, Request(0.0, 20, 50))
    # The prompt's step takes 13 ms, each after it 11.
    watched.advance(14.0)
    for at_ms, tokens in ((14.0, 1), (23.9, 1), (24.1, 2), (34.9, 2), (35.1, 3), (13.0 + 48.5 * 11.0, 49)):
        assert watched.engine.tokens(0, at_ms) == tokens


@given(drawn=REQUESTS, cancelled=st.integers(0, 24), share=st.floats(0.0, 1.5))
def test_who_is_cancelled_leaves_nothing_behind(drawn: Drawn, cancelled: int, share: float) -> None:
    requests = arriving(drawn)
    cancelled %= len(requests)
    watched = Watched()
    for number, request in enumerate(requests):
        watched.submit(number, request)
    at_ms = requests[-1].arrival_ms + share * 1_000.0
    watched.advance(at_ms)
    ended_before = cancelled in watched.last_ms
    watched.engine.cancel(cancelled, at_ms)
    watched.finish()
    assert (cancelled in watched.last_ms) == ended_before
    assert set(watched.last_ms) | {cancelled} == set(range(len(requests)))
    assert (len(watched.engine), watched.engine.kv_tokens) == (0, 0)


def test_a_place_that_is_given_up_is_free_at_the_end_of_the_step() -> None:
    """Fails when a cancelled answer stays until its last token, or leaves in the middle of a step."""
    watched = Watched(replace(CURVE, step_kv_token_ms=0.0, slots_max=1))
    watched.submit(0, Request(0.0, 10, 60))
    watched.submit(1, Request(0.0, 10, 5))
    watched.advance(20.0)
    watched.engine.cancel(0, 20.0)
    watched.finish()
    # Steps end at 12 and 23; the next one computes the other's prompt.
    assert watched.first_ms[1] == pytest.approx(23.0 + 12.0)


def test_the_engine_is_busy_while_it_has_work() -> None:
    watched = Watched(replace(CURVE, step_kv_token_ms=0.0))
    watched.submit(0, Request(0.0, 10, 3))
    watched.submit(1, Request(1_000.0, 10, 3))
    watched.finish()
    assert watched.engine.busy_ms == pytest.approx(2 * (12.0 + 2 * 11.0))
    assert watched.engine.prefilled_tokens == 20


@pytest.mark.parametrize(("prompt", "answer", "kept"), [(0, 1, 0), (1, 0, 0), (5, 1, 5), (290, 11, 0)])
def test_a_request_that_could_never_be_served_is_refused(prompt: int, answer: int, kept: int) -> None:
    with pytest.raises(ValueError, match="request"):
        Engine[int](CURVE).submit(0, prompt, answer, 0.0, cached_tokens=kept)
