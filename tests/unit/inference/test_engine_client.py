"""What the client makes of an answer stream, however its bytes are cut and whatever is wrong with it."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.engine import EngineError, TokenChunk
from inference.engine_client import MAX_LINE_BYTES, StreamParser
from inference.task import FinishReason

Chunks = list[TokenChunk]


def event(ids: list[int], finish: str | None = None, content: list[dict[str, object]] | None = None) -> bytes:
    logprobs = None if content is None else {"content": content}
    choice = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish, "stop_reason": None}
    # vLLM sends more fields than we read.
    return b"data: " + json.dumps({"request_id": "r", "usage": None, "choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ANSWER = event([5]) + event([6, 7]) + event([]) + event([2], "stop") + DONE


def parse(pieces: list[bytes], top: int | None = None) -> Chunks:
    parser = StreamParser(top)
    chunks = [chunk for piece in pieces if (chunk := parser.feed(piece)) is not None]
    parser.check_end()
    return chunks


def ids_of(chunks: Chunks) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def test_events_that_arrive_together_become_one_chunk() -> None:
    assert parse([ANSWER]) == [TokenChunk((5, 6, 7, 2), (), FinishReason.STOP)]


def test_an_answer_cut_into_single_bytes_gives_the_same_ids() -> None:
    chunks = parse([bytes([byte]) for byte in ANSWER])
    assert ids_of(chunks) == [5, 6, 7, 2]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, FinishReason.STOP]


@given(st.lists(st.integers(1, len(ANSWER) - 1), max_size=10))
def test_an_answer_cut_anywhere_gives_the_same_ids(cuts: list[int]) -> None:
    # Mutation seen to fail: the rest of an incomplete line was dropped.
    places = [0, *sorted(cuts), len(ANSWER)]
    chunks = parse([ANSWER[start:end] for start, end in itertools.pairwise(places)])
    assert ids_of(chunks) == [5, 6, 7, 2]
    assert chunks[-1].finish_reason is FinishReason.STOP


def test_carriage_returns_and_comments_are_no_event() -> None:
    assert ids_of(parse([b": hello\r\n\r\n" + ANSWER.replace(b"\n", b"\r\n")])) == [5, 6, 7, 2]


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (event([5]) + DONE, "without a finish reason"),
        (event([5]), "without a finish reason"),
        (b"", "without a finish reason"),
        (event([5], "abort") + DONE, "'abort'"),
        (event([5], "error") + DONE, "'error'"),
        (event([5], "repetition") + DONE, "'repetition'"),
        (b'data: {"error": {"message": "out of memory", "code": 500}}\n\n' + DONE, "out of memory"),
        (b'data: {"error": "gone"}\n\n', "gone"),
        (event([5], "stop") + event([6]), "after its finish reason"),
        (event([5], "stop") + DONE + event([6]), "after its end mark"),
        (b"data: {not json}\n\n", "cannot be read"),
        (b"data: \xff\xfe\n\n", "cannot be read"),
        (b'data: {"choices": 3}\n\n', "cannot be read"),
        (event([-1]), "cannot be read"),
        (event([2**32]), "cannot be read"),
        (b'data: {"choices": [{"index": 1, "token_ids": [5]}]}\n\n', "choice 1"),
        (b"<html>502</html>\n", "no event"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "cannot be read"),
        (b'data: {"error": ' + b"[" * 100_000 + b"\n\n", "cannot be read"),
    ],
)
def test_a_stream_that_is_not_a_whole_answer_is_an_error(stream: bytes, reason: str) -> None:
    # Mutation seen to fail: an unknown finish reason counted as "stop".
    with pytest.raises(EngineError, match=reason):
        parse([stream])
    with pytest.raises(EngineError, match=reason):
        parse([bytes([byte]) for byte in stream[:2000]] + [stream[2000:]])


@given(st.binary(max_size=200))
def test_garbage_is_an_engine_error_and_nothing_else(garbage: bytes) -> None:
    with pytest.raises(EngineError):
        parse([garbage])


def test_a_line_without_end_is_cut_off() -> None:
    pieces = [b"x" * 65536] * (MAX_LINE_BYTES // 65536 + 2)
    with pytest.raises(EngineError, match="longer than"):
        parse(pieces)


def candidate(token_id: int, rank: int | None) -> dict[str, object]:
    return {"token_id": token_id, "logprob": -0.25, "rank": rank}


def test_alternatives_are_those_of_the_best_ranks_even_where_the_drawn_id_is_not_among_them() -> None:
    drawn = {**candidate(9, 40), "top_logprobs": [candidate(9, 40), candidate(3, 1), candidate(4, 2)]}
    (chunk,) = parse([event([9], "length", [drawn]) + DONE], top=2)
    (position,) = chunk.logprobs
    assert (position.chosen.token_id, position.chosen.rank) == (9, 40)
    assert [(item.token_id, item.rank) for item in position.top] == [(3, 1), (4, 2)]


def test_one_alternative_more_than_asked_is_left_out() -> None:
    drawn = {**candidate(3, 1), "top_logprobs": [candidate(3, 1), candidate(4, 2), candidate(5, 3)]}
    (chunk,) = parse([event([3], "length", [drawn]) + DONE], top=2)
    assert [item.token_id for item in chunk.logprobs[0].top] == [3, 4]


def test_logprobs_that_are_missing_are_an_error() -> None:
    with pytest.raises(EngineError, match="0 logprobs for 1 ids"):
        parse([event([3])], top=0)
