"""Who may speak for a node: certificates, join strings, bans, copies and renewals, over real processes."""

import asyncio
import json
import shutil
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from child_process import MARKER_VARIABLE, ChildProcess
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID
from dev_network import DevNetwork
from network_settings import MODELS, EngineOptions, agent_config, clean_environment, write_private
from slackwater import Answer, Node
from slackwater.errors import TaskCancelled

from agent.clock import wall_ms
from agent.errors import ExitStatus
from agent.identity import Identity, load_identity, store_identity
from coordinator.enrolment.certificates import issue_node_certificate
from coordinator.keys import CoordinatorKeys, load_or_create
from inference.fake_model import FakeVocabulary, expected_ids
from inference.task import NodeId, Sampling
from protos.slackwater.common.v1 import error_pb2
from protos.slackwater.node.v1 import node_service_pb2, node_service_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "fake-smollm2"
PROMPT = (100, 200, 300)
SEED = 7
GREEDY = Sampling(temperature=0.0, seed=SEED)
# Faster than the other agents of the network, so that the next task goes to it.
FAST = EngineOptions(kind="fake", slots=16, fake_tokens_per_second=100.0, fake_ttft_ms=20.0)
# A start of an agent with its engine, on a machine that is busy with other tests.
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def vocabulary() -> FakeVocabulary:
    return FakeVocabulary.load(MODELS / MODEL / "tokenizer.json")


@dataclass
class Machine:
    """A machine beside those of the network, with an agent of its own."""

    network: DevNetwork
    name: str

    @property
    def home(self) -> Path:
        return Path(self.network.ready.state_dir) / self.name

    @property
    def identity(self) -> Identity:
        return load_identity(self.home)

    async def invitation(self, lifetime_s: int | None = None) -> str:
        """Return a join string of an owner of its own."""
        async with self.network.admin() as admin:
            owner = await admin.create_owner(f"owner of {self.name}")
            return (await admin.create_join_string(owner.owner_id, lifetime_s=lifetime_s)).join_string

    async def join(self, join_string: str) -> ChildProcess:
        """Run `slackwater-agent join` to its end, whatever that is."""
        file = self._config().with_suffix(".join")
        write_private(file, join_string)
        child = self._child("join", "--config", self._config(), "--file", file, "--yes")
        await child.start()
        async with asyncio.timeout(PATIENCE_S):
            await child.wait()
        file.unlink()
        return child

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ChildProcess]:
        child = self._child("run", "--config", self._config())
        await child.start()
        try:
            yield child
        finally:
            await child.stop()

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[ChildProcess]:
        """An agent that has joined and whose engine is ready."""
        if not self.home.exists():
            joined = await self.join(await self.invitation())
            assert joined.status == 0, joined.tail()
        async with self.running() as child:
            await self.wait_until_ready(child)
            yield child

    async def wait_until_ready(self, child: ChildProcess) -> None:
        async with self.network.admin() as admin, asyncio.timeout(PATIENCE_S):
            while not _is_ready(await self._node(admin)):
                child.check()
                await asyncio.sleep(0.1)

    async def status(self) -> str:
        async with self.network.admin() as admin:
            return (await self._node(admin)).status

    async def ban(self) -> None:
        async with self.network.admin() as admin:
            await admin.ban(self.identity.node_id, reason="sold its card")

    def copy(self, name: str) -> "Machine":
        """Return a second machine with the identity of this one."""
        other = replace(self, name=name)
        shutil.copytree(self.home, other.home)
        return other

    async def _node(self, admin: Any) -> Node:
        node_id = self.identity.node_id
        (node,) = [node for node in await admin.nodes() if node.node_id == node_id]
        assert isinstance(node, Node)
        return node

    def _config(self) -> Path:
        path = self.home.with_suffix(".toml")
        if not path.exists():
            write_private(path, agent_config(self.home, self.name, FAST.settings()))
        return path

    def _child(self, *arguments: str | Path) -> ChildProcess:
        state_dir = Path(self.network.ready.state_dir)
        environment = {
            **clean_environment(),
            MARKER_VARIABLE: str(state_dir),
            "XDG_RUNTIME_DIR": str(state_dir / "run"),
        }
        command = [sys.executable, "-m", "agent", *arguments]
        return ChildProcess(f"{self.name} {arguments[0]}", command, state_dir / f"{self.name}.log", environment)


def _is_ready(node: Node) -> bool:
    return node.status == "online" and any(engine.status == "ready" for engine in node.engines)


async def _end(child: ChildProcess) -> tuple[int | None, str]:
    """Wait for the end of a process; return its status and the last line that it wrote."""
    async with asyncio.timeout(PATIENCE_S):
        await child.wait()
    return child.status, child.tail().splitlines()[-1].strip()


@asynccontextmanager
async def long_answer(machine: Machine, vocabulary: FakeVocabulary) -> AsyncIterator[Answer]:
    """An answer that begins on a machine and outlasts every test; it goes on after the block, and is whole so far."""
    async with machine.network.client() as client:
        options: Any = {"max_tokens": 20_000, "temperature": 0.0, "seed": SEED}
        answer = client.complete(PROMPT, model=MODEL, **options)
        reading = asyncio.create_task(answer.completion())
        await _grow(answer, 10)
        assert answer.started is not None
        assert answer.started.node_id == machine.identity.node_id
        yield answer
        await _grow(answer, 50)
        ids = list(answer.token_ids)
        await answer.cancel()
        with pytest.raises(TaskCancelled):
            await reading
    assert ids == list(expected_ids(PROMPT, GREEDY, len(ids), vocabulary))


async def _grow(answer: Answer, by: int) -> None:
    before = len(answer.token_ids)
    async with asyncio.timeout(PATIENCE_S):
        while len(answer.token_ids) < before + by:
            await asyncio.sleep(0.02)


async def broken_reasons(answer: Answer) -> list[str]:
    """Wait for the first broken attempt; return why each was broken."""
    async with asyncio.timeout(PATIENCE_S):
        while not answer.broken_attempts:
            await asyncio.sleep(0.02)
    return [broken.reason for broken in answer.broken_attempts]


class Log:
    """What the coordinator has logged since this was made."""

    def __init__(self, network: DevNetwork) -> None:
        self._path = Path(network.ready.state_dir) / "coordinator.log"
        self._skip = self._path.stat().st_size

    def lines(self) -> list[str]:
        with self._path.open("rb") as file:
            file.seek(self._skip)
            return file.read().decode().splitlines()

    def complaints(self) -> list[dict[str, Any]]:
        # gRPC itself writes of broken handshakes, and not in JSON.
        told = [json.loads(line) for line in self.lines() if line.startswith("{")]
        return [one for one in told if one["level"] in ("warning", "error")]


@pytest.fixture
def log(network: DevNetwork) -> Log:
    return Log(network)


# ---- certificates


def _keys(network: DevNetwork) -> CoordinatorKeys:
    return load_or_create(Path(network.ready.state_dir) / "coordinator", wall_ms())


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


async def _connect(network: DevNetwork, identity: Identity) -> str:
    """Say Hello under a certificate; return what became of it."""
    ca = await asyncio.to_thread(Path(network.ready.ca_file).read_bytes)
    credentials = grpc.ssl_channel_credentials(ca, identity.tls_key, identity.certificate_chain)
    hello = node_service_pb2.Hello(
        protocol_version=1, agent_version="0", boot_id=bytes(16), boot_started_at_ms=wall_ms()
    )
    async with grpc.aio.secure_channel(identity.node_address, credentials) as channel:
        call = node_service_pb2_grpc.NodeServiceStub(channel).Connect(timeout=PATIENCE_S)
        try:
            await call.write(node_service_pb2.ConnectRequest(hello=hello))
            heard = await call.read()
        except grpc.aio.AioRpcError as error:
            for key, value in error.trailing_metadata() or ():
                if key == "slackwater-error-bin" and isinstance(value, bytes):
                    detail = error_pb2.ErrorDetail.FromString(value)
                    return f"{error_pb2.ErrorReason.Name(detail.reason)}: {detail.message}"
            return f"{error.code().name}: {error.details()}"
        assert isinstance(heard, node_service_pb2.ConnectResponse)
        return str(heard.WhichOneof("message"))


@pytest.fixture
def honest(network: DevNetwork) -> Identity:
    return load_identity(Path(network.ready.state_dir) / "agent-1")


def _certified(network: DevNetwork, honest: Identity, cluster_id: str, node_id: str) -> Identity:
    """Return an identity that the fleet's own CA vouches for."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = issue_node_certificate(
        _keys(network), cluster_id, NodeId(node_id), key.public_key(), wall_ms(), timedelta(days=1)
    )
    return replace(honest, tls_key=_private(key), certificate_chain=certificate.chain.encode())


async def test_a_certificate_of_a_foreign_ca_gets_no_connection(
    network: DevNetwork, honest: Identity, log: Log
) -> None:
    """It names an honest node, whose stream goes on."""
    key = ec.generate_private_key(ec.SECP256R1())
    forged = replace(honest, tls_key=_private(key), certificate_chain=_foreign_certificate(key, honest.certificate()))
    assert (await _connect(network, forged)).startswith("UNAVAILABLE: ")
    (told,) = log.lines()
    assert "certificate" in told
    async with network.admin() as admin:
        assert {node.status for node in await admin.nodes() if node.node_id == honest.node_id} == {"online"}


def _foreign_certificate(key: ec.EllipticCurvePrivateKey, like: x509.Certificate) -> bytes:
    """Return a certificate with every name and date of another, signed by a CA of the same name."""
    builder = (
        x509.CertificateBuilder()
        .subject_name(like.subject)
        .issuer_name(like.issuer)
        .public_key(key.public_key())
        .serial_number(like.serial_number)
        .not_valid_before(like.not_valid_before_utc)
        .not_valid_after(like.not_valid_after_utc)
    )
    for extension in like.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    foreign = ec.generate_private_key(ec.SECP256R1())
    return builder.sign(foreign, hashes.SHA256()).public_bytes(Encoding.PEM)


async def test_a_certificate_of_this_ca_for_a_node_that_does_not_exist_is_refused(
    network: DevNetwork, honest: Identity, log: Log
) -> None:
    stranger = _certified(network, honest, honest.cluster_id, "f" * 32)
    assert await _connect(network, stranger) == (
        f"ERROR_REASON_CERTIFICATE_UNKNOWN: there is no node {'f' * 32}; enrol again"
    )
    elsewhere = _certified(network, honest, "another-cluster", honest.node_id)
    assert (await _connect(network, elsewhere)).startswith(
        "ERROR_REASON_CERTIFICATE_UNKNOWN: the certificate is of cluster another-cluster"
    )
    assert [one["event"] for one in log.complaints()] == ["certificate refused"] * 2


async def test_a_client_without_a_certificate_gets_no_connection(network: DevNetwork, honest: Identity) -> None:
    ca = await asyncio.to_thread(Path(network.ready.ca_file).read_bytes)
    async with grpc.aio.secure_channel(honest.node_address, grpc.ssl_channel_credentials(ca)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await node_service_pb2_grpc.NodeServiceStub(channel).RenewCertificate(
                node_service_pb2.RenewCertificateRequest(), timeout=PATIENCE_S
            )
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


# ---- join strings


async def test_a_join_string_makes_one_node(network: DevNetwork, log: Log) -> None:
    invitation = await Machine(network, "first").invitation()
    assert (await Machine(network, "first").join(invitation)).status == 0
    status, told = await _end(await Machine(network, "second").join(invitation))
    assert status == ExitStatus.ENROLMENT_REFUSED
    assert told == (
        "slackwater-agent: the coordinator refuses: the join string was used already; each serves one machine, "
        "ask the operator for another"
    )
    assert [(one["event"], one["reason"]) for one in log.complaints()] == [("enrolment refused", "TOKEN_USED")]
    assert not (Machine(network, "second").home / "identity.json").exists()


async def test_a_join_string_that_has_expired_is_refused(network: DevNetwork, log: Log) -> None:
    invitation = await Machine(network, "late").invitation(lifetime_s=1)
    await asyncio.sleep(1.1)
    status, told = await _end(await Machine(network, "late").join(invitation))
    assert status == ExitStatus.ENROLMENT_REFUSED
    assert told == (
        "slackwater-agent: the coordinator refuses: the join string has expired; ask the operator for a new one"
    )
    assert [(one["event"], one["reason"]) for one in log.complaints()] == [("enrolment refused", "TOKEN_EXPIRED")]


async def test_a_join_string_with_another_secret_is_refused(network: DevNetwork, log: Log) -> None:
    invitation = await Machine(network, "guesser").invitation()
    token, _, secret = invitation.partition("?")[0].rpartition("/")[2].partition(".")
    status, told = await _end(await Machine(network, "guesser").join(invitation.replace(secret, "A" * len(secret))))
    assert status == ExitStatus.ENROLMENT_REFUSED
    assert "no join string of this fleet has this token and secret" in told
    assert [(one["reason"], one["subject"]) for one in log.complaints()] == [("TOKEN_INVALID", token)]


async def test_a_machine_in_the_middle_is_found_out_before_it_is_told_anything(
    network: DevNetwork, tmp_path: Path
) -> None:
    """It has the coordinator's address, as a poisoned name server would give it, and a certificate of its own.

    Mutation seen to fail: `fetch_ca_certificate` takes the last certificate where none has the pinned key.
    """
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=_self_signed(tmp_path))
    async with server:
        port = server.sockets[0].getsockname()[1]
        invitation = await Machine(network, "victim").invitation()
        real = network.ready.grpc_address
        child = await Machine(network, "victim").join(invitation.replace(real, f"127.0.0.1:{port}"))
    status, told = await _end(child)
    assert status == ExitStatus.ENROLMENT_REFUSED
    assert f"127.0.0.1:{port} is not the coordinator of this join string" in told
    assert heard in ([], [b""])


def _self_signed(directory: Path) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "slackwater coordinator")])
    now = datetime.fromtimestamp(wall_ms() / 1000, UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .sign(key, hashes.SHA256())
    )
    file = directory / "middle.pem"
    file.write_bytes(_private(key) + certificate.public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    context.set_alpn_protocols(["h2"])
    return context


# ---- bans


async def test_a_banned_node_is_out_at_once_and_stays_out(network: DevNetwork, vocabulary: FakeVocabulary) -> None:
    """Mutation seen to fail: no CloseConnection in `Scheduler._ban`."""
    machine = Machine(network, "banned")
    async with machine.ready() as agent, long_answer(machine, vocabulary) as answer:
        await machine.ban()
        status, told = await _end(agent)
        assert await broken_reasons(answer) == ["banned"]
    assert (status, told) == (
        ExitStatus.BANNED,
        "slackwater-agent: the coordinator has banned this node (this node was banned)",
    )
    async with machine.running() as again:
        status, told = await _end(again)
    assert status == ExitStatus.BANNED
    assert "this node is banned: sold its card" in told
    # By its key it does not come back either.
    _expire(network, machine)
    async with machine.running() as again:
        status, told = await _end(again)
    assert status == ExitStatus.BANNED
    assert "this node is banned: sold its card" in told


# ---- two agents with one identity


async def test_of_two_agents_with_one_identity_the_newer_stays_and_nobody_fights(
    network: DevNetwork, vocabulary: FakeVocabulary, log: Log
) -> None:
    """The state directory was copied to a second machine."""
    machine = Machine(network, "original")
    async with machine.ready() as original, long_answer(machine, vocabulary) as answer:
        copy = machine.copy("copied")
        async with copy.running() as newer:
            status, told = await _end(original)
            newer_start = "a newer start of this node connected"
            assert (status, told) == (
                ExitStatus.SUPERSEDED,
                f"slackwater-agent: a newer agent with this identity has connected ({newer_start})",
            )
            assert await broken_reasons(answer) == ["superseded"]
            await copy.wait_until_ready(newer)
            # Time enough for either to come back and take the other's place, had they not ended or stayed.
            await asyncio.sleep(2)
            assert newer.running
            assert await copy.status() == "online"
            async with long_answer(copy, vocabulary):
                assert log.complaints() == []


async def test_an_older_boot_is_refused_while_a_newer_one_is_connected(
    network: DevNetwork, honest: Identity, log: Log
) -> None:
    """Mutation seen to fail: the boot times are not compared in `Scheduler._connect`."""
    ca = await asyncio.to_thread(Path(network.ready.ca_file).read_bytes)
    credentials = grpc.ssl_channel_credentials(ca, honest.tls_key, honest.certificate_chain)
    hello = node_service_pb2.Hello(protocol_version=1, agent_version="0", boot_id=bytes(16), boot_started_at_ms=1)
    async with grpc.aio.secure_channel(honest.node_address, credentials) as channel:
        call = node_service_pb2_grpc.NodeServiceStub(channel).Connect(timeout=PATIENCE_S)
        await call.write(node_service_pb2.ConnectRequest(hello=hello))
        heard = [(await call.read()), (await call.read())]
    closing = heard[1].closing if isinstance(heard[1], node_service_pb2.ConnectResponse) else None
    assert closing is not None
    assert closing.reason == node_service_pb2.CLOSING_REASON_SUPERSEDED
    assert [one["event"] for one in log.complaints()] == ["agent_superseded"]
    async with network.admin() as admin:
        assert {node.status for node in await admin.nodes() if node.node_id == honest.node_id} == {"online"}


# ---- renewal


def _reissue(network: DevNetwork, machine: Machine, issued_before: timedelta, lifetime: timedelta) -> None:
    """Replace the certificate of a machine by one that was issued some time ago."""
    identity = machine.identity
    key = load_pem_private_key(identity.tls_key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    issued_at_ms = wall_ms() - int(issued_before.total_seconds() * 1000)
    certificate = issue_node_certificate(
        _keys(network), identity.cluster_id, NodeId(identity.node_id), key.public_key(), issued_at_ms, lifetime
    )
    store_identity(replace(identity, certificate_chain=certificate.chain.encode()), machine.home)


def _expire(network: DevNetwork, machine: Machine) -> None:
    _reissue(network, machine, timedelta(days=7), timedelta(days=2))


async def test_a_node_that_was_off_for_a_week_comes_back_by_its_key(network: DevNetwork) -> None:
    """Mutation seen to fail: `CertificateKeeper.recover` does not renew."""
    machine = Machine(network, "holiday")
    assert (await machine.join(await machine.invitation())).status == 0
    _expire(network, machine)
    assert (await _connect(network, machine.identity)).startswith("UNAVAILABLE: ")
    async with machine.ready() as agent:
        assert agent.tail().count("certificate renewed") == 1
    assert machine.identity.certificate().not_valid_after_utc.timestamp() * 1000 > wall_ms() + 86_400_000


@pytest.mark.slow
@pytest.mark.slow
async def test_a_certificate_is_renewed_and_put_to_use_under_a_running_answer(
    network: DevNetwork, vocabulary: FakeVocabulary
) -> None:
    """With five minutes left the agent does not wait for a pause: the answer goes on elsewhere, whole.

    It looks at its certificate twice a minute, so this takes half a minute.
    """
    machine = Machine(network, "aging")
    assert (await machine.join(await machine.invitation())).status == 0
    _reissue(network, machine, timedelta(days=2), timedelta(days=2, minutes=5))
    async with machine.ready() as agent, long_answer(machine, vocabulary) as answer:
        assert await broken_reasons(answer) == ["stream_lost"]
        async with asyncio.timeout(PATIENCE_S):
            while "changing to the new certificate" not in agent.tail():
                await asyncio.sleep(0.1)
        await machine.wait_until_ready(agent)
