"""One engine's queue: what an answer waits for, and that no token is lost or made."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.batching import Request, _Engine, serve
from coordinator.planning.curves import EngineCurve

CURVE = EngineCurve(
    step_base_ms=10.0,
    step_sequence_ms=1.0,
    step_kv_token_ms=0.0,
    prefill_token_ms=0.1,
    request_ms=5.0,
    kv_tokens_max=1000,
    slots_max=4,
    step_tokens_max=64,
)

REQUESTS = st.lists(
    st.builds(
        lambda gap, prompt, answer, kept: (gap, prompt, answer, min(kept, prompt - 1)),
        st.floats(0.0, 200.0),
        st.integers(1, 200),
        st.integers(1, 60),
        st.integers(0, 200),
    ),
    min_size=1,
    max_size=25,
)


def arriving(drawn: list[tuple[float, int, int, int]]) -> list[Request]:
    now_ms, requests = 0.0, []
    for gap_ms, prompt, answer, kept in drawn:
        now_ms += gap_ms
        requests.append(Request(now_ms, prompt, answer, kept))
    return requests


def test_a_request_alone_waits_for_its_prompt_and_then_a_step_per_token() -> None:
    """Fails when the first token is counted twice (`answer_tokens` steps after it)."""
    (answer,) = serve(CURVE, [Request(100.0, 20, 11)])
    assert answer.first_token_ms == pytest.approx(100.0 + 5.0 + 10.0 + 1.0 + 20 * 0.1)
    assert answer.last_token_ms == pytest.approx(answer.first_token_ms + 10 * 11.0)


def test_who_comes_during_a_step_waits_for_its_end() -> None:
    """Fails when a request is let in at its arrival, in the middle of a step."""
    _, late = serve(CURVE, [Request(0.0, 10, 50), Request(15.0, 10, 2)])
    # Steps end at 12 and 23; the next one has both and 10 tokens of prompt.
    assert late.first_token_ms == pytest.approx(23.0 + 10.0 + 2.0 + 1.0 + 5.0)


def test_a_long_prompt_is_cut_into_steps() -> None:
    """Fails when a step computes whole prompts, however long."""
    (answer,) = serve(CURVE, [Request(0.0, 130, 1)])
    assert answer.first_token_ms == pytest.approx((10.0 + 6.4) + (10.0 + 6.4) + (11.0 + 0.2) + 5.0)


def test_a_prompt_that_was_kept_is_not_computed_again() -> None:
    """Fails when `cached_tokens` is left out."""
    (answer,) = serve(CURVE, [Request(0.0, 130, 1, cached_tokens=120)])
    assert answer.first_token_ms == pytest.approx(11.0 + 1.0 + 5.0)


def test_no_more_answers_than_slots_are_written_at_once() -> None:
    """Fails without the comparison with `slots_max`."""
    answers = serve(CURVE, [Request(0.0, 5, 20)] * 5)
    assert answers[4].first_token_ms > answers[0].last_token_ms


def test_the_youngest_gives_its_place_up_when_memory_is_full() -> None:
    """Two prompts fit, their answers do not. Fails when the oldest goes (`next(iter(...))` in place of `popitem`)."""
    tight = replace(CURVE, kv_tokens_max=150)
    old, young = serve(tight, [Request(0.0, 50, 60), Request(0.0, 50, 60)])
    assert (old.preemptions, young.preemptions) == (0, 1)
    roomy = serve(replace(CURVE, kv_tokens_max=1000), [Request(0.0, 50, 60), Request(0.0, 50, 60)])
    assert old.last_token_ms < roomy[0].last_token_ms
    assert young.last_token_ms > roomy[1].last_token_ms
    # Its first token had come before, and stays.
    assert young.first_token_ms == roomy[1].first_token_ms


def test_who_gave_its_place_up_goes_on_before_who_waits() -> None:
    """Fails when a preempted request goes to the queue's end (`append`)."""
    requests = [Request(0.0, 50, 60), Request(0.0, 50, 60), Request(0.0, 100, 10)]
    _, preempted, waiting = serve(replace(CURVE, kv_tokens_max=150), requests)
    assert preempted.preemptions == 1
    assert waiting.first_token_ms > preempted.last_token_ms


def test_a_prompt_waits_until_it_fits() -> None:
    """Fails without the comparison with `kv_tokens_max` when prompts are let in."""
    first, second = serve(replace(CURVE, kv_tokens_max=150), [Request(0.0, 60, 10), Request(0.0, 100, 10)])
    assert second.first_token_ms > first.last_token_ms
    assert second.preemptions == 0


@given(drawn=REQUESTS)
def test_memory_is_never_exceeded_and_all_of_it_is_free_again(drawn: list[tuple[float, int, int, int]]) -> None:
    """Fails when admission does not count the tokens that the batch adds in the same step.

    And when a preempted answer keeps a token that was not computed (`+= steps - began + 1`).
    """
    curve = replace(CURVE, kv_tokens_max=300)
    engine = _Engine(curve, arriving(drawn))
    while engine.unfinished:
        engine.step()
        assert 0 <= engine.kv_tokens <= curve.kv_tokens_max
    assert engine.kv_tokens == 0


@given(drawn=REQUESTS)
def test_no_answer_comes_sooner_than_alone(drawn: list[tuple[float, int, int, int]]) -> None:
    """Fails when the answers of a batch share their part of a step (`step_sequence_ms` over the batch)."""
    requests = arriving(drawn)
    for request, answer in zip(requests, serve(replace(CURVE, kv_tokens_max=300), requests), strict=True):
        (alone,) = serve(CURVE, [request])
        assert answer.first_token_ms >= alone.first_token_ms - 1e-6
        assert answer.last_token_ms >= alone.last_token_ms - 1e-6


@given(drawn=REQUESTS)
def test_first_tokens_come_in_order_of_arrival(drawn: list[tuple[float, int, int, int]]) -> None:
    """Fails when the queue is served from its end (`pop`)."""
    answers = serve(replace(CURVE, kv_tokens_max=300), arriving(drawn))
    first = [answer.first_token_ms for answer in answers]
    assert first == sorted(first)


@given(drawn=REQUESTS, factor=st.floats(1.1, 3.0))
def test_an_engine_that_is_slower_throughout_scales(drawn: list[tuple[float, int, int, int]], factor: float) -> None:
    """Time has no unit of its own: the same requests in slow motion. Fails with a constant time in `step`."""
    slow = replace(CURVE, step_base_ms=10.0 * factor, step_sequence_ms=factor, prefill_token_ms=0.1 * factor)
    requests = arriving([(round(gap), *rest) for gap, *rest in drawn])  # type: ignore[misc]
    fast = serve(replace(CURVE, request_ms=0.0), requests)
    late = serve(replace(slow, request_ms=0.0), [replace(one, arrival_ms=one.arrival_ms * factor) for one in requests])
    # A step that ends within rounding of an arrival may go either way.
    assert late[0].first_token_ms == pytest.approx(fast[0].first_token_ms * factor)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request(0.0, 0, 1), "at least one token"),
        (Request(0.0, 1, 0), "at least one token"),
        (Request(0.0, 5, 1, cached_tokens=5), "has to be computed"),
        (Request(0.0, 990, 11), "does not fit"),
    ],
)
def test_a_request_that_could_never_be_served_is_refused(request_: Request, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        serve(CURVE, [request_])


def test_requests_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="order of arrival"):
        serve(CURVE, [Request(5.0, 1, 1), Request(4.0, 1, 1)])


def test_no_requests_have_no_answers() -> None:
    assert serve(CURVE, []) == []
