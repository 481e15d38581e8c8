"""The stream to the coordinator: mutual TLS, one life after the other, for ever.

Every life begins with Hello and Welcome and ends with a Disconnected event.
Only `stop` ends the loop: whatever the other side does, a CANCELLED included,
is a reason to come back (microsoft/durabletask-python#175). Attempts to come
back are spread by exponential backoff with full jitter, so that a fleet does
not return in lockstep.

What is to be sent waits in an outbox that is bounded: frames merge with frames
that still wait, heartbeats and states replace those that wait, and where even
that is too much the connection is given up, since the other side does not read.
"""

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn
from weakref import WeakKeyDictionary

import grpc
import structlog
from cryptography.hazmat.primitives import hashes

from agent import events as e
from agent.clock import monotonic_s
from agent.enrolment import call_failure, node_channel
from agent.errors import NodeBanned
from agent.identity import Identity
from agent.wire import read_message, read_welcome, write_command
from protos.slackwater.node.v1 import node_service_pb2, node_service_pb2_grpc

# From dialling to Welcome. A half-open handshake without a deadline stays for ever (durabletask-dotnet#708).
HANDSHAKE_TIMEOUT_S = 10.0
BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 15.0
# Enough to reach the ceiling from the least; more would overflow in the end.
BACKOFF_DOUBLINGS_MAX = 8
# A connection that lived so long was no failure: the next backoff begins anew.
SETTLED_S = 5.0
# How long a goodbye may take.
GOODBYE_S = 1.0
# Messages that wait at once: an end and a refusal of every attempt that a large node runs.
OUTBOX_MESSAGES_MAX = 4096
# Ids that wait at once, half a minute of the fastest node of today; 8 MB.
OUTBOX_IDS_MAX = 1_000_000
# A score of a long prompt is the largest message; assignments and chunks are far smaller.
MESSAGE_BYTES_MAX = 64 * 1024 * 1024

_CHANNEL_OPTIONS = (
    # A manifest of a large model has 4 MB, gRPC's own limit a little less.
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # The subchannels shared by default would keep gRPC's own backoff over our channels.
    ("grpc.use_local_subchannel_pool", 1),
)

log = structlog.get_logger()

Stream = grpc.aio.StreamStreamCall[node_service_pb2.ConnectRequest, node_service_pb2.ConnectResponse]


class OutboxFull(Exception):
    """The coordinator reads too slowly, or not at all."""


class Outbox:
    """What waits to be written to one connection, in order."""

    def __init__(self) -> None:
        self._commands: deque[e.SendCommand] = deque()
        self._ids = 0
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()

    def put(self, command: e.SendCommand) -> None:
        """Add a command; one that makes an older one superfluous takes its place.

        Raises:
            OutboxFull: a limit is reached; the connection must be given up.
        """
        if isinstance(command, e.SendFrames):
            self._ids += sum(len(frame.token_ids) for frame in command.frames)
            if self._ids > OUTBOX_IDS_MAX:
                raise OutboxFull(f"more than {OUTBOX_IDS_MAX} ids wait to be sent")
            # Only into the last one: an end that waits behind earlier frames stays behind them.
            if self._commands and isinstance(self._commands[-1], e.SendFrames):
                self._commands[-1] = merge_frames(self._commands[-1], command)
                return
        elif isinstance(command, e.SendHeartbeat | e.SendState):
            self._commands = deque(one for one in self._commands if type(one) is not type(command))
        if len(self._commands) >= OUTBOX_MESSAGES_MAX:
            raise OutboxFull(f"more than {OUTBOX_MESSAGES_MAX} messages wait to be sent")
        self._commands.append(command)
        self._emptied.clear()
        self._filled.set()

    async def take(self) -> e.SendCommand:
        """Wait for the next command and remove it."""
        while not self._commands:
            self._emptied.set()
            self._filled.clear()
            await self._filled.wait()
        command = self._commands.popleft()
        if isinstance(command, e.SendFrames):
            self._ids -= sum(len(frame.token_ids) for frame in command.frames)
        return command

    async def emptied(self) -> None:
        """Wait until everything was taken and the taker came back for more."""
        await self._emptied.wait()


def merge_frames(earlier: e.SendFrames, later: e.SendFrames) -> e.SendFrames:
    """Return one command with the ids of both; frames of one attempt follow each other without a gap."""
    by_key = {frame.key: frame for frame in earlier.frames}
    for frame in later.frames:
        known = by_key.get(frame.key)
        if known is None:
            by_key[frame.key] = frame
        else:
            known.token_ids.extend(frame.token_ids)
            known.logprobs.extend(frame.logprobs)
    return e.SendFrames(list(by_key.values()))


def backoff_s(failures: int, jitter: random.Random) -> float:
    """Return how long to wait after so many failures in a row: exponential, with full jitter."""
    ceiling = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2 ** min(failures, BACKOFF_DOUBLINGS_MAX))
    return jitter.uniform(0, ceiling)


@dataclass(frozen=True, slots=True)
class Hello:
    """How this start of the agent introduces itself."""

    protocol_version: int
    agent_version: str
    boot_id: bytes
    boot_started_at_ms: int


class LifeEnded(Exception):
    """This life of the connection is over; the message says why."""

    def __init__(self, detail: str, pause_s: float = 0.0, banned: bool = False) -> None:
        super().__init__(detail)
        self.pause_s = pause_s
        self.banned = banned


@contextmanager
def _life_ends(address: str) -> Iterator[None]:
    """Turn every way in which gRPC says that a stream is over into LifeEnded."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        failure = call_failure(error, address)
        raise LifeEnded(str(failure), banned=isinstance(failure, NodeBanned)) from error
    except asyncio.InvalidStateError as error:
        raise LifeEnded("the coordinator ended the stream") from error


class Connector:
    """Keeps one connection up and tells every message as an event.

    Args:
        identity: returns the node's identity at the moment of dialling.
        on_event: called from the event loop, in the order of arrival.
        recover: called after a connection that was not welcomed, with the number of such failures in a row.
    """

    def __init__(
        self,
        hello: Hello,
        *,
        identity: Callable[[], Identity],
        on_event: Callable[[e.Event], None],
        recover: Callable[[int], Awaitable[None]],
        jitter: random.Random,
    ) -> None:
        self._hello = hello
        self._identity = identity
        self._on_event = on_event
        self._recover = recover
        self._jitter = jitter
        self._outbox: Outbox | None = None
        self._channel: grpc.aio.Channel | None = None
        self._next_channel: grpc.aio.Channel | None = None
        # Of the certificate that each channel was dialled with; the identity may have a newer one already.
        self._certificates_sha256: WeakKeyDictionary[grpc.aio.Channel, bytes] = WeakKeyDictionary()
        # Why this life is to end, where it is we who end it.
        self._end: LifeEnded | None = None
        self._end_wanted = asyncio.Event()
        self._stopping = False
        self._failures = 0
        self._stream_numbers = itertools.count(1)

    @property
    def channel(self) -> grpc.aio.Channel | None:
        """The channel of a connection that was welcomed, for other calls to NodeService."""
        return self._channel if self._outbox is not None else None

    @property
    def boot_id(self) -> bytes:
        return self._hello.boot_id

    def certificate_sha256(self, channel: grpc.aio.Channel) -> bytes:
        """Return the SHA-256 of the DER certificate that the coordinator sees on a channel of ours."""
        return self._certificates_sha256[channel]

    def send(self, command: e.SendCommand) -> None:
        """Queue a message; without a connection there is nobody whom it could concern."""
        if self._outbox is None:
            return
        try:
            self._outbox.put(command)
        except OutboxFull as error:
            self.close(str(error))

    def close(self, detail: str, pause_s: float = 0.0) -> None:
        """End the connection and open another, not before `pause_s` have passed."""
        self._end = self._end or LifeEnded(detail, pause_s)
        self._end_wanted.set()

    async def roll_over(self) -> None:
        """Change to a channel under the present certificate: it is up before the old one is closed.

        Raises:
            TimeoutError: no such channel comes up; the old one goes on.
        """
        fresh = self._dial()
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                await fresh.channel_ready()
        except TimeoutError:
            await fresh.close()
            raise
        self._next_channel = fresh
        self.close("changing to the new certificate")

    async def run(self) -> None:
        """Connect, again and again, until `stop`."""
        while not self._stopping:
            opened_at = monotonic_s()
            self._end = None
            self._end_wanted.clear()
            try:
                await self._live()
            except LifeEnded as ended:
                end = self._reason(ended)
            welcomed = self._outbox is not None
            self._outbox = None
            if welcomed:
                self._on_event(e.Disconnected(str(end)))
            if self._stopping:
                return
            settled = welcomed and monotonic_s() - opened_at > SETTLED_S
            self._failures = 0 if settled else self._failures + 1
            log.warning("no connection to the coordinator", reason=str(end), failures=self._failures)
            if end.banned:
                self._on_event(e.ClosingReceived(e.ClosingReason.CLOSING_REASON_BANNED, str(end)))
            if not welcomed:
                await self._recover(self._failures)
            if self._next_channel is None:
                await asyncio.sleep(end.pause_s + backoff_s(self._failures, self._jitter))

    async def stop(self) -> None:
        """Send what waits, within a short time, and end."""
        self._stopping = True
        if self._outbox is not None:
            try:
                async with asyncio.timeout(GOODBYE_S):
                    await self._outbox.emptied()
            except TimeoutError:
                log.warning("the coordinator did not take the last messages", timeout_s=GOODBYE_S)
        self.close("this agent stops")

    def _reason(self, ended: LifeEnded) -> LifeEnded:
        """Return why a life ended: what we wanted it to end for, and the pause that goes with it, come first."""
        return ended if ended.banned or self._end is None else self._end

    def _dial(self) -> grpc.aio.Channel:
        identity = self._identity()
        channel = node_channel(identity, _CHANNEL_OPTIONS)
        self._certificates_sha256[channel] = identity.certificate().fingerprint(hashes.SHA256())
        return channel

    async def _live(self) -> NoReturn:
        """Live one life.

        Raises:
            LifeEnded: always, in the end.
        """
        self._channel, self._next_channel = self._next_channel or self._dial(), None
        try:
            stream: Stream = node_service_pb2_grpc.NodeServiceStub(self._channel).Connect()
            first, asked_at = await self._introduce(stream)
            if first.WhichOneof("message") != "welcome":
                # A Closing is the only other first message that means anything.
                self._tell(first)
                raise self._end or LifeEnded("the coordinator closed instead of a Welcome")
            self._outbox = Outbox()
            log.info("connected to the coordinator", node_address=self._identity().node_address)
            self._on_event(read_welcome(first.welcome, asked_at))
            await self._exchange(stream, self._outbox)
        finally:
            channel, self._channel = self._channel, None
            await channel.close()

    async def _introduce(self, stream: Stream) -> tuple[node_service_pb2.ConnectResponse, float]:
        """Return the coordinator's first message, and when it was asked for it."""
        hello = node_service_pb2.Hello(
            protocol_version=self._hello.protocol_version,
            agent_version=self._hello.agent_version,
            boot_id=self._hello.boot_id,
            boot_started_at_ms=self._hello.boot_started_at_ms,
            stream_number=next(self._stream_numbers),
        )
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                with _life_ends(self._identity().node_address):
                    await stream.write(node_service_pb2.ConnectRequest(hello=hello))
                    asked_at = monotonic_s()
                    first = await stream.read()
        except TimeoutError as error:
            raise LifeEnded(f"no Welcome within {HANDSHAKE_TIMEOUT_S:.0f} s") from error
        if not isinstance(first, node_service_pb2.ConnectResponse):
            raise LifeEnded("the coordinator ended the stream without a word")
        return first, asked_at

    async def _exchange(self, stream: Stream, outbox: Outbox) -> NoReturn:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(stream), name="connection-read")
                group.create_task(self._write(stream, outbox), name="connection-write")
                group.create_task(self._await_end(stream), name="connection-end")
        except* LifeEnded as group_error:
            ended = group_error.exceptions[0]
            assert isinstance(ended, LifeEnded), "the three tasks raise it bare"
            raise ended from None
        raise AssertionError("each of the three tasks ends by an exception")

    async def _read(self, stream: Stream) -> NoReturn:
        address = self._identity().node_address
        while True:
            with _life_ends(address):
                response = await stream.read()
            if not isinstance(response, node_service_pb2.ConnectResponse):
                raise LifeEnded("the coordinator ended the stream")
            self._tell(response)

    def _tell(self, response: node_service_pb2.ConnectResponse) -> None:
        event = read_message(response)
        if event is None:
            log.warning("ignored a message of an unknown kind", kind=response.WhichOneof("message"))
        else:
            self._on_event(event)

    async def _write(self, stream: Stream, outbox: Outbox) -> NoReturn:
        address = self._identity().node_address
        while True:
            message = write_command(await outbox.take())
            with _life_ends(address):
                await stream.write(message)

    async def _await_end(self, stream: Stream) -> NoReturn:
        await self._end_wanted.wait()
        assert self._end is not None, "close sets it first"
        # Half-close, and let the other side take what is on its way; it answers by ending the stream.
        with _life_ends(self._identity().node_address):
            await stream.done_writing()
            await asyncio.sleep(GOODBYE_S)
        raise self._end
