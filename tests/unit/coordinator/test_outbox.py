"""What waits for one agent: in which order it goes, and how much may wait."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from coordinator.api import node_service
from coordinator.api.node_service import Outbox
from coordinator.scheduler.events import ConnectionId
from coordinator.store.port import NodeRow
from inference.task import NodeId, OwnerId, TaskId
from protos.slackwater.node.v1 import node_service_pb2 as wire

NODE = NodeRow(
    node_id=NodeId("node"),
    owner_id=OwnerId("owner"),
    label="",
    signing_public_key=bytes(32),
    key_epoch=1,
    certificate_serial="0a",
    certificate_not_after_ms=0,
    enrolled_at_ms=0,
    banned_at_ms=None,
    ban_reason=None,
    draining=False,
)


def new_outbox() -> Outbox:
    return Outbox(ConnectionId(1), NODE, cut_off=lambda: None)


def control(number: int) -> wire.ConnectResponse:
    return wire.ConnectResponse(cancel=wire.Cancel(task_id="control", attempt=number))


def chunk(task: str, attempt: int, index: int, size: int = 4) -> wire.PromptChunk:
    return wire.PromptChunk(task_id=task, attempt=attempt, chunk_index=index, token_ids=bytes(size))


async def take(messages: AsyncIterator[wire.ConnectResponse]) -> wire.ConnectResponse:
    return await anext(messages)


TASKS = ("a", "b", "c")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.none()),
        st.tuples(st.just("chunks"), st.sampled_from(TASKS)),
        st.tuples(st.just("cancel"), st.sampled_from(TASKS)),
        st.tuples(st.just("take"), st.none()),
    ),
    max_size=40,
)


@given(STEPS)
def test_control_goes_first_each_kind_keeps_its_order_and_nothing_of_a_cancelled_attempt_goes_out(
    steps: list[tuple[str, str | None]],
) -> None:
    """Mutations seen to fail here: chunks first; drop_chunks by task alone; chunks taken from the end."""

    async def run() -> None:
        outbox = new_outbox()
        messages = outbox.messages()
        urgent: deque[wire.ConnectResponse] = deque()
        chunks: deque[wire.PromptChunk] = deque()
        attempts = dict.fromkeys(TASKS, 0)

        async def take_one() -> None:
            expected = urgent.popleft() if urgent else wire.ConnectResponse(prompt_chunk=chunks.popleft())
            taking = asyncio.ensure_future(take(messages))
            await asyncio.sleep(0)
            assert taking.done(), "nothing is held back"
            assert await taking == expected

        for number, (step, task) in enumerate(steps):
            if step == "send":
                urgent.append(control(number))
                outbox.send(urgent[-1])
            elif step == "chunks" and task is not None:
                attempts[task] += 1
                new = [chunk(task, attempts[task], number * 10 + index) for index in range(3)]
                chunks += new
                outbox.send_chunks(TaskId(task), attempts[task], new)
            elif step == "cancel" and task is not None:
                # The oldest attempt that waits; those after it are there to stay.
                waiting = min((c.attempt for c in chunks if c.task_id == task), default=1)
                outbox.drop_chunks(TaskId(task), waiting)
                chunks = deque(c for c in chunks if (c.task_id, c.attempt) != (task, waiting))
            elif urgent or chunks:
                await take_one()
        while urgent or chunks:
            await take_one()
        outbox.end()
        with pytest.raises(StopAsyncIteration):
            await take(messages)

    asyncio.run(run())


async def test_a_sender_that_waits_is_woken_by_whatever_comes() -> None:
    """Mutation seen to fail here: send does not set the event."""
    outbox = new_outbox()
    messages = outbox.messages()

    async def woken(action: Callable[[], None]) -> wire.ConnectResponse:
        waiting = asyncio.ensure_future(take(messages))
        await asyncio.sleep(0)
        assert not waiting.done()
        action()
        return await waiting

    prompt = chunk("a", 1, 0)
    assert await woken(lambda: outbox.send(control(1))) == control(1)
    woken_by_chunks = await woken(lambda: outbox.send_chunks(TaskId("a"), 1, [prompt]))
    assert woken_by_chunks == wire.ConnectResponse(prompt_chunk=prompt)
    closing = await woken(lambda: outbox.close(wire.CLOSING_REASON_STOPPING, "stops"))
    assert closing == wire.ConnectResponse(closing=wire.Closing(reason=wire.CLOSING_REASON_STOPPING, detail="stops"))
    outbox.release()


async def test_a_goodbye_overtakes_everything_is_said_once_and_nothing_follows_it() -> None:
    """Mutation seen to fail here: a second close replaces the first."""
    outbox = new_outbox()
    outbox.send(control(1))
    outbox.close(wire.CLOSING_REASON_BANNED, "banned")
    outbox.close(wire.CLOSING_REASON_STOPPING, "stops")
    outbox.send(control(2))
    outbox.send_chunks(TaskId("a"), 1, [chunk("a", 1, 0)])
    assert [message.closing.reason async for message in outbox.messages()] == [wire.CLOSING_REASON_BANNED]
    outbox.release()


async def test_an_agent_that_does_not_read_is_refused_before_much_has_piled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation seen to fail here: no limit of messages."""
    monkeypatch.setattr(node_service, "WAITING_MESSAGES_MAX", 3)
    outbox = new_outbox()
    with capture_logs() as logs:
        for number in range(3):
            outbox.send(control(number))
        assert not outbox.closing
        for number in range(100):
            outbox.send(control(number))
    assert [entry["event"] for entry in logs] == ["agent_broke_protocol"], "once, whatever follows"
    closings = [message.closing.reason async for message in outbox.messages()]
    assert closings == [wire.CLOSING_REASON_PROTOCOL_VIOLATION]
    outbox.release()


async def test_prompts_that_wait_are_counted_in_bytes_until_they_are_sent_or_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutations seen to fail here: no subtraction where a chunk leaves; drop_chunks leaves the count."""
    monkeypatch.setattr(node_service, "WAITING_CHUNK_BYTES_MAX", 100)
    outbox = new_outbox()
    messages = outbox.messages()
    for attempt in range(1, 10):
        outbox.send_chunks(TaskId("a"), attempt, [chunk("a", attempt, 0, 60)])
        await take(messages)
    for attempt in range(10, 20):
        outbox.send_chunks(TaskId("a"), attempt, [chunk("a", attempt, 0, 60)])
        outbox.drop_chunks(TaskId("a"), attempt)
    assert not outbox.closing
    outbox.send_chunks(TaskId("b"), 1, [chunk("b", 1, 0, 60), chunk("b", 1, 1, 60)])
    assert outbox.closing
    outbox.release()


async def test_an_agent_that_hung_up_is_sent_nothing_more() -> None:
    outbox = new_outbox()
    outbox.send(control(1))
    outbox.end()
    assert [message async for message in outbox.messages()] == []
