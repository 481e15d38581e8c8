"""Replies from parts: whole, byte by byte, garbage, and more than a reply has."""

from collections.abc import AsyncIterator, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.errors import Reason, SlackwaterError
from coordinator.verification.challenge_replies import REPLY_BYTES_MAX, REPLY_PARTS_MAX, replies_in
from protos.slackwater.node.v1 import challenge_pb2 as pb
from protos.slackwater.node.v1 import node_service_pb2 as wire

READY = pb.ChallengeReply(prover_ready=pb.ProverReady(arithmetic="numpy", memory_bytes=1 << 40))
ROOT = pb.ChallengeReply(compute_commitment=pb.ComputeCommitment(challenge_id="c", root=bytes(range(32))))
# Two of them one behind the other would be one with four proofs.
OPENED = pb.ChallengeReply(compute_answer=pb.ComputeAnswer(result=pb.Opening(content=b"result", proof=[b"1", b"2"])))
EMPTY = pb.ChallengeReply()
REPLIES = st.lists(st.sampled_from([READY, ROOT, OPENED, EMPTY]), max_size=5)


def cut(reply: pb.ChallengeReply, sizes: Iterable[int], challenge_id: str = "c") -> list[wire.AnswerChallengeRequest]:
    """Return a reply in parts: of these sizes, and the rest in a last one."""
    whole, parts = reply.SerializeToString(), []
    for size in sizes:
        parts.append(wire.AnswerChallengeRequest(challenge_id=challenge_id, reply_part=whole[:size]))
        whole = whole[size:]
    return [*parts, wire.AnswerChallengeRequest(challenge_id=challenge_id, reply_part=whole, last=True)]


async def stream(parts: Iterable[wire.AnswerChallengeRequest]) -> AsyncIterator[wire.AnswerChallengeRequest]:
    for part in parts:
        yield part


async def put_together(parts: Iterable[wire.AnswerChallengeRequest]) -> list[tuple[str, pb.ChallengeReply]]:
    return [one async for one in replies_in(stream(parts))]


async def violation(parts: Iterable[wire.AnswerChallengeRequest]) -> str:
    with pytest.raises(SlackwaterError) as caught:
        await put_together(parts)
    assert caught.value.reason is Reason.PROTOCOL_VIOLATION
    return caught.value.message


async def test_replies_come_whole_in_their_order_and_with_the_id_they_came_under() -> None:
    """Mutation: the id is that of the first part of the call."""
    parts = [*cut(READY, [], "first"), *cut(ROOT, [], "second"), *cut(EMPTY, [], "")]
    assert await put_together(parts) == [("first", READY), ("second", ROOT), ("", EMPTY)]


async def test_replies_byte_by_byte_are_the_same() -> None:
    """Mutation: what a reply had is in the next one too."""
    parts = [part for reply in (READY, OPENED, OPENED) for part in cut(reply, [1] * reply.ByteSize())]
    assert await put_together(parts) == [("c", READY), ("c", OPENED), ("c", OPENED)]


@settings(max_examples=60, deadline=None)
@given(replies=REPLIES, sizes=st.lists(st.integers(0, 60), max_size=8))
async def test_replies_in_parts_of_any_size_are_the_same(replies: list[pb.ChallengeReply], sizes: list[int]) -> None:
    """Mutation: an empty part ends a reply."""
    parts = [part for reply in replies for part in cut(reply, sizes)]
    assert await put_together(parts) == [("c", reply) for reply in replies]


async def test_a_reply_that_breaks_off_is_none() -> None:
    """Mutation: what is there when the parts end is taken for a reply."""
    assert await put_together([*cut(READY, []), *cut(ROOT, [3, 3])[:-1]]) == [("c", READY)]
    assert await put_together([]) == []


@settings(max_examples=100, deadline=None)
@given(garbage=st.lists(st.binary(max_size=40), min_size=1, max_size=4))
async def test_garbage_is_a_violation_or_a_reply_and_nothing_else(garbage: list[bytes]) -> None:
    """Mutation: what protobuf raises goes through."""
    parts = [wire.AnswerChallengeRequest(challenge_id="c", reply_part=part) for part in garbage]
    parts[-1].last = True
    try:
        found: int | Reason = len(await put_together(parts))
    except SlackwaterError as error:
        found = error.reason
    assert found in (1, Reason.PROTOCOL_VIOLATION)


async def test_bytes_that_are_no_reply_are_a_violation() -> None:
    """Mutation: an empty reply is made of them."""
    part = wire.AnswerChallengeRequest(challenge_id="c", reply_part=b"\xff\xff", last=True)
    assert "no reply" in await violation([part])


async def test_a_hundred_parts_are_a_reply_and_one_more_is_none_though_they_hold_nothing() -> None:
    """Mutations: empty parts do not count; parts are counted over the call and not over the reply."""
    most = cut(READY, [0] * (REPLY_PARTS_MAX - 1))
    assert await put_together([*most, *most, *most]) == [("c", READY)] * 3
    assert "parts" in await violation(cut(READY, [0] * REPLY_PARTS_MAX))


async def test_nine_mebibytes_are_a_reply_and_one_more_byte_is_none_before_its_end() -> None:
    """Mutations: >= for >; the bytes are counted at the last part only, and as many as come are kept."""
    reply = pb.ChallengeReply(compute_answer=pb.ComputeAnswer(result=pb.Opening(content=bytes(REPLY_BYTES_MAX - 64))))
    reply.compute_answer.challenge_id = "c" * (REPLY_BYTES_MAX - reply.ByteSize() - 2)
    assert reply.ByteSize() == REPLY_BYTES_MAX
    mebibytes = [1 << 20] * 8
    assert await put_together(cut(reply, mebibytes)) == [("c", reply)]

    async def endless() -> AsyncIterator[wire.AnswerChallengeRequest]:
        for number in range(50):
            assert number <= REPLY_BYTES_MAX >> 20, "nobody reads on"
            yield wire.AnswerChallengeRequest(challenge_id="c", reply_part=bytes(1 << 20))

    with pytest.raises(SlackwaterError, match="bytes"):
        await anext(replies_in(endless()))
    over = [
        wire.AnswerChallengeRequest(reply_part=bytes(REPLY_BYTES_MAX)),
        wire.AnswerChallengeRequest(reply_part=b"1"),
    ]
    assert "bytes" in await violation(over)
