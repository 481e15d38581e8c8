"""A coordinator that says to an agent what a test tells it: a real gRPC server with TLS on both ports.

It checks what a real one checks at enrolment, so that an agent passes only with
a true proof; for the rest it can drop, delay and lie.
"""

import asyncio
import ipaddress
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agent.assignments import AttemptKey
from agent.clock import wall_ms
from agent.enrolment import FleetTerms
from agent.identity import private_pem
from agent.testing import CLUSTER_ID, NODE_ID, PATIENCE_S, make_header, seal_header
from inference.task import pack_token_ids
from protos import signing
from protos.join import JoinString, format_secret, spki_sha256
from protos.slackwater.common.v1 import envelope_pb2, error_pb2, verdict_pb2
from protos.slackwater.node.v1 import (
    enrolment_service_pb2,
    enrolment_service_pb2_grpc,
    node_service_pb2,
    node_service_pb2_grpc,
)


def accept_terms(terms: FleetTerms) -> None:
    """An owner who agrees to any fleet."""


_FRESH = (timedelta(hours=1), timedelta(days=1))


@dataclass(slots=True)
class AgentStream:
    """One Connect call, seen from the coordinator."""

    hello: node_service_pb2.Hello
    certificate: x509.Certificate
    # Everything the agent said after Hello, heartbeats included, oldest first.
    said: list[node_service_pb2.ConnectRequest] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    answer_heartbeats: bool = True
    _arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    _taken: int = 0
    # None ends the stream, a status code breaks it.
    _to_say: "asyncio.Queue[node_service_pb2.ConnectResponse | grpc.StatusCode | None]" = field(
        default_factory=asyncio.Queue
    )

    def say(self, **message: object) -> None:
        """Send one message, for example `say(cancel=Cancel(...))`."""
        self._to_say.put_nowait(node_service_pb2.ConnectResponse(**message))  # type: ignore[arg-type]

    def welcome(self, **changes: object) -> None:
        fields: dict[str, object] = {
            "cluster_id": CLUSTER_ID,
            "coordinator_time_ms": wall_ms(),
            "heartbeat_busy_ms": 200,
            "heartbeat_idle_ms": 500,
            "frame_delay_ms": 5,
            "protocol_version": 1,
        }
        self.say(welcome=node_service_pb2.Welcome(**{**fields, **changes}))  # type: ignore[arg-type]

    def end(self) -> None:
        self._to_say.put_nowait(None)

    def break_off(self, code: grpc.StatusCode) -> None:
        self._to_say.put_nowait(code)

    def assign(self, envelope: envelope_pb2.SignedEnvelope, key: AttemptKey, prompt: Sequence[int]) -> None:
        """Send an assignment with its prompt in one chunk."""
        self.say(assignment=node_service_pb2.Assignment(header=envelope, chunk_count=1))
        self.say(
            prompt_chunk=node_service_pb2.PromptChunk(
                task_id=key.task_id, attempt=key.attempt, chunk_index=0, token_ids=pack_token_ids(prompt)
            )
        )

    async def next(self, kind: str) -> node_service_pb2.ConnectRequest:
        """Wait for the next message of a kind, skipping those of other kinds."""
        async with asyncio.timeout(PATIENCE_S), self._arrived:
            while True:
                while self._taken < len(self.said):
                    self._taken += 1
                    if self.said[self._taken - 1].WhichOneof("message") == kind:
                        return self.said[self._taken - 1]
                await self._arrived.wait()

    async def hear(self, requests: AsyncIterator[node_service_pb2.ConnectRequest]) -> None:
        async for request in requests:
            if request.WhichOneof("message") == "heartbeat" and self.answer_heartbeats:
                sequence = request.heartbeat.sequence
                self.say(
                    heartbeat=node_service_pb2.CoordinatorHeartbeat(sequence=sequence, coordinator_time_ms=wall_ms())
                )
            async with self._arrived:
                self.said.append(request)
                self._arrived.notify_all()
        self._to_say.put_nowait(None)

    async def messages(self) -> AsyncIterator[node_service_pb2.ConnectResponse | grpc.StatusCode]:
        while (message := await self._to_say.get()) is not None:
            yield message


class ScriptedCoordinator(
    node_service_pb2_grpc.NodeServiceServicer, enrolment_service_pb2_grpc.EnrolmentServiceServicer
):
    """Enrols whoever holds its join string, and gives every Connect call to the test."""

    def __init__(self) -> None:
        self.signing_key = Ed25519PrivateKey.generate()
        self.release_key = Ed25519PrivateKey.generate()
        # Age and life of the next certificate of a node.
        self._next_certificate = _FRESH
        self.abuse_contact = ""
        self.content_policy = ""
        self.token_used = False
        self.banned = False
        self.verdicts: list[verdict_pb2.Verdict] = []
        self.renewals: list[str] = []
        self.public_port = 0
        self.node_port = 0
        self._ca_key = ec.generate_private_key(ec.SECP256R1())
        self._ca = self._issue(self._ca_key.public_key(), "a CA", authority=True)
        self._token_id = "tokenundertest"
        self._token_secret = format_secret(secrets.token_bytes(32))
        self._nonces: set[bytes] = set()
        self._node_key: bytes = b""
        self._streams: asyncio.Queue[AgentStream] = asyncio.Queue()

    @asynccontextmanager
    async def serve(self, node_port: int = 0) -> AsyncIterator["ScriptedCoordinator"]:
        """Serve both ports for as long as the block runs."""
        public, node = grpc.aio.server(), grpc.aio.server()
        enrolment_service_pb2_grpc.add_EnrolmentServiceServicer_to_server(self, public)
        node_service_pb2_grpc.add_NodeServiceServicer_to_server(self, node)
        key = ec.generate_private_key(ec.SECP256R1())
        chain = self._pem(self._issue(key.public_key(), "a server", server=True)) + self._pem(self._ca)
        pair = [(private_pem(key), chain)]
        self.public_port = public.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair))
        credentials = grpc.ssl_server_credentials(pair, self._pem(self._ca), require_client_auth=True)
        self.node_port = node.add_secure_port(f"127.0.0.1:{node_port}", credentials)
        await public.start()
        await node.start()
        try:
            yield self
        finally:
            await asyncio.gather(public.stop(0), node.stop(0))

    @property
    def join_string(self) -> str:
        return JoinString(
            host="127.0.0.1",
            port=self.public_port,
            token_id=self._token_id,
            token_secret=self._token_secret,
            ca_pin=spki_sha256(self._ca),
        ).encode()

    @property
    def node_public_key(self) -> bytes:
        return self._node_key

    async def next_stream(self) -> AgentStream:
        """Wait for the next agent to say Hello; nothing was answered yet."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._streams.get()

    async def welcomed_stream(self) -> AgentStream:
        stream = await self.next_stream()
        stream.welcome(coordinator_public_keys=[self.signing_key.public_key().public_bytes_raw()])
        return stream

    def age_next_certificate(self, share: float) -> None:
        """Issue the next certificate of a node as if this share of its life were over."""
        life = timedelta(days=1)
        self._next_certificate = (share * life, life)

    def order(self, digest: str, prompt: Sequence[int], **changes: object) -> envelope_pb2.SignedEnvelope:
        """Return a signed header that is valid now, with a nonce of its own."""
        now_ms = wall_ms()
        fields = {
            "manifest_digest": digest,
            "nonce": secrets.token_bytes(16),
            "issued_at_ms": now_ms,
            "not_after_ms": now_ms + 30_000,
        }
        return seal_header(make_header(prompt, **{**fields, **changes}), self.signing_key)

    # ---- NodeService

    async def Connect(
        self,
        request_iterator: AsyncIterator[node_service_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext[node_service_pb2.ConnectRequest, node_service_pb2.ConnectResponse],
    ) -> AsyncIterator[node_service_pb2.ConnectResponse]:
        await self._refuse_banned(context)
        requests = aiter(request_iterator)
        first = await anext(requests)
        pem = next(iter(context.auth_context()["x509_pem_cert"]))
        stream = AgentStream(first.hello, x509.load_pem_x509_certificate(pem))
        self._streams.put_nowait(stream)
        hearing = asyncio.ensure_future(stream.hear(requests))
        try:
            async for message in stream.messages():
                if isinstance(message, grpc.StatusCode):
                    await context.abort(message, "as the test wants it")
                yield message
        finally:
            hearing.cancel()
            stream.ended.set()

    async def RenewCertificate(
        self,
        request: node_service_pb2.RenewCertificateRequest,
        context: grpc.aio.ServicerContext[
            node_service_pb2.RenewCertificateRequest, node_service_pb2.RenewCertificateResponse
        ],
    ) -> node_service_pb2.RenewCertificateResponse:
        self.renewals.append("certificate")
        return node_service_pb2.RenewCertificateResponse(certificate_chain=self._issue_for(request.certificate_request))

    async def GetVerdicts(
        self, request: node_service_pb2.GetVerdictsRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> node_service_pb2.GetVerdictsResponse:
        await self._refuse_banned(context)
        return node_service_pb2.GetVerdictsResponse(verdicts=self.verdicts)

    async def AppealVerdict(
        self, request: node_service_pb2.AppealVerdictRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> node_service_pb2.AppealVerdictResponse:
        for verdict in self.verdicts:
            if verdict.verdict_id == request.verdict_id:
                return node_service_pb2.AppealVerdictResponse(verdict=verdict)
        await self._refuse(context, error_pb2.ERROR_REASON_VERDICT_NOT_FOUND, "there is no such verdict")
        raise AssertionError("abort raises")

    # ---- EnrolmentService

    async def StartEnrolment(
        self,
        request: enrolment_service_pb2.StartEnrolmentRequest,
        context: grpc.aio.ServicerContext[
            enrolment_service_pb2.StartEnrolmentRequest, enrolment_service_pb2.StartEnrolmentResponse
        ],
    ) -> enrolment_service_pb2.StartEnrolmentResponse:
        if self.token_used or request.token_id != self._token_id:
            await self._refuse(context, error_pb2.ERROR_REASON_TOKEN_USED, "this join string was used already")
        return enrolment_service_pb2.StartEnrolmentResponse(
            server_nonce=self._nonce(),
            cluster_id=CLUSTER_ID,
            abuse_contact=self.abuse_contact,
            content_policy=self.content_policy,
        )

    async def CompleteEnrolment(
        self,
        request: enrolment_service_pb2.CompleteEnrolmentRequest,
        context: grpc.aio.ServicerContext[
            enrolment_service_pb2.CompleteEnrolmentRequest, enrolment_service_pb2.CompleteEnrolmentResponse
        ],
    ) -> enrolment_service_pb2.CompleteEnrolmentResponse:
        assert request.token_secret == self._token_secret, "the whole token travels"
        self._nonces.remove(request.server_nonce)
        proof = signing.enrolment_proof(
            self._token_id, request.certificate_request, spki_sha256(self._ca), request.server_nonce
        )
        Ed25519PublicKey.from_public_bytes(request.signing_public_key).verify(request.proof, proof)
        self._node_key = request.signing_public_key
        self.token_used = True
        return enrolment_service_pb2.CompleteEnrolmentResponse(
            node_id=NODE_ID,
            certificate_chain=self._issue_for(request.certificate_request),
            ca_certificate=self._pem(self._ca).decode(),
            node_address=f"127.0.0.1:{self.node_port}",
            coordinator_public_keys=[self.signing_key.public_key().public_bytes_raw()],
            release_public_keys=[self.release_key.public_key().public_bytes_raw()],
            cluster_id=CLUSTER_ID,
        )

    async def StartRenewal(
        self,
        request: enrolment_service_pb2.StartRenewalRequest,
        context: grpc.aio.ServicerContext[
            enrolment_service_pb2.StartRenewalRequest, enrolment_service_pb2.StartRenewalResponse
        ],
    ) -> enrolment_service_pb2.StartRenewalResponse:
        await self._refuse_banned(context)
        return enrolment_service_pb2.StartRenewalResponse(server_nonce=self._nonce())

    async def CompleteRenewal(
        self,
        request: enrolment_service_pb2.CompleteRenewalRequest,
        context: grpc.aio.ServicerContext[
            enrolment_service_pb2.CompleteRenewalRequest, enrolment_service_pb2.CompleteRenewalResponse
        ],
    ) -> enrolment_service_pb2.CompleteRenewalResponse:
        self._nonces.remove(request.server_nonce)
        proof = signing.renewal_proof(
            request.node_id, request.certificate_request, spki_sha256(self._ca), request.server_nonce
        )
        Ed25519PublicKey.from_public_bytes(self._node_key).verify(request.proof, proof)
        self.renewals.append("key")
        return enrolment_service_pb2.CompleteRenewalResponse(
            certificate_chain=self._issue_for(request.certificate_request)
        )

    # ---- certificates and refusals

    def _issue_for(self, certificate_request: bytes) -> str:
        key = x509.load_der_x509_csr(certificate_request).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey), "the agent makes P-256 keys"
        (age, life), self._next_certificate = self._next_certificate, _FRESH
        return (self._pem(self._issue(key, "a node", age=age, life=life)) + self._pem(self._ca)).decode()

    def _issue(
        self,
        key: ec.EllipticCurvePublicKey,
        name: str,
        *,
        authority: bool = False,
        server: bool = False,
        age: timedelta = timedelta(hours=1),
        life: timedelta = timedelta(days=9),
    ) -> x509.Certificate:
        begin = datetime.fromtimestamp(wall_ms() / 1000, UTC) - age
        authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a CA")])
        usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(authority_name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + life)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
            builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        return builder.sign(self._ca_key, hashes.SHA256())

    @staticmethod
    def _pem(certificate: x509.Certificate) -> bytes:
        return certificate.public_bytes(Encoding.PEM)

    def _nonce(self) -> bytes:
        nonce = secrets.token_bytes(32)
        self._nonces.add(nonce)
        return nonce

    async def _refuse_banned(self, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
        if self.banned:
            await self._refuse(context, error_pb2.ERROR_REASON_NODE_BANNED, "this node is banned: a test")

    async def _refuse(
        self,
        context: "grpc.aio.ServicerContext[Any, Any]",
        reason: "error_pb2.ErrorReason.ValueType",
        message: str,
    ) -> None:
        detail = error_pb2.ErrorDetail(reason=reason, message=message)
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            message,
            trailing_metadata=(("slackwater-error-bin", detail.SerializeToString()),),
        )
