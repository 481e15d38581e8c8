"""Answers a capability challenge: a prover process on one side, a call to the coordinator on the other."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import grpc
import structlog

from agent import events as e
from agent.config import EngineSettings
from agent.connection import Connector
from agent.engines.install import installed_engines
from agent.engines.processes import MARKER_VARIABLE, kill
from agent.engines.supervisor import KILL_CONFIRM_S
from agent.owner.events import CPU_CARD
from inference.challenge.framing import LENGTH_BYTES
from inference.launch import EngineLaunch, launch_prover
from protos.slackwater.node.v1 import challenge_pb2, node_service_pb2, node_service_pb2_grpc

# A reply goes out in parts, so that the frames of tokens get between them.
PART_BYTES: Final = 1 << 20
# A data-centre card's result is 8 MiB; its proof takes little.
REPLY_BYTES_MAX: Final = 9 << 20
# The longest: fill, walk and results of a slow machine, each within the coordinator's own deadline.
CHALLENGE_S_MAX: Final = 600.0
# One message there and back.
REFUSAL_S_MAX: Final = 10.0
# A prover on the processor gives way to everything that the owner does.
NICENESS: Final = 19

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Environment:
    """Where a prover may run. Args: `python` has torch where `device` is one of torch's."""

    python: Path
    device: str


def find_environment(card_id: str, engines: tuple[EngineSettings, ...], state_dir: Path) -> Environment:
    """Return where the prover for a card runs: in an engine's environment, else in the agent's with numpy. Blocks.

    Raises:
        ProverFailed: a card needs an engine's environment, and there is none.
    """
    named = [one.python for one in engines if one.kind in ("torch", "vllm") and one.python != Path()]
    pythons = [*named, *(one.python for one in installed_engines(state_dir))]
    if card_id:
        if not pythons:
            raise ProverFailed("not supported: no engine with torch is installed for the card")
        return Environment(pythons[0], "cuda:0")
    return Environment(pythons[0], "cpu") if pythons else Environment(Path(sys.executable), "numpy")


class ProverFailed(Exception):
    """There is no prover, or it ended; the message says why."""


class Prover:
    """The challenge that is being answered, if one is.

    Args:
        node_id: as the coordinator knows this node.
        marker: of this agent's processes; a prover that outlives the agent is found by it and killed at the next start.
        engines: a prover runs in the environment of one of them, or of one that is installed.
        memory_bytes: returns what of a card's memory may be filled, where no engine is on it.
        create_task: for work that ends with the daemon.
    """

    def __init__(
        self,
        connector: Connector,
        node_id: str,
        marker: str,
        state_dir: Path,
        engines: tuple[EngineSettings, ...],
        *,
        memory_bytes: Callable[[str], Awaitable[int]],
        feed: Callable[[e.Event], None],
        create_task: Callable[[Coroutine[None, None, None]], "asyncio.Task[None]"],
    ) -> None:
        self._connector = connector
        self._node_id = node_id
        # No engine can be named so.
        self._marker = f"{marker}/.prover"
        self._state_dir = state_dir
        self._engines = engines
        self._memory_bytes = memory_bytes
        self._feed = feed
        self._create_task = create_task
        # The state has one challenge taken up at a time, and waits for its end.
        self._running: asyncio.Task[None] | None = None
        self._card = ""
        # Whether the coordinator sees by the end of a call that a challenge is broken off: it knows whose call it is by
        # the first reply.
        self._called = False
        self._survivors: tuple[int, ...] = ()

    def begin(self, command: e.AnswerChallenge) -> None:
        """Answer a challenge, or refuse it; tells ChallengeEnded, whatever happens."""
        if command.refusal:
            self._create_task(self._answer_only(command))
            return
        self._card, self._called = command.card_id or CPU_CARD, False
        self._running = self._create_task(self._answer(command))

    def stop(self) -> None:
        """Kill the prover at once, started or about to be; `gone` tells when it is done."""
        # Once: orders come several at a time, and what the first stop has begun must come to its end.
        if self._running is not None and not self._running.cancelling():
            self._running.cancel()

    async def gone(self, card: str) -> tuple[int, ...] | None:
        """Wait until the prover on a card that was stopped is gone; return what of it survived its kill.

        None where none was there.
        """
        if self._running is None or self._card != card:
            return None
        await asyncio.wait([self._running])
        return self._survivors

    async def _answer_only(self, command: e.AnswerChallenge) -> None:
        """Refuse a challenge; another one may be running."""
        try:
            await self._tell_refusal(command)
        finally:
            self._feed(e.ChallengeEnded(command.challenge_id))

    async def _tell_refusal(self, command: e.AnswerChallenge) -> None:
        channel = self._connector.channel
        try:
            if channel is not None:
                async with asyncio.timeout(REFUSAL_S_MAX):
                    await self._refuse(channel, command.challenge_id, command.refusal)
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.warning("refusal of a challenge was not told", reason=str(error))

    async def _answer(self, command: e.AnswerChallenge) -> None:
        channel = self._connector.channel
        try:
            if channel is not None:
                async with asyncio.timeout(CHALLENGE_S_MAX):
                    await self._prove(channel, command)
                log.info("challenge answered", card=command.card_id)
        except asyncio.CancelledError:
            log.info("challenge broken off", card=command.card_id)
            if not self._called:
                # Else the coordinator would wait for a prover that does not come.
                broken_off = replace(command, refusal="busy: something else came first")
                self._create_task(self._tell_refusal(broken_off))
            raise
        except (ProverFailed, TimeoutError, OSError) as error:
            log.warning("challenge was not answered", card=command.card_id, reason=str(error))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            log.warning("challenge was not answered", card=command.card_id, reason=f"the call ended: {error}")
        finally:
            # All of it, as of an engine: also one whose start was broken off, and what it may have started itself.
            self._survivors = await asyncio.to_thread(kill, self._marker, 0, KILL_CONFIRM_S)
            if self._survivors:
                log.error("a prover survives SIGKILL: reboot this machine", pids=self._survivors)
            self._running = None
            self._feed(e.ChallengeEnded(command.challenge_id))

    async def _refuse(self, channel: grpc.aio.Channel, challenge_id: str, reason: str) -> None:
        log.info("challenge refused", reason=reason)
        refusal = challenge_pb2.ChallengeRefusal(challenge_id=challenge_id, reason=reason)
        call = node_service_pb2_grpc.NodeServiceStub(channel).AnswerChallenge()
        await _send(call, challenge_id, challenge_pb2.ChallengeReply(challenge_refusal=refusal).SerializeToString())
        await call.done_writing()
        await call.read()

    async def _prove(self, channel: grpc.aio.Channel, command: e.AnswerChallenge) -> None:
        certificate_sha256 = self._connector.certificate_sha256(channel)
        try:
            where = await asyncio.to_thread(find_environment, command.card_id, self._engines, self._state_dir)
        except ProverFailed as error:
            await self._refuse(channel, command.challenge_id, str(error))
            return
        # The processor's share is the owner's setting, whether or not an engine runs on it.
        may_fill = command.free or not command.card_id
        launch = launch_prover(
            where.python,
            where.device,
            node_id=self._node_id,
            boot_id=self._connector.boot_id.hex(),
            certificate_sha256=certificate_sha256,
            memory_bytes=await self._memory_bytes(command.card_id) if may_fill else 0,
            gpu_uuids=(command.card_id,) if command.card_id else (),
        )
        process = await self._start(launch)
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        call = node_service_pb2_grpc.NodeServiceStub(channel).AnswerChallenge()
        asking = asyncio.create_task(_forward_questions(call, process.stdin))
        # The coordinator has heard enough, or the call is gone: what is still computed is for nobody.
        asking.add_done_callback(lambda _: _kill(process))
        try:
            async for reply in _replies(process.stdout):
                await _send(call, command.challenge_id, reply)
                self._called = True
            # It ends when the coordinator has heard enough; before that it failed.
            if not asking.done():
                raise ProverFailed("the prover ended before the challenge did")
            await asking
        finally:
            asking.cancel()
            call.cancel()

    async def _start(self, launch: EngineLaunch) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *launch.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**launch.env, MARKER_VARIABLE: self._marker},
            start_new_session=True,
        )
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        return process


Call = grpc.aio.StreamStreamCall[node_service_pb2.AnswerChallengeRequest, node_service_pb2.AnswerChallengeResponse]


async def _forward_questions(call: Call, prover: asyncio.StreamWriter) -> None:
    try:
        while True:
            response = await call.read()
            if not isinstance(response, node_service_pb2.AnswerChallengeResponse):
                return
            question = response.question.SerializeToString()
            prover.write(len(question).to_bytes(LENGTH_BYTES, "big") + question)
            await prover.drain()
    finally:
        prover.close()


async def _replies(prover: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield replies until the prover ends. Raises ProverFailed for what is none."""
    while True:
        try:
            length = int.from_bytes(await prover.readexactly(LENGTH_BYTES), "big")
            if length > REPLY_BYTES_MAX:
                raise ProverFailed(f"a reply of {length} bytes from the prover")
            yield await prover.readexactly(length)
        except asyncio.IncompleteReadError:
            return


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


async def _send(call: Call, challenge_id: str, reply: bytes) -> None:
    for at in range(0, max(len(reply), 1), PART_BYTES):
        part, last = reply[at : at + PART_BYTES], at + PART_BYTES >= len(reply)
        await call.write(node_service_pb2.AnswerChallengeRequest(challenge_id=challenge_id, reply_part=part, last=last))
