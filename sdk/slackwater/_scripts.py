"""What a scripted coordinator says: answers with their signed parts, example nodes, a throwaway CA."""

import datetime
import hashlib
import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from slackwater._protos import signing
from slackwater._protos.slackwater.common.v1 import capability_pb2, completion_pb2, error_pb2, statement_pb2
from slackwater._protos.slackwater.fleet.v1 import fleet_service_pb2
from slackwater._protos.slackwater.task.v1 import task_service_pb2

# Fixed, so that no test depends on the day: the keys live only as long as the process.
VALID_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
VALID_UNTIL = datetime.datetime(2099, 1, 1, tzinfo=datetime.UTC)

DIGEST = "sha256:" + "5a" * 32
STOP_TOKEN_ID = 2
PROMPT_TOKENS = 7
MAX_TOKENS = 1000

# What a scripted fault is: a status without a detail (a cut connection), an error in full, or bytes of no message.
Fault = grpc.StatusCode | error_pb2.ErrorDetail | bytes


def error_detail(reason: str, actor: str, message: str = "scripted", **fields: Any) -> error_pb2.ErrorDetail:
    """Return a detail from names without their prefix, for example ("QUEUE_FULL", "RETRY")."""
    return error_pb2.ErrorDetail(
        reason=error_pb2.ErrorReason.Value(f"ERROR_REASON_{reason}"),
        actor=error_pb2.ErrorActor.Value(f"ERROR_ACTOR_{actor}"),
        message=message,
        **fields,
    )


@dataclass(kw_only=True)
class Parts:
    """The signed parts of a finish before they are signed, so that a test can forge one field."""

    header: statement_pb2.TaskHeader
    statement: statement_pb2.ResultStatement
    coordinator_key: Ed25519PrivateKey
    node_key: Ed25519PrivateKey
    usage: completion_pb2.Usage
    finish_reason: int

    def seal(self) -> task_service_pb2.TaskFinished:
        """Sign the header, put its hash into the statement unless a test did, and sign that."""
        header = signing.seal(signing.TASK_TYPE, self.header.SerializeToString(), self.coordinator_key)
        if not self.statement.header_sha256:
            self.statement.header_sha256 = hashlib.sha256(header.payload).digest()
        return task_service_pb2.TaskFinished(
            finish_reason=completion_pb2.FinishReason.ValueType(self.finish_reason),
            usage=self.usage,
            header=header,
            statement=signing.seal(signing.RESULT_TYPE, self.statement.SerializeToString(), self.node_key),
            node_public_key=self.node_key.public_key().public_bytes_raw(),
        )


@dataclass(kw_only=True)
class ScriptedAnswer:
    """One task: its text in pieces, and how its streams misbehave.

    Each piece becomes a delta of `ids_per_piece` ids, the last of which ends
    with a stop id. With `seam`, the first attempt breaks before that piece and a second one goes on.
    """

    pieces: Sequence[str]
    # Text that no id brings, after the last: what was held back as a possible stop string.
    tail: str = ""
    ids_per_piece: int = 1
    seam: int | None = None
    # The first stream breaks after so many events, the next after the second number, and so on; then none does.
    breaks_after: Sequence[int] = ()
    # How a stream breaks.
    fault: Fault = grpc.StatusCode.UNAVAILABLE
    # Instead of the finish: the task fails.
    failure: error_pb2.ErrorDetail | None = None
    # Before each event.
    delay_s: float = 0.0
    task_id: str = ""
    coordinator_key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    node_key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    @property
    def text(self) -> str:
        return "".join(self.pieces) + self.tail

    @property
    def token_ids(self) -> list[int]:
        ids = [1000 + index for index in range(len(self.pieces) * self.ids_per_piece)]
        return [*ids[:-1], STOP_TOKEN_ID] if ids else []

    def accepted(self) -> task_service_pb2.TaskAccepted:
        return task_service_pb2.TaskAccepted(
            task_id=self.task_id,
            model="scripted",
            manifest_digest=DIGEST,
            prompt_tokens=PROMPT_TOKENS,
            resumable=True,
            seed=11,
            coordinator_public_keys=[self.coordinator_key.public_key().public_bytes_raw()],
        )

    def parts(self) -> Parts:
        """Return header and statement of the finishing attempt."""
        attempt, node_id, first_index = (1, "node-1", 0)
        if self.seam is not None:
            attempt, node_id, first_index = (2, "node-2", self.seam * self.ids_per_piece)
        ids = self.token_ids[first_index:]
        header = statement_pb2.TaskHeader(
            cluster_id="scripted",
            node_id=node_id,
            task_id=self.task_id,
            attempt=attempt,
            lease_epoch=attempt,
            nonce=bytes(16),
            manifest_digest=DIGEST,
            kind=completion_pb2.TASK_KIND_GENERATE,
            sampling=completion_pb2.Sampling(temperature=0, top_p=1, seed=11, repetition_penalty=1),
            max_tokens=MAX_TOKENS - first_index,
            stop_token_ids=[STOP_TOKEN_ID],
            prompt_token_count=PROMPT_TOKENS + first_index,
            first_index=first_index,
        )
        statement = statement_pb2.ResultStatement(
            node_id=node_id,
            task_id=self.task_id,
            attempt=attempt,
            first_index=first_index,
            token_ids=struct.pack(f"<{len(ids)}I", *ids),
            finish_reason=completion_pb2.FINISH_REASON_STOP,
            prompt_tokens=PROMPT_TOKENS + first_index,
            completion_tokens=len(ids),
            first_token_ms=12,
            total_ms=345,
            energy_method=statement_pb2.ENERGY_METHOD_NONE,
            engine="fake",
            engine_version="1",
        )
        usage = completion_pb2.Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=len(self.token_ids))
        return Parts(
            header=header,
            statement=statement,
            coordinator_key=self.coordinator_key,
            node_key=self.node_key,
            usage=usage,
            finish_reason=completion_pb2.FINISH_REASON_STOP,
        )

    def events(self, from_index: int = 0) -> list[task_service_pb2.TaskEvent]:
        """Return what a stream carries that begins at a token index."""
        event = task_service_pb2.TaskEvent
        events = [
            event(accepted=self.accepted()),
            event(attempt_started=task_service_pb2.AttemptStarted(attempt=1, node_id="node-1")),
        ]
        for number, piece in enumerate(self.pieces):
            first = number * self.ids_per_piece
            if number == self.seam:
                broken = task_service_pb2.AttemptBroken(
                    attempt=1, node_id="node-1", reason="stream_lost", delivered_tokens=first
                )
                started = task_service_pb2.AttemptStarted(attempt=2, node_id="node-2", first_index=first)
                events += [event(attempt_broken=broken), event(attempt_started=started)]
            if first >= from_index:
                ids = self.token_ids[first : first + self.ids_per_piece]
                events.append(event(delta=task_service_pb2.Delta(first_index=first, token_ids=ids, text=piece)))
        if self.tail:
            tail = task_service_pb2.Delta(first_index=len(self.token_ids), text=self.tail)
            events.append(event(delta=tail))
        if self.failure is not None:
            events.append(event(failed=self.failure))
        else:
            events.append(event(finished=self.parts().seal()))
        return events


def example_node(node_id: str, *, gpu: bool = False, label: str = "attic") -> fleet_service_pb2.Node:
    """Return a node that serves the scripted model, on a card or on its CPU."""
    ok = capability_pb2.READING_STATUS_OK
    number, text = capability_pb2.NumberReading, capability_pb2.TextReading
    card = capability_pb2.Gpu(
        uuid=text(status=ok, value="GPU-1"),
        name=text(status=ok, value="NVIDIA GeForce RTX 4090"),
        memory_total_bytes=number(status=ok, value=24 * 2**30),
        memory_free_bytes=number(status=ok, value=20 * 2**30),
        power_draw_w=number(status=ok, value=212.4),
        power_limit_w=number(status=ok, value=450),
        temperature_c=number(status=capability_pb2.READING_STATUS_DENIED),
    )
    return fleet_service_pb2.Node(
        node_id=node_id,
        owner_id="owner-1",
        owner_name="lab",
        label=label,
        status="online",
        losses_per_h=0.02,
        expected_lent_s=50 * 3600.0,
        observed_lent_h=310.0,
        agent_version="0.1.0",
        host=capability_pb2.Host(
            operating_system="Linux",
            cpu_model="AMD Ryzen 9 7950X",
            cpu_cores=16,
            memory_total_bytes=64 * 2**30,
            memory_free_bytes=40 * 2**30,
            gpu_note="" if gpu else "no NVIDIA driver",
        ),
        gpus=[card] if gpu else [],
        engines=[
            capability_pb2.Engine(
                engine_id="engine-1",
                kind="fake",
                version="1",
                status=capability_pb2.ENGINE_STATUS_READY,
                manifest_digest=DIGEST,
                model="scripted",
                slots=8,
                tokens_per_second=104.2,
            )
        ],
        last_seen_at_ms=1_700_000_000_000,
    )


def make_certificates() -> tuple[bytes, bytes, bytes]:
    """Return a CA certificate, and key and certificate of a server on 127.0.0.1, all PEM."""
    ca_key, server_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "scripted CA")])
    server_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "scripted coordinator")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])

    def issue(subject: x509.Name, public_key: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder(
            issuer_name=ca_name,
            subject_name=subject,
            public_key=public_key,
            serial_number=x509.random_serial_number(),
            not_valid_before=VALID_FROM,
            not_valid_after=VALID_UNTIL,
        ).add_extension(extension, critical=True)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    key_pem = server_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    ca = issue(ca_name, ca_key.public_key(), x509.BasicConstraints(ca=True, path_length=0))
    return ca, key_pem, issue(server_name, server_key.public_key(), address)
