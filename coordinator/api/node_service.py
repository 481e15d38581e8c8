"""NodeService: one Connect stream per agent, certificate renewal, and manifests of models.

The handler converts: messages of the agent become scheduler events and
registry reports, commands of the driver become messages of the coordinator.
Garbage ends the stream with a reason, is logged once, and disturbs nobody else.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import grpc
import structlog

from coordinator.api.agent_messages import AgentMessages, ProtocolViolation
from coordinator.api.identity import Context, caller, presented_sha256
from coordinator.api.verdict_desk import VerdictDesk
from coordinator.clock import Clock
from coordinator.enrolment.service import EnrolmentAuthority
from coordinator.errors import Reason, SlackwaterError
from coordinator.fleet.models import find_model
from coordinator.fleet.registry import FleetRegistry
from coordinator.ledger.asks import Asks
from coordinator.ledger.holdback import Credits
from coordinator.ledger.receipts import ReceiptDesk
from coordinator.scheduler import events as e
from coordinator.scheduler.driver import SchedulerDriver
from coordinator.store.port import NodeRow, Store
from coordinator.verification.challenge_rounds import ChallengeRounds
from inference.task import NodeId, TaskId
from protos.slackwater.common.v1 import envelope_pb2
from protos.slackwater.node.v1 import node_service_pb2 as wire
from protos.slackwater.node.v1 import node_service_pb2_grpc

PROTOCOL_VERSION = 1
# A frozen agent must be missed within 3 s of silence (Limits.silence_busy_s).
HEARTBEAT_BUSY_MS = 1_000
HEARTBEAT_IDLE_MS = 10_000
# How long a frame may wait for company. Below the pace of one stream it changes
# nothing about the writes to clients, one a token, and those are the cost; so a
# short wait is as cheap and steadier: with 32 streams at 5 ms a token, alternated,
# 2 ms took 62 us a token and put the 99th percentile of a reader's gaps 3.8 ms above
# the engine's, 4 ms took 66 us and 4.9 ms. From 7 ms on the gaps are over the 5 ms
# that docs/benchmarks.md promises.
FRAME_DELAY_MS = 2
# From accepting the stream to the agent's Hello.
HELLO_TIMEOUT_S = 10.0
BOOT_ID_BYTES = 16
# A version is a few dozen characters; it is logged and shown to every administrator.
AGENT_VERSION_CHARACTERS_MAX = 64
# From the coordinator's last word on: an agent that does not even take its Closing is cut off.
CLOSING_GRACE_S = 2.0
# Messages that wait for an agent that does not read. Cancels and heartbeats
# are small, so this is minutes of them; prompt chunks have a limit in bytes.
WAITING_MESSAGES_MAX = 4_096
# 64 prompts of 250,000 ids.
WAITING_CHUNK_BYTES_MAX = 64 * 1024 * 1024

log = structlog.get_logger()


class Outbox:
    """What waits to be sent to one agent: control messages first, then prompt chunks. Implements AgentConnection.

    `cut_off` ends the stream by force. It is called where the agent has not
    taken its Closing in time, as one that reads nothing never will.
    """

    def __init__(self, connection_id: e.ConnectionId, node: NodeRow, cut_off: Callable[[], object]) -> None:
        self.connection_id = connection_id
        self.node_id = node.node_id
        self.signing_public_key = node.signing_public_key
        self._urgent: deque[wire.ConnectResponse] = deque()
        self._chunks: deque[wire.PromptChunk] = deque()
        self._chunk_bytes = 0
        self._closing: wire.ConnectResponse | None = None
        self._cut_off = cut_off
        self._grace: asyncio.TimerHandle | None = None
        self._ended = False
        self._filled = asyncio.Event()

    @property
    def closing(self) -> bool:
        """Whether the last word is spoken: nothing is sent any more, and what the agent says does not count."""
        return self._closing is not None

    def send(self, message: wire.ConnectResponse) -> None:
        if self.closing:
            return
        self._urgent.append(message)
        self._check_limits()
        self._filled.set()

    def send_chunks(self, task_id: TaskId, attempt: int, chunks: Sequence[wire.PromptChunk]) -> None:
        if self.closing:
            return
        self._chunks.extend(chunks)
        self._chunk_bytes += sum(len(chunk.token_ids) for chunk in chunks)
        self._check_limits()
        self._filled.set()

    def drop_chunks(self, task_id: TaskId, attempt: int) -> None:
        if self._chunks:
            self._chunks = deque(
                chunk for chunk in self._chunks if (chunk.task_id, chunk.attempt) != (task_id, attempt)
            )
            self._chunk_bytes = sum(len(chunk.token_ids) for chunk in self._chunks)

    def close(self, reason: "wire.ClosingReason.ValueType", detail: str) -> None:
        if not self.closing:
            self._closing = wire.ConnectResponse(closing=wire.Closing(reason=reason, detail=detail))
            self._grace = asyncio.get_running_loop().call_later(CLOSING_GRACE_S, self._cut_off)
            self._filled.set()

    def refuse(self, why: str) -> None:
        """Close because the agent broke the protocol; logged once, whatever follows."""
        if not self.closing:
            log.warning("agent_broke_protocol", node=self.node_id, why=why)
            self.close(wire.CLOSING_REASON_PROTOCOL_VIOLATION, why)

    def release(self) -> None:
        """The stream is over; there is nothing to cut off any more."""
        if self._grace is not None:
            self._grace.cancel()

    def _check_limits(self) -> None:
        if len(self._urgent) > WAITING_MESSAGES_MAX or self._chunk_bytes > WAITING_CHUNK_BYTES_MAX:
            self.refuse("the agent does not read what is sent to it")

    def end(self) -> None:
        """The agent hung up: nothing more is to be said."""
        self._ended = True
        self._filled.set()

    async def messages(self) -> AsyncIterator[wire.ConnectResponse]:
        """Yield what is to be sent until the connection is closed; Closing is the last."""
        while True:
            if self._closing is not None:
                yield self._closing
                return
            if self._ended:
                return
            if self._urgent:
                yield self._urgent.popleft()
            elif self._chunks:
                chunk = self._chunks.popleft()
                self._chunk_bytes -= len(chunk.token_ids)
                yield wire.ConnectResponse(prompt_chunk=chunk)
            else:
                self._filled.clear()
                await self._filled.wait()


class NodeServicer(node_service_pb2_grpc.NodeServiceServicer):
    def __init__(
        self,
        driver: SchedulerDriver,
        registry: FleetRegistry,
        store: Store,
        enrolment: EnrolmentAuthority,
        clock: Clock,
        cluster_id: str,
        signing_public_key: bytes,
        model_sources: Mapping[str, Sequence[str]],
        receipts: ReceiptDesk,
        verdicts: VerdictDesk,
        credits: Callable[[NodeId], Credits],
        asks: Asks,
        challenges: ChallengeRounds,
    ) -> None:
        self._driver = driver
        self._registry = registry
        self._messages = AgentMessages(driver, registry, clock, credits, asks)
        self._store = store
        self._enrolment = enrolment
        self._clock = clock
        self._cluster_id = cluster_id
        self._signing_public_key = signing_public_key
        self._model_sources = model_sources
        self._receipts = receipts
        self._verdicts = verdicts
        self._challenges = challenges
        self._connection_ids = itertools.count(1)

    async def Connect(
        self,
        request_iterator: AsyncIterator[wire.ConnectRequest],
        context: grpc.aio.ServicerContext[wire.ConnectRequest, wire.ConnectResponse],
    ) -> AsyncIterator[wire.ConnectResponse]:
        node = await asyncio.to_thread(self._find_node, caller().node_id)
        hello = await self._read_hello(node, request_iterator)
        if hello.protocol_version != PROTOCOL_VERSION:
            log.warning("agent_version_unsupported", node=node.node_id, version=hello.protocol_version)
            detail = f"this coordinator speaks protocol {PROTOCOL_VERSION}, the agent {hello.protocol_version}"
            closing = wire.Closing(reason=wire.CLOSING_REASON_VERSION_UNSUPPORTED, detail=detail)
            yield wire.ConnectResponse(closing=closing)
            return
        owner = await asyncio.to_thread(self._store.find_owner, node.owner_id)
        handling = asyncio.current_task()
        assert handling is not None, "gRPC runs each call as a task"
        outbox = Outbox(e.ConnectionId(next(self._connection_ids)), node, cut_off=handling.cancel)
        yield self._welcome()
        self._join_fleet(outbox, node, hello, trusted=owner is not None and owner.trusted)
        # No TaskGroup: a generator that is closed while it yields inside one cannot leave it.
        reader = asyncio.create_task(self._read(outbox, request_iterator))
        reader.add_done_callback(lambda _: outbox.end())
        try:
            async for message in outbox.messages():
                yield message
            if reader.done():
                await reader  # An unexpected failure of the reader is the call's failure.
        finally:
            outbox.release()
            reader.cancel()
            self._leave_fleet(outbox)

    async def RenewCertificate(
        self,
        request: wire.RenewCertificateRequest,
        context: grpc.aio.ServicerContext[wire.RenewCertificateRequest, wire.RenewCertificateResponse],
    ) -> wire.RenewCertificateResponse:
        node_id = caller().node_id
        renewed = await asyncio.to_thread(self._enrolment.renew, node_id, request.certificate_request)
        return wire.RenewCertificateResponse(certificate_chain=renewed.certificate.chain)

    async def GetManifest(
        self,
        request: wire.GetManifestRequest,
        context: grpc.aio.ServicerContext[wire.GetManifestRequest, wire.GetManifestResponse],
    ) -> wire.GetManifestResponse:
        row = await asyncio.to_thread(find_model, self._store, request.model)
        # The bytes as they were registered: the signature is over them.
        manifest = envelope_pb2.SignedEnvelope.FromString(row.envelope)
        return wire.GetManifestResponse(manifest=manifest, sources=self._model_sources.get(row.name, ()))

    async def GetCheckpoint(
        self,
        request: wire.GetCheckpointRequest,
        context: grpc.aio.ServicerContext[wire.GetCheckpointRequest, wire.GetCheckpointResponse],
    ) -> wire.GetCheckpointResponse:
        update = await self._receipts.update(request.old_size)
        return wire.GetCheckpointResponse(update=update)

    async def GetReceipt(
        self,
        request: wire.GetReceiptRequest,
        context: grpc.aio.ServicerContext[wire.GetReceiptRequest, wire.GetReceiptResponse],
    ) -> wire.GetReceiptResponse:
        receipts = await self._receipts.for_node(caller().node_id, TaskId(request.task_id))
        return wire.GetReceiptResponse(receipts=receipts)

    async def GetVerdicts(self, request: wire.GetVerdictsRequest, context: Context) -> wire.GetVerdictsResponse:
        return wire.GetVerdictsResponse(verdicts=await self._verdicts.of_node(caller().node_id))

    async def AppealVerdict(self, request: wire.AppealVerdictRequest, context: Context) -> wire.AppealVerdictResponse:
        verdict = await self._verdicts.appeal_of_node(caller().node_id, request.verdict_id)
        return wire.AppealVerdictResponse(verdict=verdict)

    async def AnswerChallenge(
        self, request_iterator: AsyncIterator[wire.AnswerChallengeRequest], context: Context
    ) -> AsyncIterator[wire.AnswerChallengeResponse]:
        certificate_sha256 = presented_sha256(context)
        async for response in self._challenges.answer(caller().node_id, certificate_sha256, request_iterator):
            yield response

    def _find_node(self, node_id: NodeId) -> NodeRow:
        node = self._store.find_node(node_id)
        if node is None:
            raise SlackwaterError(Reason.CERTIFICATE_UNKNOWN, f"node {node_id} is not enrolled here")
        return node

    async def _read_hello(self, node: NodeRow, requests: AsyncIterator[wire.ConnectRequest]) -> wire.Hello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                return _checked_hello(await anext(aiter(requests), None))
        except TimeoutError:
            why = f"no Hello within {HELLO_TIMEOUT_S:g} s"
        except (ProtocolViolation, SlackwaterError) as violation:
            why = str(violation)
        log.warning("agent_stream_refused", node=node.node_id, why=why)
        raise SlackwaterError(Reason.PROTOCOL_VIOLATION, why)

    def _welcome(self) -> wire.ConnectResponse:
        return wire.ConnectResponse(
            welcome=wire.Welcome(
                cluster_id=self._cluster_id,
                coordinator_time_ms=self._clock.now_ms(),
                heartbeat_busy_ms=HEARTBEAT_BUSY_MS,
                heartbeat_idle_ms=HEARTBEAT_IDLE_MS,
                frame_delay_ms=FRAME_DELAY_MS,
                coordinator_public_keys=[self._signing_public_key],
                protocol_version=PROTOCOL_VERSION,
            )
        )

    def _join_fleet(self, outbox: Outbox, node: NodeRow, hello: wire.Hello, *, trusted: bool) -> None:
        counts = self._driver.add_connection(
            outbox,
            e.NodeConnected(
                node_id=node.node_id,
                connection_id=outbox.connection_id,
                owner_id=node.owner_id,
                trusted=trusted,
                draining=node.draining,
                boot_started_at_ms=hello.boot_started_at_ms,
                stream_number=hello.stream_number,
            ),
        )
        if counts:
            log.info("agent_connected", node=node.node_id, version=hello.agent_version)
            self._registry.connected(node.node_id, outbox, hello.agent_version, self._clock.now_ms())
            self._challenges.joined(outbox, hello.boot_id, caller().address)
        else:
            log.warning("agent_superseded", node=node.node_id, why="a newer stream of this node is connected")

    def _leave_fleet(self, outbox: Outbox) -> None:
        log.info("agent_disconnected", node=outbox.node_id)
        self._driver.remove_connection(outbox)
        self._challenges.left(outbox)
        self._registry.disconnected(outbox.node_id, outbox)

    async def _read(self, outbox: Outbox, requests: AsyncIterator[wire.ConnectRequest]) -> None:
        try:
            async for request in requests:
                if outbox.closing:
                    return
                self._messages.take(outbox, request)
        except (ProtocolViolation, SlackwaterError) as violation:
            outbox.refuse(str(violation))


def _checked_hello(first: wire.ConnectRequest | None) -> wire.Hello:
    """Return the Hello in an agent's first message.

    Raises:
        ProtocolViolation: it is none.
    """
    if first is None or first.WhichOneof("message") != "hello":
        raise ProtocolViolation("the first message must be a Hello")
    if len(first.hello.boot_id) != BOOT_ID_BYTES:
        raise ProtocolViolation(f"the boot id of a Hello has {len(first.hello.boot_id)} bytes, not {BOOT_ID_BYTES}")
    if len(first.hello.agent_version) > AGENT_VERSION_CHARACTERS_MAX:
        raise ProtocolViolation(f"the version in a Hello has more than {AGENT_VERSION_CHARACTERS_MAX} characters")
    return first.hello
