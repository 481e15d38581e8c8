"""How a machine becomes a node and stays one.

Enrolment, in this order; every step that fails refuses with a reason and
changes nothing:
  1. the fields have the shapes they must have
  2. the server nonce is one of ours, for this token, unused, and fresh
  3. the token exists and its secret fits (constant time)
  4. the proof holds: Ed25519 by the listed signing key over token, CSR, CA pin and nonce
  5. the CSR is for a P-256 key and signed by it
  6. the token is unexpired, and one statement of the store consumes it
An answer may be lost after step 6, so the same machine (same secret, same
signing key) may complete again with the consumed token while it would have
lived: it gets a fresh certificate for the node that it already is.

Renewal by key (an expired certificate) takes a nonce and a proof by the node's
listed signing key. Renewal by certificate is decided by TLS and the caller.

The methods block (database, signatures): drivers call them in threads.
"""

import hashlib
import hmac
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import structlog
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from coordinator.clock import Clock
from coordinator.enrolment.certificates import NodeCertificate, issue_node_certificate, parse_certificate_request
from coordinator.enrolment.nonces import NONCE_BYTES, NonceBook
from coordinator.errors import Reason, SlackwaterError
from coordinator.keys import CoordinatorKeys
from coordinator.store.port import Conflict, JoinTokenRow, NodeRow, Store
from inference.task import NodeId, OwnerId
from protos import join
from protos.signing import enrolment_proof, renewal_proof

# An hour is enough to carry a string to a machine; a longer-lived one is a password (Kubernetes, Tailscale).
TOKEN_LIFETIME_S_MAX = 3600
# Between one day (a card that is off overnight renews by certificate) and three (a stolen key's exposure).
CERTIFICATE_HOURS_MIN = 24
CERTIFICATE_HOURS_MAX = 72
LABEL_CHARACTERS_MAX = 64
# Longer than any secret that `protos.join` writes; hashing more would be work for a stranger.
SECRET_CHARACTERS_MAX = 256
_PUBLIC_KEY_BYTES = 32
_SIGNATURE_BYTES = 64

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentApplication:
    """What a machine sends to become a node."""

    token_id: str
    token_secret: str
    certificate_request: bytes
    signing_public_key: bytes
    server_nonce: bytes
    proof: bytes
    label: str


@dataclass(frozen=True, slots=True)
class Enrolled:
    node: NodeRow
    certificate: NodeCertificate


class EnrolmentAuthority:
    """Issues join strings and certificates; the only user of the CA key besides the servers."""

    def __init__(
        self,
        store: Store,
        keys: CoordinatorKeys,
        clock: Clock,
        *,
        cluster_id: str,
        certificate_lifetime: timedelta,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock
        self._cluster_id = cluster_id
        self._certificate_lifetime = certificate_lifetime
        self._random_bytes = random_bytes
        self._nonces = NonceBook()
        self._nonces_lock = threading.Lock()

    def create_join_string(
        self, owner_id: OwnerId, host: str, port: int, lifetime_s: int = TOKEN_LIFETIME_S_MAX
    ) -> tuple[join.JoinString, JoinTokenRow]:
        """Make a one-use token for one machine of an owner; only the hash of its secret is kept.

        Raises:
            SlackwaterError: the lifetime is not 1 to 3600 seconds, or there is no such owner.
        """
        if not 1 <= lifetime_s <= TOKEN_LIFETIME_S_MAX:
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT,
                f"lifetime_s is {lifetime_s}; it must be 1 to {TOKEN_LIFETIME_S_MAX}",
                param="lifetime_s",
            )
        secret = join.format_secret(self._random_bytes(join.TOKEN_SECRET_BYTES))
        now_ms = self._clock.now_ms()
        token = JoinTokenRow(
            token_id=self._random_bytes(8).hex(),
            secret_sha256=hashlib.sha256(secret.encode()).digest(),
            owner_id=owner_id,
            created_at_ms=now_ms,
            expires_at_ms=now_ms + lifetime_s * 1000,
            used_at_ms=None,
            used_by=None,
        )
        try:
            self._store.add_join_token(token)
        except Conflict as conflict:
            raise SlackwaterError(Reason.OWNER_NOT_FOUND, str(conflict), param="owner") from conflict
        string = join.JoinString(
            host=host, port=port, token_id=token.token_id, token_secret=secret, ca_pin=self._keys.ca_pin
        )
        return string, token

    def start_enrolment(self, token_id: str) -> bytes:
        """Return a server nonce for the holder of a join string."""
        token = self._store.find_join_token(token_id)
        if token is None:
            raise self._refused("enrolment", token_id[:64], _unknown_token())
        # A used token goes on: CompleteEnrolment tells a repetition from a second machine.
        if token.used_at_ms is None and self._clock.now_ms() >= token.expires_at_ms:
            raise self._refused("enrolment", token_id, _expired_token())
        return self._issue_nonce("enrolment", token_id)

    def complete_enrolment(self, application: EnrolmentApplication) -> Enrolled:
        """Make the machine a node, in the steps above."""
        try:
            enrolled = self._complete_enrolment(application)
        except SlackwaterError as refusal:
            raise self._refused("enrolment", application.token_id[:64], refusal) from refusal.__cause__
        _log.info(
            "node enrolled",
            node_id=enrolled.node.node_id,
            owner_id=enrolled.node.owner_id,
            token_id=application.token_id,
            certificate_serial=enrolled.certificate.serial,
        )
        return enrolled

    def start_renewal(self, node_id: NodeId) -> bytes:
        """Return a server nonce for a node whose certificate ran out."""
        try:
            self._unbanned(node_id)
        except SlackwaterError as refusal:
            raise self._refused("renewal", node_id[:64], refusal) from None
        return self._issue_nonce("renewal", node_id)

    def complete_renewal(
        self, node_id: NodeId, certificate_request: bytes, server_nonce: bytes, proof: bytes
    ) -> Enrolled:
        """Issue a certificate to whoever signs the challenge with the node's signing key."""
        try:
            if not self._take_nonce(server_nonce, "renewal", node_id):
                raise _stale_nonce()
            node = self._unbanned(node_id)
            message = renewal_proof(node_id, certificate_request, self._keys.ca_pin, server_nonce)
            _check_proof(node.signing_public_key, proof, message)
            return self._renew(node, parse_certificate_request(certificate_request))
        except SlackwaterError as refusal:
            raise self._refused("renewal", node_id[:64], refusal) from refusal.__cause__

    def renew(self, node_id: NodeId, certificate_request: bytes) -> Enrolled:
        """Issue the next certificate to a node that TLS has identified."""
        try:
            return self._renew(self._unbanned(node_id), parse_certificate_request(certificate_request))
        except SlackwaterError as refusal:
            raise self._refused("renewal", node_id[:64], refusal) from refusal.__cause__

    def _complete_enrolment(self, application: EnrolmentApplication) -> Enrolled:
        _check_shapes(application)
        if not self._take_nonce(application.server_nonce, "enrolment", application.token_id):
            raise _stale_nonce()
        token = self._store.find_join_token(application.token_id)
        secret_sha256 = hashlib.sha256(application.token_secret.encode()).digest()
        if token is None or not hmac.compare_digest(secret_sha256, token.secret_sha256):
            raise _unknown_token()
        message = enrolment_proof(
            application.token_id, application.certificate_request, self._keys.ca_pin, application.server_nonce
        )
        _check_proof(application.signing_public_key, application.proof, message)
        public_key = parse_certificate_request(application.certificate_request)
        if token.used_at_ms is not None:
            return self._enrolled_before(token, application, public_key)
        now_ms = self._clock.now_ms()
        if now_ms >= token.expires_at_ms:
            raise _expired_token()
        return self._enrol(token, application, public_key, now_ms)

    def _enrol(
        self,
        token: JoinTokenRow,
        application: EnrolmentApplication,
        public_key: ec.EllipticCurvePublicKey,
        now_ms: int,
    ) -> Enrolled:
        node_id = NodeId(self._random_bytes(16).hex())
        certificate = self._issue(node_id, public_key, now_ms)
        node = NodeRow(
            node_id=node_id,
            owner_id=token.owner_id,
            label=application.label,
            signing_public_key=application.signing_public_key,
            key_epoch=1,
            certificate_serial=certificate.serial,
            certificate_not_after_ms=certificate.not_after_ms,
            enrolled_at_ms=now_ms,
            banned_at_ms=None,
            ban_reason=None,
            draining=False,
        )
        try:
            consumed = self._store.enrol_node(node, token.token_id, now_ms)
        except Conflict as conflict:
            raise SlackwaterError(Reason.ALREADY_EXISTS, str(conflict), param="signing_public_key") from conflict
        if not consumed:
            # It was unused and unexpired a moment ago, so another machine came first.
            raise _used_token()
        return Enrolled(node, certificate)

    def _enrolled_before(
        self, token: JoinTokenRow, application: EnrolmentApplication, public_key: ec.EllipticCurvePublicKey
    ) -> Enrolled:
        node = None if token.used_by is None else self._store.find_node(token.used_by)
        same_machine = node is not None and node.signing_public_key == application.signing_public_key
        if node is None or not same_machine or self._clock.now_ms() >= token.expires_at_ms:
            raise _used_token()
        return self._renew(self._unbanned(node.node_id), public_key)

    def _renew(self, node: NodeRow, public_key: ec.EllipticCurvePublicKey) -> Enrolled:
        certificate = self._issue(node.node_id, public_key, self._clock.now_ms())
        # The store refuses a node that was banned since it was read.
        if not self._store.renew_certificate(node.node_id, certificate.serial, certificate.not_after_ms):
            raise _banned_node(None)
        renewed = self._store.find_node(node.node_id)
        assert renewed is not None  # nodes are never deleted
        return Enrolled(renewed, certificate)

    def _issue(self, node_id: NodeId, public_key: ec.EllipticCurvePublicKey, now_ms: int) -> NodeCertificate:
        return issue_node_certificate(
            self._keys, self._cluster_id, node_id, public_key, now_ms, self._certificate_lifetime
        )

    def _unbanned(self, node_id: NodeId) -> NodeRow:
        node = self._store.find_node(node_id)
        if node is None:
            raise SlackwaterError(
                Reason.NODE_NOT_FOUND, "no node of this id is enrolled here; enrol again", param="node_id"
            )
        if node.banned_at_ms is not None:
            raise _banned_node(node.ban_reason)
        return node

    def _issue_nonce(self, purpose: str, subject: str) -> bytes:
        nonce = self._random_bytes(NONCE_BYTES)
        with self._nonces_lock:
            self._nonces.issue(nonce, purpose, subject, self._clock.now_ms())
        return nonce

    def _take_nonce(self, nonce: bytes, purpose: str, subject: str) -> bool:
        with self._nonces_lock:
            return self._nonces.take(nonce, purpose, subject, self._clock.now_ms())

    def _refused(self, what: str, subject: str, refusal: SlackwaterError) -> SlackwaterError:
        _log.warning(f"{what} refused", subject=subject, reason=refusal.reason.name, detail=refusal.message)
        return refusal


def _check_shapes(application: EnrolmentApplication) -> None:
    if len(application.token_secret) > SECRET_CHARACTERS_MAX:
        raise _unknown_token()
    if len(application.signing_public_key) != _PUBLIC_KEY_BYTES:
        raise SlackwaterError(
            Reason.INVALID_ARGUMENT,
            f"signing_public_key has {len(application.signing_public_key)} bytes; a raw Ed25519 key has 32",
            param="signing_public_key",
        )
    if len(application.label) > LABEL_CHARACTERS_MAX or not (application.label.isprintable()):
        raise SlackwaterError(
            Reason.INVALID_ARGUMENT,
            f"label must be at most {LABEL_CHARACTERS_MAX} printable characters",
            param="label",
        )


def _check_proof(signing_public_key: bytes, proof: bytes, message: bytes) -> None:
    try:
        if len(proof) != _SIGNATURE_BYTES:
            raise InvalidSignature
        Ed25519PublicKey.from_public_bytes(signing_public_key).verify(proof, message)
    except (InvalidSignature, ValueError) as error:
        raise SlackwaterError(
            Reason.SIGNATURE_INVALID,
            "the proof is not a signature by the node's signing key over this request; "
            "was the join string made by another coordinator?",
            param="proof",
        ) from error


def _stale_nonce() -> SlackwaterError:
    return SlackwaterError(
        Reason.SIGNATURE_INVALID,
        "the server nonce is unknown, used or older than two minutes; start again",
        param="server_nonce",
    )


def _unknown_token() -> SlackwaterError:
    return SlackwaterError(
        Reason.TOKEN_INVALID,
        "no join string of this fleet has this token and secret; ask the operator for a new one",
    )


def _expired_token() -> SlackwaterError:
    return SlackwaterError(Reason.TOKEN_EXPIRED, "the join string has expired; ask the operator for a new one")


def _used_token() -> SlackwaterError:
    return SlackwaterError(
        Reason.TOKEN_USED, "the join string was used already; each serves one machine, ask the operator for another"
    )


def _banned_node(reason: str | None) -> SlackwaterError:
    return SlackwaterError(
        Reason.NODE_BANNED, f"this node is banned: {reason or 'no reason noted'}; write to the operator"
    )
