"""A node that breaks the protocol or lies, against a real coordinator over mutual TLS, beside three honest agents.

It is enrolled like any other and then says what it likes. Whatever that is, it
is refused with a reason, logged once, and nobody else notices: three clients
(the witnesses) read long answers of the honest agents all the while.
"""

import asyncio
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from dev_network import DevNetwork
from google.protobuf.message import Message
from network_settings import MODELS
from slackwater import Answer, AttemptBroken, Delta

from agent.clock import wall_ms
from inference.fake_model import FakeVocabulary, expected_ids
from inference.task import Sampling, pack_token_ids
from protos import signing
from protos.join import decode, spki_sha256
from protos.slackwater.common.v1 import capability_pb2, completion_pb2, envelope_pb2, error_pb2, statement_pb2
from protos.slackwater.node.v1 import (
    enrolment_service_pb2,
    enrolment_service_pb2_grpc,
    node_service_pb2,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "fake-smollm2"
PROMPT = (100, 200, 300)
TOKENS = 8
SEED = 7
GREEDY = Sampling(temperature=0.0, seed=SEED)
# An end-of-text id of the model.
STOP_ID = 2
# Longer than all tests of this file together, at the speed of the honest engines (50 tokens/s).
WITNESS_TOKENS = 20_000
# A test that waits longer for anything has failed.
PATIENCE_S = 20.0
CONNECT = "/slackwater.node.v1.NodeService/Connect"

Say = node_service_pb2.ConnectRequest
Heard = node_service_pb2.ConnectResponse


@pytest.fixture(scope="module")
def vocabulary() -> FakeVocabulary:
    return FakeVocabulary.load(MODELS / MODEL / "tokenizer.json")


# ---- the hostile agent


@dataclass
class Task:
    """One assignment as it came."""

    envelope: envelope_pb2.SignedEnvelope
    header: statement_pb2.TaskHeader

    def frame(self, first_index: int, ids: Sequence[int], **changes: Any) -> Say:
        fields: dict[str, Any] = {
            "task_id": self.header.task_id,
            "attempt": self.header.attempt,
            "first_index": first_index,
            "token_ids": ids,
            **changes,
        }
        return Say(frames=node_service_pb2.FrameBatch(frames=[node_service_pb2.Frame(**fields)]))

    def statement(self, ids: Sequence[int], **changes: Any) -> statement_pb2.ResultStatement:
        """Return the true statement about these ids, with changes that make it a lie."""
        fields: dict[str, Any] = {
            "header_sha256": hashlib.sha256(self.envelope.payload).digest(),
            "node_id": self.header.node_id,
            "task_id": self.header.task_id,
            "attempt": self.header.attempt,
            "first_index": self.header.first_index,
            "token_ids": pack_token_ids(ids),
            "finish_reason": completion_pb2.FINISH_REASON_LENGTH,
            "prompt_tokens": self.header.prompt_token_count,
            "completion_tokens": len(ids),
            "first_token_ms": 1,
            "total_ms": 2,
            "energy_method": statement_pb2.ENERGY_METHOD_NONE,
            "engine": "fake",
            "engine_version": "1",
            "key_epoch": 1,
            **changes,
        }
        return statement_pb2.ResultStatement(**fields)

    def ended(self, envelope: envelope_pb2.SignedEnvelope, **finished: Any) -> Say:
        return Say(
            ended=node_service_pb2.AttemptEnded(
                task_id=self.header.task_id,
                attempt=self.header.attempt,
                finished=node_service_pb2.AttemptFinished(statement=envelope, **finished),
            )
        )


class Visit:
    """One Connect stream, on which anything can be said, also bytes that are no message."""

    def __init__(self, stream: "grpc.aio.StreamStreamCall[Any, Heard]") -> None:
        self._stream = stream

    async def say(self, message: Message | bytes) -> None:
        """Say it, unless the coordinator has hung up already."""
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        try:
            await self._stream.write(raw)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    async def hear(self, kind: str) -> Heard:
        """Wait for the next message of a kind, skipping others."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                heard = await self._stream.read()
                assert isinstance(heard, Heard), f"the stream ended before {kind}: {await self._status()}"
                if heard.WhichOneof("message") == kind:
                    return heard

    async def task(self) -> Task:
        """Wait for an assignment with its ids."""
        envelope = (await self.hear("assignment")).assignment.header
        await self.hear("prompt_chunk")
        return Task(envelope, statement_pb2.TaskHeader.FromString(envelope.payload))

    async def end(self) -> str:
        """Wait for the end of the stream; return why: the reason of a Closing or of the error, and the detail."""
        why = ""
        async with asyncio.timeout(PATIENCE_S):
            try:
                while isinstance(heard := await self._stream.read(), Heard):
                    if heard.WhichOneof("message") == "closing":
                        closing = heard.closing
                        why = f"{node_service_pb2.ClosingReason.Name(closing.reason)}: {closing.detail}"
            except grpc.aio.AioRpcError:
                return await self._status()
            return why or await self._status()

    async def hang_up(self) -> None:
        await self._stream.done_writing()

    def cancel(self) -> None:
        self._stream.cancel()

    async def _status(self) -> str:
        for key, value in await self._stream.trailing_metadata() or ():
            if key == "slackwater-error-bin" and isinstance(value, bytes):
                detail = error_pb2.ErrorDetail.FromString(value)
                return f"{error_pb2.ErrorReason.Name(detail.reason)}: {detail.message}"
        return f"{(await self._stream.code()).name}: {await self._stream.details()}"


@dataclass
class HostileAgent:
    """An enrolled node without engine, model or scruples."""

    node_id: str
    signing_key: Ed25519PrivateKey
    channel: grpc.aio.Channel
    manifest_digest: str

    @classmethod
    @asynccontextmanager
    async def enrolled(cls, network: DevNetwork, owner: str) -> AsyncIterator["HostileAgent"]:
        async with network.admin() as admin:
            join = await admin.create_join_string((await admin.create_owner(owner)).owner_id)
        async with network.client() as client:
            (model,) = await client.models()
        ca = await asyncio.to_thread(Path(network.ready.ca_file).read_bytes)
        tls_key, signing_key = ec.generate_private_key(ec.SECP256R1()), Ed25519PrivateKey.generate()
        answer = await _enrol(join.join_string, ca, tls_key, signing_key, owner)
        credentials = grpc.ssl_channel_credentials(
            ca,
            tls_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            answer.certificate_chain.encode(),
        )
        # A window of 64 kB for what is not read, that does not grow.
        options = [("grpc.max_send_message_length", 64 * 1024 * 1024), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.secure_channel(answer.node_address, credentials, options=options) as channel:
            yield cls(answer.node_id, signing_key, channel, model.manifest_digest)

    def dial(self) -> Visit:
        """Open a stream and say nothing."""
        call: Any = self.channel.stream_stream(CONNECT, request_serializer=None, response_deserializer=Heard.FromString)
        return Visit(call())

    def hello(self, **changes: Any) -> Say:
        fields: dict[str, Any] = {
            "protocol_version": 1,
            "agent_version": "0",
            "boot_id": os.urandom(16),
            "boot_started_at_ms": wall_ms(),
            **changes,
        }
        return Say(hello=node_service_pb2.Hello(**fields))

    @asynccontextmanager
    async def visit(self) -> AsyncIterator[Visit]:
        """A stream after Hello and Welcome."""
        visit = self.dial()
        try:
            await visit.say(self.hello())
            await visit.hear("welcome")
            yield visit
        finally:
            visit.cancel()

    def engine(self, **changes: Any) -> capability_pb2.Engine:
        """Return an engine so fast that every next task comes here."""
        fields: dict[str, Any] = {
            "engine_id": "main",
            "kind": "fake",
            "status": capability_pb2.ENGINE_STATUS_READY,
            "manifest_digest": self.manifest_digest,
            "model": MODEL,
            "sampler_profile": "position-hash-v1",
            "slots": 4,
            "tokens_per_second": 1e9,
            **changes,
        }
        return capability_pb2.Engine(**fields)

    def state(self, *engines: capability_pb2.Engine, **changes: Any) -> Say:
        return Say(state=node_service_pb2.NodeState(sequence=1, engines=engines, **changes))

    @asynccontextmanager
    async def serving(self, network: DevNetwork) -> AsyncIterator[Visit]:
        """A visit as a node that gets the next task."""
        async with self.visit() as visit:
            await visit.say(self.state(self.engine()))
            async with network.admin() as admin, asyncio.timeout(PATIENCE_S):
                while not any(node.node_id == self.node_id and node.engines for node in await admin.nodes()):
                    await asyncio.sleep(0.02)
            yield visit

    def seal(self, statement: Message | bytes) -> envelope_pb2.SignedEnvelope:
        payload = statement if isinstance(statement, bytes) else statement.SerializeToString()
        return signing.seal(signing.RESULT_TYPE, payload, self.signing_key)


async def _enrol(
    join_string: str, ca: bytes, tls_key: ec.EllipticCurvePrivateKey, signing_key: Ed25519PrivateKey, label: str
) -> enrolment_service_pb2.CompleteEnrolmentResponse:
    ticket = decode(join_string)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(tls_key, hashes.SHA256())
    der = request.public_bytes(Encoding.DER)
    pin = spki_sha256(x509.load_pem_x509_certificate(ca))
    async with grpc.aio.secure_channel(ticket.address, grpc.ssl_channel_credentials(ca)) as channel:
        stub = enrolment_service_pb2_grpc.EnrolmentServiceStub(channel)
        started = await stub.StartEnrolment(enrolment_service_pb2.StartEnrolmentRequest(token_id=ticket.token_id))
        proof = signing.enrolment_proof(ticket.token_id, der, pin, started.server_nonce)
        return await stub.CompleteEnrolment(
            enrolment_service_pb2.CompleteEnrolmentRequest(
                token_id=ticket.token_id,
                token_secret=ticket.token_secret,
                certificate_request=der,
                signing_public_key=signing_key.public_key().public_bytes_raw(),
                server_nonce=started.server_nonce,
                proof=signing_key.sign(proof),
                label=label,
            )
        )


# ---- those who must not notice


@dataclass
class Witness:
    """A client that reads one long answer of an honest agent."""

    number: int
    answer: Answer
    ids: list[int] = field(default_factory=list)
    arrived_at: list[float] = field(default_factory=list)

    async def read(self) -> None:
        async with self.answer:
            async for event in self.answer:
                assert not isinstance(event, AttemptBroken), f"an honest attempt was broken: {event}"
                if isinstance(event, Delta) and event.token_ids:
                    self.ids.extend(event.token_ids)
                    self.arrived_at.append(time.monotonic())

    def check(self, vocabulary: FakeVocabulary, since: float) -> None:
        expected = expected_ids([*PROMPT, self.number], GREEDY, len(self.ids), vocabulary)
        assert self.ids == list(expected), f"the answer of witness {self.number} differs from the undisturbed one"
        assert self.arrived_at[-1] > since, f"witness {self.number} has read nothing since the test began"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def witnesses(network: DevNetwork) -> AsyncIterator[list[Witness]]:
    async with network.client() as client:
        there = []
        for number in range(3):
            options: Any = {"max_tokens": WITNESS_TOKENS, "temperature": 0.0, "seed": SEED}
            there.append(Witness(number, client.complete([*PROMPT, number], model=MODEL, **options)))
        readers = [asyncio.create_task(witness.read()) for witness in there]
        async with asyncio.timeout(PATIENCE_S):
            while any(not witness.ids for witness in there):
                await asyncio.sleep(0.02)
        yield there
        assert not any(reader.done() for reader in readers), [reader.exception() for reader in readers if reader.done()]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hostile(network: DevNetwork, witnesses: list[Witness]) -> AsyncIterator[HostileAgent]:
    # So many lies are told here that their teller would soon be asked nothing any more.
    async with network.admin() as admin:
        assert await admin.set_verification_mode("structure", shadow=True) == ["structure"]
    async with HostileAgent.enrolled(network, "mallory") as agent:
        yield agent


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def others_are_undisturbed(
    network: DevNetwork, witnesses: list[Witness], vocabulary: FakeVocabulary
) -> AsyncIterator[None]:
    since = time.monotonic()
    yield
    async with asyncio.timeout(PATIENCE_S):
        while any(witness.arrived_at[-1] <= since for witness in witnesses):
            await asyncio.sleep(0.02)
    for witness in witnesses:
        witness.check(vocabulary, since)
    async with network.admin() as admin:
        status = {node.node_id: node.status for node in await admin.nodes()}
    assert [status[agent.node_id] for agent in network.ready.agents] == ["online"] * 3


class Log:
    """What the coordinator has logged since this was made."""

    def __init__(self, network: DevNetwork) -> None:
        self._path = Path(network.ready.state_dir) / "coordinator.log"
        self._skip = self._path.stat().st_size

    def lines(self) -> list[str]:
        with self._path.open("rb") as file:
            file.seek(self._skip)
            return file.read().decode(errors="replace").splitlines()

    def complaints(self) -> list[dict[str, Any]]:
        """Return all warnings and errors; a line that is no JSON object, as a traceback has, fails the test."""
        told = [json.loads(line) for line in self.lines()]
        return [one for one in told if one["level"] in ("warning", "error")]


@pytest.fixture
def log(network: DevNetwork) -> Log:
    return Log(network)


# ---- what breaks the protocol


def _hello_twice(agent: HostileAgent) -> list[Message | bytes]:
    return [agent.hello(), agent.hello()]


def _after_hello(*said: Message | bytes) -> Callable[[HostileAgent], list[Message | bytes]]:
    return lambda agent: [agent.hello(), *said]


def _engines(*changes: dict[str, Any]) -> Callable[[HostileAgent], list[Message | bytes]]:
    return lambda agent: [agent.hello(), agent.state(*(agent.engine(**one) for one in changes))]


_HEARTBEAT = Say(heartbeat=node_service_pb2.AgentHeartbeat(sequence=1))
_STATE = Say(state=node_service_pb2.NodeState(sequence=1, host=capability_pb2.Host(cpu_model="x" * 100)))
_POSITION = completion_pb2.PositionLogprobs(chosen=completion_pb2.TokenLogprob(token_id=5, logprob=-1.0))
_MISCOUNTED = node_service_pb2.Frame(task_id="task-1", attempt=1, token_ids=[5, 6], logprobs=[_POSITION])
_NAN = capability_pb2.Gpu(power_draw_w=capability_pb2.NumberReading(value=math.nan))
_REFERENCE = node_service_pb2.AttemptRef(task_id="task-1", attempt=1)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        pytest.param(lambda _: [_HEARTBEAT], "first message", id="no Hello"),
        pytest.param(lambda _: [b"\xff\xff\xff garbage"], "not the protobuf message", id="garbage instead of Hello"),
        pytest.param(lambda _: [b""], "first message", id="nothing in the first message"),
        pytest.param(lambda agent: [agent.hello(boot_id=b"abc")], "boot id", id="a boot id of three bytes"),
        pytest.param(lambda agent: [agent.hello(boot_id=b"")], "boot id", id="no boot id"),
        pytest.param(lambda agent: [agent.hello(agent_version="v" * 100_000)], "version", id="a version of 100 kB"),
        pytest.param(_hello_twice, "second Hello", id="Hello twice"),
        pytest.param(_after_hello(b"\x12\xff\xff\xff"), "not the protobuf message", id="garbage"),
        pytest.param(_after_hello(_STATE.SerializeToString()[:-7]), "not the protobuf message", id="a cut state"),
        pytest.param(_after_hello(b""), "empty or unknown", id="an empty message"),
        pytest.param(_after_hello(b"\xfa\x07\x03abc"), "empty or unknown", id="a message of no kind"),
        pytest.param(_engines({"tokens_per_second": math.nan}), "no number", id="NaN tokens/s"),
        pytest.param(_engines({"tokens_per_second": math.inf}), "no number", id="infinite tokens/s"),
        pytest.param(lambda agent: [agent.hello(), agent.state(gpus=[_NAN])], "no number", id="NaN watts"),
        pytest.param(_engines({"tokens_per_second": -1.0}), "no number", id="negative tokens/s"),
        pytest.param(_engines({"engine_id": ""}), "without an id", id="an engine without an id"),
        pytest.param(_engines({}, {}), "two engines with one id", id="two engines with one id"),
        pytest.param(_engines(*({"engine_id": str(i)} for i in range(10_000))), "engines", id="10,000 engines"),
        pytest.param(_engines({"note": "n" * 2_000_000}), "bytes", id="a note of 2 MB"),
        pytest.param(lambda agent: [agent.hello(), agent.state(gpus=[capability_pb2.Gpu()] * 100)], "gpus", id="gpus"),
        pytest.param(
            lambda agent: [agent.hello(), agent.state(running=[_REFERENCE] * 20_000)], "running", id="20,000 attempts"
        ),
        pytest.param(
            _after_hello(Say(ended=node_service_pb2.AttemptEnded(task_id="task-1", attempt=1))),
            "without an outcome",
            id="an end without an outcome",
        ),
        pytest.param(
            _after_hello(Say(frames=node_service_pb2.FrameBatch(frames=[_MISCOUNTED]))),
            "2 ids with 1 logprobs",
            id="one log-probability for two ids",
        ),
    ],
)
async def test_whoever_breaks_the_protocol_is_told_why_and_logged_once(
    hostile: HostileAgent, log: Log, said: Callable[[HostileAgent], list[Message | bytes]], why: str
) -> None:
    visit = hostile.dial()
    for message in said(hostile):
        await visit.say(message)
    ending = await visit.end()
    assert why in ending, ending
    assert "PROTOCOL_VIOLATION" in ending, ending
    complaints = log.complaints()
    assert [one.get("node") for one in complaints] == [hostile.node_id], complaints
    assert why in complaints[0]["why"]
    assert len(json.dumps(complaints)) < 1000


async def test_a_message_over_the_limit_is_refused_and_ends_the_stream(hostile: HostileAgent, log: Log) -> None:
    visit = hostile.dial()
    await visit.say(hostile.hello())
    await visit.hear("welcome")
    await visit.say(b"\x12" + b"x" * 9_000_000)
    assert "larger than max" in await visit.end()
    await _until(lambda: any('"agent_disconnected"' in line for line in log.lines()))
    assert log.complaints() == []


@pytest.mark.slow
async def test_whoever_dials_and_says_nothing_is_hung_up_on(hostile: HostileAgent, log: Log) -> None:
    silent, leaving = hostile.dial(), hostile.dial()
    await leaving.hang_up()
    assert "Hello" in await leaving.end()
    assert "within 10 s" in await silent.end()
    assert [one["node"] for one in log.complaints()] == [hostile.node_id] * 2


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
async def test_another_protocol_version_is_told_which_one_is_spoken(
    hostile: HostileAgent, log: Log, version: int
) -> None:
    visit = hostile.dial()
    await visit.say(hostile.hello(protocol_version=version))
    ending = await visit.end()
    assert ending.startswith("CLOSING_REASON_VERSION_UNSUPPORTED: this coordinator speaks protocol 1"), ending
    assert [one["node"] for one in log.complaints()] == [hostile.node_id]


# ---- floods


async def test_a_flood_of_heartbeats_slows_nobody_down(hostile: HostileAgent, witnesses: list[Witness]) -> None:
    async with hostile.visit() as visit:
        since = time.monotonic()
        reader = asyncio.create_task(visit.end())
        for _ in range(20_000):
            await visit.say(_HEARTBEAT)
        gaps = [
            later - earlier
            for one in witnesses
            for earlier, later in zip(one.arrived_at, one.arrived_at[1:], strict=False)
            if later > since
        ]
        assert max(gaps) < 2
        reader.cancel()


async def test_an_agent_that_asks_and_never_reads_is_cut_off_before_its_answers_pile_up(
    network: DevNetwork, hostile: HostileAgent, log: Log
) -> None:
    """Mutation seen to fail here: no hard end of a connection whose agent does not take its Closing."""
    coordinator = psutil.Process(network.ready.coordinator_pid)
    before = coordinator.memory_info().rss
    async with hostile.visit() as visit:
        async with asyncio.timeout(60):
            while not any('"agent_disconnected"' in line for line in log.lines()):
                for _ in range(2_000):
                    await visit.say(_HEARTBEAT)
                await asyncio.sleep(0)
    assert coordinator.memory_info().rss - before < 30_000_000
    assert [(one["node"], one["why"]) for one in log.complaints()] == [
        (hostile.node_id, "the agent does not read what is sent to it")
    ]


async def test_news_of_tasks_that_are_not_its_own_are_neither_believed_nor_logged(
    hostile: HostileAgent, witnesses: list[Witness], log: Log
) -> None:
    """A thousand each, about tasks that do not exist and about those of others, with details of a kilobyte.

    Mutations seen to fail here: frames taken from any connection; refusals of unknown attempts logged.
    """
    async with hostile.visit() as visit:
        for number in range(1_000):
            for task_id in (f"task-{number}", witnesses[number % 3].answer.task_id or ""):
                for message in _news_of(task_id, hostile, len(witnesses[number % 3].ids)):
                    await visit.say(message)
        await visit.say(_HEARTBEAT)
        await visit.hear("heartbeat")
    assert log.complaints() == []
    assert sum(map(len, log.lines())) < 3_000


def _news_of(task_id: str, hostile: HostileAgent, index: int) -> list[Say]:
    reference: Any = {"task_id": task_id, "attempt": 1}
    frames = [node_service_pb2.Frame(**reference, first_index=index + step, token_ids=[5]) for step in (0, 1, 2)]
    statement = hostile.seal(statement_pb2.ResultStatement(node_id=hostile.node_id, **reference))
    finished = node_service_pb2.AttemptFinished(statement=statement)
    failed = node_service_pb2.AttemptFailed(reason=node_service_pb2.FAILURE_REASON_ENGINE_CRASHED, detail="d" * 1000)
    refused = node_service_pb2.AssignmentRefused(
        **reference, reason=node_service_pb2.REFUSAL_REASON_BUSY, detail="d" * 1000
    )
    return [
        Say(frames=node_service_pb2.FrameBatch(frames=frames)),
        Say(ended=node_service_pb2.AttemptEnded(**reference, finished=finished)),
        Say(ended=node_service_pb2.AttemptEnded(**reference, failed=failed)),
        Say(refused=refused),
    ]


# ---- lies about a task of its own


@dataclass
class Liar:
    """What a lie is made of: the task, its true ids, and who tells it."""

    agent: HostileAgent
    task: Task
    ids: list[int]

    def finish(self, count: int = TOKENS, **changes: Any) -> Say:
        return self.task.ended(self.agent.seal(self.task.statement(self.ids[:count], **changes)))


Lie = Callable[[Liar], list[Say]]


def _statement(**changes: Any) -> Lie:
    return lambda liar: [liar.task.frame(0, liar.ids), liar.finish(**changes)]


def _sealed_otherwise(seal: Callable[[Liar, statement_pb2.ResultStatement], envelope_pb2.SignedEnvelope]) -> Lie:
    def tell(liar: Liar) -> list[Say]:
        statement = liar.task.statement(liar.ids)
        return [liar.task.frame(0, liar.ids), liar.task.ended(seal(liar, statement))]

    return tell


def _by_another_key(_: Liar, statement: statement_pb2.ResultStatement) -> envelope_pb2.SignedEnvelope:
    return signing.seal(signing.RESULT_TYPE, statement.SerializeToString(), Ed25519PrivateKey.generate())


def _altered(liar: Liar, statement: statement_pb2.ResultStatement) -> envelope_pb2.SignedEnvelope:
    envelope = liar.agent.seal(statement)
    envelope.payload = envelope.payload[:-1] + bytes([envelope.payload[-1] ^ 1])
    return envelope


def _as_a_task(liar: Liar, statement: statement_pb2.ResultStatement) -> envelope_pb2.SignedEnvelope:
    return signing.seal(signing.TASK_TYPE, statement.SerializeToString(), liar.agent.signing_key)


FRAME_LIES: dict[str, tuple[str, Lie]] = {
    "frames with a gap": ("frame_gap", lambda liar: [liar.task.frame(0, liar.ids[:2]), liar.task.frame(3, [5])]),
    "frames in another order": (
        "frame_gap",
        lambda liar: [liar.task.frame(4, liar.ids[4:]), liar.task.frame(0, liar.ids[:4])],
    ),
    "a frame at the end of all indexes": ("frame_gap", lambda liar: [liar.task.frame(2**32 - 1, [5])]),
    "a frame again with other ids": (
        "frame_conflict",
        lambda liar: [liar.task.frame(0, liar.ids[:2]), liar.task.frame(0, [liar.ids[0], liar.ids[1] ^ 1])],
    ),
    "an id outside the vocabulary": ("id_out_of_range", lambda liar: [liar.task.frame(0, [5, 49152])]),
    "the largest id there is": ("id_out_of_range", lambda liar: [liar.task.frame(0, [2**32 - 1])]),
    "more ids than were asked for": ("limit_exceeded", lambda liar: [liar.task.frame(0, [5] * (TOKENS + 1))]),
    "ids after the end": ("ids_after_stop", lambda liar: [liar.task.frame(0, [STOP_ID, 5])]),
}
STATEMENT_LIES: dict[str, tuple[str, Lie]] = {
    "header_sha256": ("statement_invalid", _statement(header_sha256=b"\0" * 32)),
    "node_id": ("statement_invalid", _statement(node_id="another")),
    "task_id": ("statement_invalid", _statement(task_id="another")),
    "attempt": ("statement_invalid", _statement(attempt=2)),
    "first_index": ("statement_invalid", _statement(first_index=3)),
    "token_ids of half an id": ("statement_invalid", _statement(token_ids=b"abc")),
    "token_ids": ("statement_conflict", _statement(token_ids=pack_token_ids([5] * TOKENS))),
    "finish_reason": ("false_stop", _statement(finish_reason=completion_pb2.FINISH_REASON_STOP)),
    "no finish_reason": ("statement_invalid", _statement(finish_reason=completion_pb2.FINISH_REASON_UNSPECIFIED)),
    "prompt_tokens": ("statement_invalid", _statement(prompt_tokens=1_000_000)),
    "completion_tokens": ("statement_invalid", _statement(completion_tokens=1_000_000)),
    "another key": ("statement_invalid", _sealed_otherwise(_by_another_key)),
    "an altered byte": ("statement_invalid", _sealed_otherwise(_altered)),
    "a type that is no result": ("statement_invalid", _sealed_otherwise(_as_a_task)),
    "a signed payload that is no statement": (
        "statement_invalid",
        _sealed_otherwise(lambda liar, _: liar.agent.seal(b"\xff\xff\xff")),
    ),
    "no envelope at all": ("statement_invalid", _sealed_otherwise(lambda *_: envelope_pb2.SignedEnvelope())),
    "scores that nobody asked for": (
        "statement_invalid",
        lambda liar: [
            liar.task.frame(0, liar.ids),
            liar.task.ended(liar.agent.seal(liar.task.statement(liar.ids)), scores=[_POSITION]),
        ],
    ),
}
EARLY_LIES: dict[str, tuple[str, Lie]] = {
    "an end before the limit": ("false_length", lambda liar: [liar.task.frame(0, liar.ids[:4]), liar.finish(4)]),
    "a statement without frames": ("statement_conflict", lambda liar: [liar.finish()]),
    "an end by an unknown reason": (
        "unspecified",
        lambda liar: [
            Say(
                ended=node_service_pb2.AttemptEnded(
                    task_id=liar.task.header.task_id,
                    attempt=liar.task.header.attempt,
                    failed=node_service_pb2.AttemptFailed(detail="d" * 1_000_000),
                )
            )
        ],
    ),
    "a refusal of an unknown kind": (
        "refused_unspecified",
        lambda liar: [
            Say(
                refused=node_service_pb2.AssignmentRefused(
                    task_id=liar.task.header.task_id, attempt=liar.task.header.attempt, detail="d" * 1_000_000
                )
            )
        ],
    ),
}


@pytest.mark.parametrize(
    ("reason", "lie"),
    [pytest.param(*lie, id=name) for name, lie in [*FRAME_LIES.items(), *STATEMENT_LIES.items(), *EARLY_LIES.items()]],
)
async def test_a_lie_costs_its_teller_the_attempt_and_the_client_nothing(
    network: DevNetwork, hostile: HostileAgent, vocabulary: FakeVocabulary, log: Log, reason: str, lie: Lie
) -> None:
    """Mutations seen to fail here: see `read_statement` and `Scheduler._take_frame`, whose checks these are."""
    expected = list(expected_ids(PROMPT, GREEDY, TOKENS, vocabulary))
    async with hostile.serving(network) as visit, network.client() as client:
        options: Any = {"max_tokens": TOKENS, "temperature": 0.0, "seed": SEED}
        answer = client.complete(PROMPT, model=MODEL, **options)
        reading = asyncio.create_task(answer.completion())
        task = await visit.task()
        for message in lie(Liar(hostile, task, expected)):
            await visit.say(message)
        completion = await reading
        record = await client.get_task(completion.task_id)
    assert list(completion.token_ids) == expected
    assert [(one.node_id, one.reason) for one in completion.broken_attempts] == [(hostile.node_id, reason)]
    assert (record.attempts[0].node_id, record.attempts[0].signed) == (hostile.node_id, False)
    told = [json.loads(line) for line in log.lines() if f'"{completion.task_id}"' in line]
    assert [one["node"] for one in told] == [hostile.node_id], told
    assert len(json.dumps(told)) < 1000


async def test_whoever_lies_twice_is_quarantined_and_asked_nothing_more(
    network: DevNetwork, hostile: HostileAgent, vocabulary: FakeVocabulary
) -> None:
    """Mutation seen to fail here: WatchedRecords tells nothing; so does the rule in shadow, all through this file."""
    expected = list(expected_ids(PROMPT, GREEDY, TOKENS, vocabulary))
    options: Any = {"max_tokens": TOKENS, "temperature": 0.0, "seed": SEED}
    async with network.admin() as admin, network.client() as client:
        await admin.set_verification_mode("structure", shadow=False)
        try:
            async with HostileAgent.enrolled(network, "trickster") as trickster:
                for name in ("a frame again with other ids", "an id outside the vocabulary"):
                    async with trickster.serving(network) as visit:
                        reading = asyncio.create_task(client.complete(PROMPT, model=MODEL, **options).completion())
                        task = await visit.task()
                        for message in FRAME_LIES[name][1](Liar(trickster, task, expected)):
                            await visit.say(message)
                        assert list((await reading).token_ids) == expected
                async with trickster.serving(network):
                    completion = await client.complete(PROMPT, model=MODEL, **options).completion()
                    assert (list(completion.token_ids), completion.broken_attempts) == (expected, ())
        finally:
            await admin.set_verification_mode("structure", shadow=True)


async def test_the_truth_told_twice_is_delivered_once(
    network: DevNetwork, hostile: HostileAgent, vocabulary: FakeVocabulary, log: Log
) -> None:
    """The hostile agent can be believed too: overlapping frames, late ones and a second goodbye do no harm."""
    expected = list(expected_ids(PROMPT, GREEDY, TOKENS, vocabulary))
    async with hostile.serving(network) as visit, network.client() as client:
        options: Any = {"max_tokens": TOKENS, "temperature": 0.0, "seed": SEED}
        answer = client.complete(PROMPT, model=MODEL, **options)
        reading = asyncio.create_task(answer.completion())
        liar = Liar(hostile, await visit.task(), expected)
        for first, end in ((0, 3), (0, 3), (1, 5), (4, 4), (2, TOKENS), (0, TOKENS)):
            await visit.say(liar.task.frame(first, expected[first:end]))
        await visit.say(liar.task.frame(0, [5, 6, 7], attempt=2))
        await visit.say(liar.finish())
        await visit.say(liar.finish())
        await visit.say(liar.task.frame(TOKENS, [5]))
        completion = await reading
        record = await client.get_task(completion.task_id)
    assert list(completion.token_ids) == expected
    assert completion.broken_attempts == ()
    assert [(one.outcome, one.signed) for one in record.attempts] == [("finished", True)]
    assert log.complaints() == []


def _scored(token_id: int, *top: int) -> completion_pb2.PositionLogprobs:
    return completion_pb2.PositionLogprobs(
        chosen=completion_pb2.TokenLogprob(token_id=token_id, logprob=math.nan),
        top=[completion_pb2.TokenLogprob(token_id=one, logprob=-math.inf) for one in top],
    )


@pytest.mark.parametrize(
    "logprobs",
    [
        pytest.param(lambda _: [], id="none"),
        pytest.param(lambda ids: [_scored(one ^ 1) for one in ids], id="of other ids"),
        pytest.param(lambda ids: [_scored(one, *[5] * 100) for one in ids], id="a hundred alternatives"),
        pytest.param(lambda ids: [_scored(one, 2**32 - 1) for one in ids], id="an alternative that is no id"),
    ],
)
async def test_log_probabilities_that_do_not_fit_their_ids_are_a_lie_too(
    network: DevNetwork,
    hostile: HostileAgent,
    vocabulary: FakeVocabulary,
    log: Log,
    logprobs: Callable[[list[int]], list[completion_pb2.PositionLogprobs]],
) -> None:
    expected = list(expected_ids(PROMPT, GREEDY, TOKENS, vocabulary))
    async with hostile.serving(network) as visit, network.client() as client:
        options: Any = {"max_tokens": TOKENS, "temperature": 0.0, "seed": SEED, "logprobs": 2}
        reading = asyncio.create_task(client.complete(PROMPT, model=MODEL, **options).completion())
        task = await visit.task()
        await visit.say(task.frame(0, expected, logprobs=logprobs(expected)))
        completion = await reading
    assert [position.chosen.token_id for position in completion.logprobs] == list(completion.token_ids) == expected
    assert [one.reason for one in completion.broken_attempts] == ["logprobs_conflict"]
    assert [one["node"] for one in log.complaints()] == [hostile.node_id]


async def test_a_node_that_takes_a_task_and_falls_silent_loses_it(
    network: DevNetwork, hostile: HostileAgent, vocabulary: FakeVocabulary
) -> None:
    expected = list(expected_ids(PROMPT, GREEDY, TOKENS, vocabulary))
    async with hostile.serving(network) as visit, network.client() as client:
        options: Any = {"max_tokens": TOKENS, "temperature": 0.0, "seed": SEED}
        reading = asyncio.create_task(client.complete(PROMPT, model=MODEL, **options).completion())
        task = await visit.task()
        await visit.say(task.frame(0, expected[:3]))
        completion = await reading
    assert list(completion.token_ids) == expected
    assert [one.reason for one in completion.broken_attempts] == ["node_silent"]


async def test_what_a_node_says_of_itself_can_be_listed_whatever_it_says(
    network: DevNetwork, hostile: HostileAgent
) -> None:
    """Absurd readings, enum values that do not exist, names with control characters."""
    number = capability_pb2.NumberReading(status=capability_pb2.READING_STATUS_OK, value=1e308)
    name = capability_pb2.TextReading(status=capability_pb2.READING_STATUS_OK, value="\x1b[2J\x00")
    gpu = capability_pb2.Gpu(name=name, memory_total_bytes=number, memory_free_bytes=number, power_draw_w=number)
    gpu.uuid.status = 99  # type: ignore[assignment]
    engine = hostile.engine(status=99, note="\x1b[2J", model="\x1b[2J", slots=2**32 - 1, tokens_per_second=1e308)
    async with hostile.visit() as visit, network.admin() as admin:
        await visit.say(hostile.state(engine, gpus=[gpu]))
        async with asyncio.timeout(PATIENCE_S):
            while not any(node.node_id == hostile.node_id and node.engines for node in await admin.nodes()):
                await asyncio.sleep(0.02)
        for arguments in (["nodes"], ["nodes", "--json"]):
            listed = await asyncio.to_thread(_run_cli, network, arguments)
            assert listed.returncode == 0, listed.stderr
            assert hostile.node_id in listed.stdout
            assert "\x1b[2J" not in listed.stdout
        json.loads(listed.stdout, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def _run_cli(network: DevNetwork, arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    ready = network.ready
    environment = {
        **os.environ,
        "SLACKWATER_ADDRESS": ready.grpc_address,
        "SLACKWATER_API_KEY": ready.admin_key,
        "SLACKWATER_CA_FILE": ready.ca_file,
    }
    return subprocess.run(
        [Path(sys.executable).with_name("slackwater"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        # What is waited for, a line in a log above all, announces nothing.
        while not holds():
            await asyncio.sleep(0.02)
