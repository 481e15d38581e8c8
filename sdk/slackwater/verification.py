"""Checking what a node signed about the answer that this client received.

The coordinator signs a task header for one attempt on one node; the node signs
a result statement over the hash of that exact header and the ids it produced.
`verify_finished` compares both with what arrived here.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from slackwater._protos import signing
from slackwater._protos.slackwater.common.v1 import completion_pb2, statement_pb2
from slackwater._task_messages import envelope_to_proto, finish_reason_name
from slackwater.errors import VerificationError
from slackwater.events import Accepted, AttemptStarted, Finished, FinishReason, SignedEnvelope


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedStatement:
    """What a node has vouched for with its key. Times and energy are the node's own measurement."""

    task_id: str
    node_id: str
    node_public_key: bytes
    attempt: int
    first_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    manifest_digest: str
    prompt_tokens: int
    first_token_ms: int
    total_ms: int
    energy_mj: int
    # "none", "counter", "integrated_power", "estimate".
    energy_method: str
    engine: str
    engine_version: str
    # False where no coordinator key was given, so that step 2 could not be done.
    header_signature_checked: bool

    @property
    def energy_j(self) -> float | None:
        """Joules of the node's cards, attributed to this attempt; None where the node does not know."""
        return None if self.energy_method == "none" else self.energy_mj / 1000


def verify_finished(
    finished: Finished,
    *,
    accepted: Accepted,
    started: AttemptStarted,
    token_ids: Sequence[int],
    first_token_index: int = 0,
    stop_strings: bool = False,
    coordinator_public_keys: Iterable[bytes] = (),
) -> VerifiedStatement:
    """Check the signed statement of the attempt that finished an answer.

    1. Header, statement and the node's key are there.
    2. The header is signed by one of `coordinator_public_keys`; left out, and
       said so in the result, where none is given.
    3. The statement is signed by the node's key.
    4. Both can be read, and the header orders a generation.
    5. The statement's hash is that of the exact header bytes.
    6. Node, task, attempt and first index are the same in header, statement
       and the coordinator's events.
    7. Model, seed and prompt length in the header are those of the accepted task.
    8. The ids in the statement are those that this client received from the
       statement's first index on.
    9. Counts and finish reason agree with the ids, the header's limits, the
       usage and the finish that the coordinator reported.

    What it does not prove: that the node ran the named model or the prompt
    that the caller wrote (audits at the coordinator are for that); that the
    key belongs to the node (the coordinator says so, and without
    `coordinator_public_keys` nothing binds the header to the coordinator
    either); that times and energy are true; anything about ids that earlier,
    broken attempts delivered, which no node signed.

    Args:
        token_ids: every id received, in order, from `first_token_index` on.
        first_token_index: not 0 where the client attached in the middle.
        stop_strings: whether the task had stop strings, which may end an
            answer at the very id at which the node reached its limit.

    Raises:
        VerificationError: with the step and what differs.
    """
    if finished.header is None or finished.statement is None or not finished.node_public_key:
        raise VerificationError(
            1, "header, statement or node key is absent, as it is where a stop string ended the answer before the node"
        )
    keys = tuple(coordinator_public_keys)
    if keys:
        _open(2, "header", finished.header, signing.TASK_TYPE, keys)
    _open(3, "statement", finished.statement, signing.RESULT_TYPE, (finished.node_public_key,))
    header, statement = _parse(finished.header, finished.statement)
    if statement.header_sha256 != hashlib.sha256(finished.header.payload).digest():
        raise VerificationError(5, "the statement was signed for another header")
    _check_identity(header, statement, accepted, started)
    _check_task(header, accepted, finished)
    ids = _check_ids(statement, token_ids, first_token_index)
    reason = _check_counts(header, statement, finished, ids, stop_strings)
    return _vouched_for(finished.node_public_key, header, statement, ids, reason, checked=bool(keys))


def _open(step: int, what: str, envelope: SignedEnvelope, payload_type: str, keys: Sequence[bytes]) -> None:
    try:
        signing.open_envelope(envelope_to_proto(envelope), payload_type, keys)
    except (signing.SignatureInvalid, ValueError) as error:
        # ValueError: a key that is not 32 bytes, or a signature of the wrong length.
        raise VerificationError(step, f"{what}: {error}") from error


def _parse(
    header: SignedEnvelope, statement: SignedEnvelope
) -> tuple[statement_pb2.TaskHeader, statement_pb2.ResultStatement]:
    # Without a coordinator key the header's envelope was not opened, and its type not looked at.
    if header.payload_type != signing.TASK_TYPE:
        raise VerificationError(4, f"the header's payload type is {header.payload_type!r}")
    try:
        parsed = (
            statement_pb2.TaskHeader.FromString(header.payload),
            statement_pb2.ResultStatement.FromString(statement.payload),
        )
    except DecodeError as error:
        raise VerificationError(4, f"a signed payload is no message of its type: {error}") from error
    if parsed[0].kind != completion_pb2.TASK_KIND_GENERATE:
        raise VerificationError(4, "the header does not order a generation")
    return parsed


def _check_identity(
    header: statement_pb2.TaskHeader,
    statement: statement_pb2.ResultStatement,
    accepted: Accepted,
    started: AttemptStarted,
) -> None:
    rows = (
        ("node", header.node_id, statement.node_id, started.node_id),
        ("task", header.task_id, statement.task_id, accepted.task_id),
        ("attempt", header.attempt, statement.attempt, started.attempt),
        ("first index", header.first_index, statement.first_index, started.first_index),
    )
    for what, ordered, stated, told in rows:
        if not ordered == stated == told:
            raise VerificationError(6, f"{what}: header {ordered!r}, statement {stated!r}, coordinator {told!r}")


def _check_task(header: statement_pb2.TaskHeader, accepted: Accepted, finished: Finished) -> None:
    # Ids before first_index were delivered by earlier attempts and are the tail of this attempt's prompt.
    rows = (
        ("model", header.manifest_digest, accepted.manifest_digest),
        ("seed", header.sampling.seed, accepted.seed),
        ("prompt length", header.prompt_token_count, accepted.prompt_tokens + header.first_index),
        ("prompt length in usage", finished.usage.prompt_tokens, accepted.prompt_tokens),
    )
    for what, found, expected in rows:
        if found != expected:
            raise VerificationError(7, f"{what} is {found!r}, the accepted task has {expected!r}")


def _check_ids(
    statement: statement_pb2.ResultStatement, token_ids: Sequence[int], first_token_index: int
) -> tuple[int, ...]:
    if statement.first_index < first_token_index:
        raise VerificationError(
            8, f"ids before {first_token_index} were not received; attach from {statement.first_index} or before"
        )
    received = tuple(token_ids[statement.first_index - first_token_index :])
    if statement.token_ids != struct.pack(f"<{len(received)}I", *received):
        raise VerificationError(
            8, f"the {len(statement.token_ids) // 4} ids of the statement are not the {len(received)} received"
        )
    return received


def _check_counts(
    header: statement_pb2.TaskHeader,
    statement: statement_pb2.ResultStatement,
    finished: Finished,
    ids: tuple[int, ...],
    stop_strings: bool,
) -> FinishReason:
    reason = finish_reason_name(statement.finish_reason)
    stop_ids = frozenset(header.stop_token_ids)
    limit = header.max_tokens
    checks = (
        ("completion_tokens is not the count of the ids", statement.completion_tokens == len(ids)),
        ("prompt_tokens is not the header's", statement.prompt_tokens == header.prompt_token_count),
        ("usage is not the count of all ids", finished.usage.completion_tokens == statement.first_index + len(ids)),
        (f"{len(ids)} ids, and the header allows {limit}", len(ids) <= limit),
        ("an id that ends the answer is not the last", stop_ids.isdisjoint(ids[:-1])),
        ("finished by a stop id, and the last id is none", reason != "stop" or (bool(ids) and ids[-1] in stop_ids)),
        ("finished by length, and the limit was not reached", reason != "length" or len(ids) == limit),
    )
    for why, holds in checks:
        if not holds:
            raise VerificationError(9, why)
    if reason == finished.finish_reason == "stop":
        return "stop"
    if reason == "length" and (finished.finish_reason == "length" or stop_strings):
        return "length"
    raise VerificationError(9, f"finish reason: statement {reason!r}, coordinator {finished.finish_reason!r}")


def _energy_method(value: int) -> str:
    # An enum is open: a newer node may send a number that has no name here.
    if value not in statement_pb2.EnergyMethod.values():
        return f"unknown_{value}"
    return (
        statement_pb2.EnergyMethod.Name(statement_pb2.EnergyMethod.ValueType(value))
        .removeprefix("ENERGY_METHOD_")
        .lower()
    )


def _vouched_for(
    key: bytes,
    header: statement_pb2.TaskHeader,
    statement: statement_pb2.ResultStatement,
    ids: tuple[int, ...],
    reason: FinishReason,
    *,
    checked: bool,
) -> VerifiedStatement:
    return VerifiedStatement(
        task_id=statement.task_id,
        node_id=statement.node_id,
        node_public_key=key,
        attempt=statement.attempt,
        first_index=statement.first_index,
        token_ids=ids,
        finish_reason=reason,
        manifest_digest=header.manifest_digest,
        prompt_tokens=statement.prompt_tokens,
        first_token_ms=statement.first_token_ms,
        total_ms=statement.total_ms,
        energy_mj=statement.energy_mj,
        energy_method=_energy_method(statement.energy_method),
        engine=statement.engine,
        engine_version=statement.engine_version,
        header_signature_checked=checked,
    )
