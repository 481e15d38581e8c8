"""Challenges that are broken off before a prover has started."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import grpc

from agent import events as e
from agent.connection import Connector
from agent.prover import Prover


class Unreachable:
    """A connection to a coordinator that hears nothing."""

    boot_id = b"boot"

    def __init__(self) -> None:
        # Nobody listens on port 1.
        self.channel = grpc.aio.insecure_channel("127.0.0.1:1")

    def certificate_sha256(self, _: grpc.aio.Channel) -> bytes:
        return bytes(32)


async def test_a_challenge_that_several_orders_break_off_ends_and_leaves_room_for_the_next(tmp_path: Path) -> None:
    """Mutation seen to fail here: each stop cancels anew, and the second one the end that the first has begun."""
    ended: asyncio.Queue[e.Event] = asyncio.Queue()
    reached = asyncio.Event()

    async def memory_bytes(card_id: str) -> int:
        reached.set()
        await asyncio.Event().wait()
        return 0

    tasks: set[asyncio.Task[None]] = set()

    def create_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        tasks.add(task := asyncio.create_task(work))
        return task

    connector = Unreachable()
    prover = Prover(
        cast(Connector, connector),
        "node",
        "marker",
        tmp_path,
        (),
        memory_bytes=memory_bytes,
        feed=ended.put_nowait,
        create_task=create_task,
    )
    prover.begin(e.AnswerChallenge("challenge", ""))
    await reached.wait()
    prover.stop()
    # The task runs up to where it waits for the kill.
    await asyncio.sleep(0)
    prover.stop()
    async with asyncio.timeout(10):
        assert await ended.get() == e.ChallengeEnded("challenge")
    await asyncio.wait(tasks)
    await connector.channel.close()
