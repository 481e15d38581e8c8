"""What waits for the coordinator: bounded, in order, and merged rather than dropped."""

import asyncio

import pytest

from agent import events as e
from agent.assignments import AttemptKey
from agent.connection import OUTBOX_IDS_MAX, OUTBOX_MESSAGES_MAX, Outbox, OutboxFull
from inference.task import TaskId
from protos.slackwater.common.v1 import capability_pb2

ONE = AttemptKey(TaskId("task-1"), 1)
TWO = AttemptKey(TaskId("task-2"), 1)


def frames(key: AttemptKey, first_index: int, *ids: int) -> e.SendFrames:
    return e.SendFrames([e.FrameData(key, first_index, list(ids), [])])


def end(key: AttemptKey) -> e.SendFailed:
    return e.SendFailed(key, e.FailureReason.FAILURE_REASON_CANCELLED, "")


def state(sequence: int) -> e.SendState:
    return e.SendState(sequence=sequence, host=capability_pb2.Host(), gpus=(), engines=(), running=(), draining=False)


async def drain(outbox: Outbox) -> list[e.SendCommand]:
    taken: list[e.SendCommand] = []
    async with asyncio.TaskGroup() as group:

        async def take() -> None:
            while True:
                taken.append(await outbox.take())

        taker = group.create_task(take())
        await outbox.emptied()
        taker.cancel()
    return taken


async def test_frames_that_wait_become_one_without_losing_an_id() -> None:
    outbox = Outbox()
    for command in (frames(ONE, 0, 11), frames(TWO, 5, 21), frames(ONE, 1, 12, 13)):
        outbox.put(command)
    [merged] = await drain(outbox)
    assert isinstance(merged, e.SendFrames)
    assert [(one.key, one.first_index, one.token_ids) for one in merged.frames] == [
        (ONE, 0, [11, 12, 13]),
        (TWO, 5, [21]),
    ]


# Mutation seen to fail: merging into any waiting SendFrames instead of the last one.
async def test_an_end_stays_behind_its_frames_and_before_later_ones() -> None:
    outbox = Outbox()
    for command in (frames(ONE, 0, 11), end(ONE), frames(TWO, 0, 21), frames(TWO, 1, 22)):
        outbox.put(command)
    first, second, third = await drain(outbox)
    assert isinstance(first, e.SendFrames)
    assert second == end(ONE)
    assert isinstance(third, e.SendFrames)
    assert third.frames[0].token_ids == [21, 22]


async def test_newer_states_and_heartbeats_take_the_place_of_older_ones() -> None:
    outbox = Outbox()
    for command in (state(1), e.SendHeartbeat(1), end(ONE), state(2), e.SendHeartbeat(2)):
        outbox.put(command)
    assert await drain(outbox) == [end(ONE), state(2), e.SendHeartbeat(2)]


async def test_a_coordinator_that_does_not_read_is_given_up() -> None:
    outbox = Outbox()
    for _ in range(OUTBOX_MESSAGES_MAX):
        outbox.put(end(ONE))
    with pytest.raises(OutboxFull, match="messages"):
        outbox.put(end(ONE))


async def test_too_many_ids_give_the_connection_up_and_taken_ones_no_longer_count() -> None:
    outbox = Outbox()
    outbox.put(frames(ONE, 0, *range(OUTBOX_IDS_MAX)))
    await drain(outbox)
    outbox.put(frames(ONE, 0, *range(OUTBOX_IDS_MAX)))
    with pytest.raises(OutboxFull, match="ids"):
        outbox.put(frames(ONE, OUTBOX_IDS_MAX, 1))
