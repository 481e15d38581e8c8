"""A client that leaves, at each place where the gateway can stand waiting; and one that stays but does not read."""

import asyncio
import json
import socket

import pytest

from coordinator.gateway.limits import GatewayLimits
from coordinator.gateway.testing import RunningGateway, raw_request, serve_gateway
from coordinator.tasks_port import Delta
from coordinator.testing import FAKE_MODEL, FakeTasks, Step, delta, finished, wait_step

CHAT = "/v1/chat/completions"
BODY: dict[str, object] = {"model": FAKE_MODEL, "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}


async def _nothing_left(gateway: RunningGateway, *, left: int = 1) -> None:
    """Wait until the gateway holds nothing of the client that left."""
    await gateway.until(lambda: gateway.sample("slackwater_gateway_disconnects_total", cause="left") == left)
    await gateway.until(lambda: gateway.sample("slackwater_gateway_requests_in_flight", endpoint="chat") == 0)
    # Others are served as before.
    assert (await gateway.post(CHAT, BODY)).status == 200


async def test_leaving_in_the_middle_of_the_body_submits_nothing() -> None:
    tasks = FakeTasks()
    async with serve_gateway(tasks) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw_request(CHAT, b'{"model":', length=500))
        await gateway.until(lambda: gateway.sample("slackwater_gateway_requests_in_flight", endpoint="chat") == 1)
        writer.close()
        await _nothing_left(gateway)
    assert len(tasks.submitted) == 1


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_leaving_during_the_submission_cancels_it(body: dict[str, object]) -> None:
    tasks = FakeTasks()
    tasks.submitting = wait_step()
    async with serve_gateway(tasks) as gateway:
        async with gateway.connection(CHAT, body):
            await tasks.submitting.reached.wait()
        await tasks.submission_cancelled.wait()
        tasks.submitting = None
        await _nothing_left(gateway)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_leaving_in_the_queue_closes_the_answer_once(body: dict[str, object]) -> None:
    """Mutation: a runner without handler_cancellation never noticed, and this hung."""
    wait = wait_step()
    tasks = FakeTasks()
    tasks.script([wait])
    async with serve_gateway(tasks) as gateway:
        async with gateway.connection(CHAT, body):
            await wait.reached.wait()
        await tasks.answers[0].closed.wait()
        await _nothing_left(gateway)
    assert tasks.answers[0].times_closed == 1


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
async def test_leaving_in_mid_answer_closes_the_answer_once(body: dict[str, object], reset: bool) -> None:
    """Mutation: without `aclosing` around the loop the answer stayed open for the garbage collector."""
    wait = wait_step()
    tasks = FakeTasks()
    tasks.script([(delta(0, "some text"),), wait, (finished(9),)])
    async with serve_gateway(tasks) as gateway:
        async with gateway.connection(CHAT, body) as (reader, writer):
            await wait.reached.wait()
            if body is STREAM:
                await reader.readuntil(b"some text")
            if reset:
                writer.transport.abort()
        await tasks.answers[0].closed.wait()
        await _nothing_left(gateway)
    assert tasks.answers[0].times_closed == 1


async def test_leaving_after_a_heartbeat_closes_the_answer_once() -> None:
    wait = wait_step()
    tasks = FakeTasks()
    tasks.script([wait])
    async with serve_gateway(tasks, GatewayLimits(heartbeat_s=0.01)) as gateway:
        async with gateway.connection(CHAT, STREAM) as (reader, _):
            await reader.readuntil(b": waiting\n\n")
        await tasks.answers[0].closed.wait()
        await _nothing_left(gateway)
    assert tasks.answers[0].times_closed == 1


async def test_every_place_is_free_again_after_many_clients_left() -> None:
    waits = [wait_step() for _ in range(20)]
    tasks = FakeTasks()
    for wait in waits:
        tasks.script([(delta(0, "x"),), wait])
    async with serve_gateway(tasks, GatewayLimits(open_requests=20)) as gateway:
        async with asyncio.TaskGroup() as clients:
            for wait in waits:
                clients.create_task(_read_and_leave(gateway, wait.reached))
        await _nothing_left(gateway, left=20)
    assert [answer.times_closed for answer in tasks.answers] == [1] * 21


async def _read_and_leave(gateway: RunningGateway, reached: asyncio.Event) -> None:
    async with gateway.connection(CHAT, STREAM) as (reader, _):
        await reached.wait()
        await reader.readuntil(b'"content":"x"')


def _long_answer() -> list[Step]:
    """Return 32 MB of text: more than the kernel buffers of both ends take."""
    piece = "x" * 32_000
    steps: list[Step] = [(Delta(first_index=index, token_ids=(1,), text=piece),) for index in range(1000)]
    return [*steps, (finished(1000),)]


async def test_a_stream_that_nobody_reads_is_cut_off_with_little_buffered() -> None:
    """Mutation: without `_wait_for_client` the whole answer was taken into memory, and this failed."""
    tasks = FakeTasks(default=lambda _: _long_answer())
    async with serve_gateway(tasks, GatewayLimits(slow_client_s=0.05)) as gateway:
        await _cut_off_for_not_reading(gateway, STREAM)
    assert tasks.answers[0].batches_taken < 500
    assert tasks.answers[0].times_closed == 1


async def test_a_whole_answer_that_nobody_fetches_is_cut_off() -> None:
    tasks = FakeTasks(default=lambda _: _long_answer())
    async with serve_gateway(tasks, GatewayLimits(body_timeout_s=0.3)) as gateway:
        await _cut_off_for_not_reading(gateway, BODY)
    assert tasks.answers[0].times_closed == 1


async def _cut_off_for_not_reading(gateway: RunningGateway, body: dict[str, object]) -> None:
    """Send a request, read nothing, and wait until the gateway has had enough."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    with client:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", gateway.port))
        await loop.sock_sendall(client, raw_request(CHAT, json.dumps(body).encode()))
        await gateway.until(lambda: gateway.sample("slackwater_gateway_disconnects_total", cause="too_slow") == 1)
        await gateway.until(lambda: gateway.sample("slackwater_gateway_requests_in_flight", endpoint="chat") == 0)


async def test_a_slow_client_that_keeps_reading_gets_everything() -> None:
    tasks = FakeTasks(default=lambda _: _long_answer())
    async with (
        serve_gateway(tasks, GatewayLimits(write_buffer_bytes=1024)) as gateway,
        gateway.connection(CHAT, STREAM, limit=4096) as (reader, _),
    ):
        size = 0
        tail = b""
        while not tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            chunk = await reader.read(65536)
            assert chunk
            size += len(chunk)
            tail = (tail + chunk)[-64:]
    assert size > 32_000_000
