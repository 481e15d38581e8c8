"""Whether a signed order may be executed here. Pure.

`check_assignment` carries these steps out in this order, each with its own
refusal reason; nothing of a header is used before step 1 held:

   1  the envelope is signed by a key of the coordinator        SIGNATURE_INVALID
   2  the payload is a TaskHeader without unknown fields        MALFORMED
   3  cluster and node are ours                                 WRONG_AUDIENCE
   4  every field is present and in its range                   MALFORMED
   5  it is valid now, on the coordinator's time                EXPIRED
   6  its nonce was not used before                             REPLAYED
   7  an engine here serves the manifest and the kind           MODEL_UNKNOWN
   8  lengths and ids fit the model                            LIMITS_EXCEEDED
   9  the owner consents to the model and to such work          CONSENT
  10  it pays what the owner asks                               ASK
  11  the node takes work                                       DRAINING
  12  an engine for it is up                                    ENGINE_NOT_READY
  13  and has a free slot                                       BUSY

`agent.prompt_assembly` then checks the ids that travel beside the header: chunks in
order, none too long, as many ids as announced, all inside the vocabulary, and
the salted hash of the header                                   PROMPT_MISMATCH

The caller must still make the nonce durable before anything of the work is seen outside.
"""

import hashlib
import heapq
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from agent.errors import AssignmentInvalid, RefusalReason
from agent.owner.asks import Ask, AskSettings, shortfall
from agent.owner.consent import Consent
from agent.owner.events import LocalTimeObserved
from inference.task import ManifestDigest, PrivacyClass, Sampling, ServiceClass, TaskId, TaskKind
from protos import signing
from protos.slackwater.common.v1 import capability_pb2, completion_pb2, envelope_pb2, statement_pb2

# The machine clock of the coordinator may be stepped back a little between two headers.
ISSUED_EARLY_MS_MAX = 60_000
# A lease is seconds long; an hour bounds how long a nonce must be remembered.
VALIDITY_MS_MAX = 3_600_000
# An hour of eighteen tasks a second; about 10 MB.
NONCES_MAX = 65_536
# As documented for TaskHeader and Sampling.
STOP_TOKEN_IDS_MAX = 16
LOGPROBS_MAX = 20
SCORE_RIVALS_MAX = 64
# Task ids are made by the coordinator; a UUID has 36 characters.
TASK_ID_CHARACTERS_MAX = 128
# Long sequences of today's models have about a million ids.
SEQUENCE_IDS_MAX = 2**24

_MANIFEST_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_KINDS = {
    completion_pb2.TASK_KIND_GENERATE: TaskKind.GENERATE,
    completion_pb2.TASK_KIND_SCORE: TaskKind.SCORE,
    completion_pb2.TASK_KIND_EMBED: TaskKind.EMBED,
}
_SERVICE_CLASSES = {
    completion_pb2.SERVICE_CLASS_INTERACTIVE: ServiceClass.INTERACTIVE,
    completion_pb2.SERVICE_CLASS_STANDARD: ServiceClass.STANDARD,
    completion_pb2.SERVICE_CLASS_BATCH: ServiceClass.BATCH,
}
_PRIVACY_CLASSES = {
    completion_pb2.PRIVACY_CLASS_PUBLIC: PrivacyClass.PUBLIC,
    completion_pb2.PRIVACY_CLASS_TRUSTED_OWNERS: PrivacyClass.TRUSTED_OWNERS,
    completion_pb2.PRIVACY_CLASS_OWN_NODES: PrivacyClass.OWN_NODES,
}


class AttemptKey(NamedTuple):
    """One attempt of one task. A tuple, since every frame looks one up."""

    task_id: TaskId
    attempt: int


class NonceUse(NamedTuple):
    """A nonce that was used, and the coordinator time (Unix ms) from which its header is void anyway."""

    nonce: bytes
    void_from_ms: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the checks need to know of a manifest."""

    manifest_digest: ManifestDigest
    name: str
    licence: str
    kind: TaskKind
    context_tokens: int
    vocabulary_size: int

    def serves(self, kind: TaskKind) -> bool:
        """Whether the model does this kind of work; a generating model can also score."""
        return kind is self.kind or (kind is TaskKind.SCORE and self.kind is TaskKind.GENERATE)


@dataclass(frozen=True, slots=True)
class EngineOffer:
    """What one engine could take on now."""

    engine_id: str
    model: ServedModel
    ready: bool
    free_slots: int


@dataclass(frozen=True, slots=True)
class Audience:
    """Who we are, and whose signature counts."""

    cluster_id: str
    node_id: str
    coordinator_keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """A checked header. Exists only where every step held."""

    key: AttemptKey
    # As it came, for whoever must see later what was ordered.
    header: envelope_pb2.SignedEnvelope
    header_sha256: bytes
    nonce_use: NonceUse
    kind: TaskKind
    sampling: Sampling
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    prompt_token_count: int
    prompt_salt: bytes
    prompt_sha256: bytes
    first_index: int
    service_class: ServiceClass
    privacy_class: PrivacyClass
    chunk_count: int
    model: ServedModel
    cache_salt: bytes  # empty for none


class NonceCache:
    """Nonces that were used and are not void yet. Bounded."""

    def __init__(self, uses: Iterable[NonceUse] = ()) -> None:
        self._used: set[bytes] = set()
        self._by_expiry: list[tuple[int, bytes]] = []
        for use in uses:
            self.add(use)

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, nonce: bytes) -> bool:
        return nonce in self._used

    def add(self, use: NonceUse) -> None:
        if use.nonce not in self._used:
            self._used.add(use.nonce)
            heapq.heappush(self._by_expiry, (use.void_from_ms, use.nonce))

    def forget_void(self, now_ms: int) -> None:
        """Drop nonces whose headers are refused as expired anyway, early issue and clock steps included."""
        while self._by_expiry and self._by_expiry[0][0] + ISSUED_EARLY_MS_MAX < now_ms:
            self._used.discard(heapq.heappop(self._by_expiry)[1])

    def in_force(self) -> list[NonceUse]:
        return [NonceUse(nonce, void_from_ms) for void_from_ms, nonce in self._by_expiry]

    @property
    def full(self) -> bool:
        return len(self._used) >= NONCES_MAX


def claimed_key(envelope: envelope_pb2.SignedEnvelope) -> AttemptKey:
    """Return the attempt that an envelope claims to be about: an unverified address for a refusal, nothing else."""
    header = statement_pb2.TaskHeader()
    try:
        header.ParseFromString(envelope.payload)
    except DecodeError:
        return AttemptKey(TaskId(""), 0)
    return AttemptKey(TaskId(header.task_id[:TASK_ID_CHARACTERS_MAX]), header.attempt)


def ask_of(
    message: statement_pb2.TaskHeader | capability_pb2.EngineTerms | capability_pb2.Engine,
) -> Ask | None:
    """Return what an order pays, the coordinator pays for an engine, or an engine asks; None where it is not said."""
    if not message.HasField("ask"):
        return None
    return Ask(prompt_micro=message.ask.prompt_micro, completion_micro=message.ask.completion_micro)


def check_assignment(
    envelope: envelope_pb2.SignedEnvelope,
    chunk_count: int,
    *,
    audience: Audience,
    now_ms: int,
    nonces: NonceCache,
    offers: Sequence[EngineOffer],
    consent: Consent,
    asks: AskSettings,
    tokens_today: int,
    local_time: LocalTimeObserved | None,
    draining: bool,
) -> tuple[TaskOrder, str]:
    """Return the order and the id of the engine to run it.

    Args:
        tokens_today: worked on in this local day, and promised to attempts that are not over.
        local_time: None where it is not known.

    Raises:
        AssignmentInvalid: with the reason of the first step that failed.
    """
    header = _open_header(envelope, audience.coordinator_keys)  # steps 1 and 2
    if header.cluster_id != audience.cluster_id:  # step 3
        _fail(RefusalReason.REFUSAL_REASON_WRONG_AUDIENCE, f"header is for cluster {header.cluster_id[:64]!r}")
    if header.node_id != audience.node_id:
        _fail(RefusalReason.REFUSAL_REASON_WRONG_AUDIENCE, f"header is for node {header.node_id[:64]!r}")
    _check_fields(header, chunk_count)  # step 4
    if not header.issued_at_ms - ISSUED_EARLY_MS_MAX <= now_ms <= header.not_after_ms:  # step 5
        _fail(
            RefusalReason.REFUSAL_REASON_EXPIRED,
            f"valid from {header.issued_at_ms} to {header.not_after_ms}, coordinator time is {now_ms}",
        )
    if header.nonce in nonces:  # step 6
        _fail(RefusalReason.REFUSAL_REASON_REPLAYED, "this header was already executed or begun here")
    kind = _KINDS[header.kind]
    serving = [  # step 7
        offer for offer in offers if offer.model.manifest_digest == header.manifest_digest and offer.model.serves(kind)
    ]
    if not serving:
        _fail(RefusalReason.REFUSAL_REASON_MODEL_UNKNOWN, f"{header.manifest_digest} is not served for {kind.value}")
    _check_limits(header, kind, serving[0].model)  # step 8
    order = _order(header, kind, serving[0].model, envelope, chunk_count)
    unwanted = consent.refusal(order, tokens_today, local_time)  # step 9
    if unwanted is not None:
        _fail(RefusalReason.REFUSAL_REASON_CONSENT, unwanted)
    _check_pay(header, asks.ask_for(order.model.name))  # step 10
    if draining:  # step 11
        _fail(RefusalReason.REFUSAL_REASON_DRAINING, "this node takes no new work")
    ready = [offer for offer in serving if offer.ready]  # step 12
    if not ready:
        _fail(RefusalReason.REFUSAL_REASON_ENGINE_NOT_READY, f"no engine for {header.manifest_digest} is up")
    engine = max(ready, key=lambda offer: offer.free_slots)  # step 13
    if engine.free_slots <= 0:
        _fail(RefusalReason.REFUSAL_REASON_BUSY, "every slot is taken")
    if nonces.full:
        _fail(RefusalReason.REFUSAL_REASON_BUSY, f"{NONCES_MAX} nonces are in force, no more can be remembered")
    return order, engine.engine_id


def _fail(reason: "RefusalReason.ValueType", detail: str) -> NoReturn:
    raise AssignmentInvalid(reason, detail)


def _open_header(envelope: envelope_pb2.SignedEnvelope, keys: Iterable[bytes]) -> statement_pb2.TaskHeader:
    try:
        payload = signing.open_envelope(envelope, signing.TASK_TYPE, keys)
    except signing.SignatureInvalid as error:
        raise AssignmentInvalid(RefusalReason.REFUSAL_REASON_SIGNATURE_INVALID, str(error)) from error
    header = statement_pb2.TaskHeader()
    try:
        header.ParseFromString(payload)
    except DecodeError as error:
        raise AssignmentInvalid(RefusalReason.REFUSAL_REASON_MALFORMED, "the payload is no TaskHeader") from error
    # A field that this version does not know could change what the task means, so none is let through.
    _refuse_unknown(header, "header")
    _refuse_unknown(header.sampling, "header.sampling")
    _refuse_unknown(header.ask, "header.ask")
    return header


def _refuse_unknown(message: Message, where: str) -> None:
    if unknown := len(UnknownFieldSet(message)):
        _fail(RefusalReason.REFUSAL_REASON_MALFORMED, f"{where} has {unknown} unknown fields")


def _check_fields(header: statement_pb2.TaskHeader, chunk_count: int) -> None:
    validity_ms = header.not_after_ms - header.issued_at_ms
    checks = (
        (1 <= len(header.task_id) <= TASK_ID_CHARACTERS_MAX, "task_id"),
        (header.attempt >= 1, "attempt"),
        (header.lease_epoch >= 1, "lease_epoch"),
        (header.issued_at_ms > 0, "issued_at_ms"),
        (0 < validity_ms <= VALIDITY_MS_MAX, "not_after_ms"),
        (len(header.nonce) == 16, "nonce"),
        (_MANIFEST_DIGEST.fullmatch(header.manifest_digest) is not None, "manifest_digest"),
        (header.kind in _KINDS, "kind"),
        (header.kind == completion_pb2.TASK_KIND_EMBED or header.HasField("sampling"), "sampling"),
        ((header.max_tokens >= 1) == (header.kind == completion_pb2.TASK_KIND_GENERATE), "max_tokens"),
        (1 <= header.prompt_token_count <= SEQUENCE_IDS_MAX, "prompt_token_count"),
        (len(header.prompt_salt) == 16, "prompt_salt"),
        (len(header.prompt_sha256) == 32, "prompt_sha256"),
        (len(header.cache_salt) in (0, 16), "cache_salt"),
        # The ids delivered before are the tail of the prompt, and the first prompt had one at least.
        (header.first_index < header.prompt_token_count, "first_index"),
        (header.service_class in _SERVICE_CLASSES, "service_class"),
        (header.privacy_class in _PRIVACY_CLASSES, "privacy_class"),
        (1 <= chunk_count <= header.prompt_token_count, "chunk_count"),
    )
    for held, name in checks:
        if not held:
            _fail(RefusalReason.REFUSAL_REASON_MALFORMED, f"{name} is missing or out of range")
    if header.HasField("sampling"):
        _check_sampling(header.sampling)


def _check_sampling(sampling: completion_pb2.Sampling) -> None:
    checks = (
        (_within(sampling.temperature, 0, 2), "temperature"),
        (_within(sampling.top_p, 0, 1) and sampling.top_p > 0, "top_p"),
        (sampling.seed < 2**63, "seed"),
        (_within(sampling.presence_penalty, -2, 2), "presence_penalty"),
        (_within(sampling.frequency_penalty, -2, 2), "frequency_penalty"),
        (_within(sampling.repetition_penalty, 0, 2) and sampling.repetition_penalty > 0, "repetition_penalty"),
    )
    for held, name in checks:
        if not held:
            _fail(RefusalReason.REFUSAL_REASON_MALFORMED, f"sampling.{name} is out of range")


def _within(value: float, least: float, most: float) -> bool:
    return math.isfinite(value) and least <= value <= most


def _check_limits(header: statement_pb2.TaskHeader, kind: TaskKind, model: ServedModel) -> None:
    context, sequence = model.context_tokens, header.prompt_token_count + header.max_tokens
    logprobs, logprobs_max = header.sampling.logprobs, SCORE_RIVALS_MAX if kind is TaskKind.SCORE else LOGPROBS_MAX
    checks = (
        (sequence <= context, f"prompt and answer have {sequence} ids, the context {context}"),
        (logprobs <= logprobs_max, f"{logprobs} logprobs, at most {logprobs_max}"),
        (len(header.stop_token_ids) <= STOP_TOKEN_IDS_MAX, f"more than {STOP_TOKEN_IDS_MAX} stop ids"),
        (all(one < model.vocabulary_size for one in header.stop_token_ids), "a stop id is outside the vocabulary"),
        (kind is not TaskKind.SCORE or header.prompt_token_count >= 2, "one id alone has no score"),
    )
    for held, detail in checks:
        if not held:
            _fail(RefusalReason.REFUSAL_REASON_LIMITS_EXCEEDED, detail)


def _check_pay(header: statement_pb2.TaskHeader, asked: Ask | None) -> None:
    too_little = shortfall(asked, ask_of(header))
    if too_little is not None:
        _fail(RefusalReason.REFUSAL_REASON_ASK, too_little)


def _order(
    header: statement_pb2.TaskHeader,
    kind: TaskKind,
    model: ServedModel,
    envelope: envelope_pb2.SignedEnvelope,
    chunk_count: int,
) -> TaskOrder:
    sampling = header.sampling
    return TaskOrder(
        key=AttemptKey(TaskId(header.task_id), header.attempt),
        header=envelope,
        header_sha256=hashlib.sha256(envelope.payload).digest(),
        nonce_use=NonceUse(header.nonce, header.not_after_ms),
        kind=kind,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        ),
        max_tokens=header.max_tokens,
        stop_token_ids=tuple(header.stop_token_ids),
        prompt_token_count=header.prompt_token_count,
        prompt_salt=header.prompt_salt,
        prompt_sha256=header.prompt_sha256,
        first_index=header.first_index,
        service_class=_SERVICE_CLASSES[header.service_class],
        privacy_class=_PRIVACY_CLASSES[header.privacy_class],
        chunk_count=chunk_count,
        model=model,
        cache_salt=header.cache_salt,
    )
