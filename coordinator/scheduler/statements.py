"""What a node's signed word about an attempt is worth. Pure."""

import hashlib
from collections.abc import Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from coordinator.api.completion import FINISH_REASON_FROM_WIRE, WireLogprobs, chosen_from_wire
from coordinator.scheduler.events import AttemptFinished, ConnectionId
from coordinator.stated_energy import energy_fault
from inference.task import (
    FinishReason,
    NodeId,
    TaskKind,
    TaskSpec,
    scores_bytes,
    unpack_token_ids,
)
from protos import signing
from protos.slackwater.common.v1 import completion_pb2, statement_pb2
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope
from protos.slackwater.node.v1 import node_service_pb2 as wire

FLOAT32_BYTES = 4


class NodeIdentity(Protocol):
    """Who speaks over a connection."""

    @property
    def connection_id(self) -> ConnectionId: ...
    @property
    def node_id(self) -> NodeId: ...
    @property
    def signing_public_key(self) -> bytes: ...


def read_statement(
    connection: NodeIdentity, spec: TaskSpec, header: SignedEnvelope, ended: wire.AttemptEnded
) -> AttemptFinished:
    """Verify a node's result statement, then parse it, then hold it against the header.

    1. the signature is the connected node's;
    2. the statement is about exactly the header that was sent to it;
    3. node, task and attempt are those of this message;
    4. first index and counts agree with the header and the ids;
    5. an output beside the statement fits the task and has the hash it states;
    6. its energy is a figure that cards can draw, or none.
    That the ids are those of the frames is the scheduler's to check.

    Raises:
        SignatureInvalid: one of these does not hold.
    """
    ordered = statement_pb2.TaskHeader.FromString(header.payload)
    statement = _read_bound(connection, header, ordered, ended)
    finish_reason = FINISH_REASON_FROM_WIRE.get(statement.finish_reason)
    if finish_reason is None and spec.kind is TaskKind.GENERATE:
        raise signing.SignatureInvalid("the statement gives no finish reason")
    _check_output(spec, statement, ended.finished.embedding, ended.finished.scores)
    return AttemptFinished(
        node_id=connection.node_id,
        connection_id=connection.connection_id,
        task_id=spec.task_id,
        attempt=ended.attempt,
        token_ids=unpack_token_ids(statement.token_ids),
        finish_reason=finish_reason or FinishReason.STOP,
        statement=ended.finished.statement,
        embedding=ended.finished.embedding,
        scores=WireLogprobs(ended.finished.scores),
    )


def check_late_statement(connection: NodeIdentity, ended: wire.AttemptEnded, coordinator_public_key: bytes) -> None:
    """Verify a statement that was sent again, with the order that it answers. Nothing needs to be remembered for it.

    Steps 1 to 4 and 6 of `read_statement`; and the order beside it is one that we signed, for this node. What was
    computed beside the ids is gone, and not looked at.

    Raises:
        SignatureInvalid: one of these does not hold.
    """
    header = ended.finished.header
    try:
        ordered = statement_pb2.TaskHeader.FromString(
            signing.open_envelope(header, signing.TASK_TYPE, (coordinator_public_key,))
        )
    except DecodeError as error:
        raise signing.SignatureInvalid("the signed payload is no order") from error
    if ordered.node_id != connection.node_id:
        raise signing.SignatureInvalid("the order beside the statement was for another node")
    _read_bound(connection, header, ordered, ended)


def _read_bound(
    connection: NodeIdentity, header: SignedEnvelope, ordered: statement_pb2.TaskHeader, ended: wire.AttemptEnded
) -> statement_pb2.ResultStatement:
    """Return the statement, which is the node's and about this header."""
    payload = signing.open_envelope(ended.finished.statement, signing.RESULT_TYPE, (connection.signing_public_key,))
    try:
        statement = statement_pb2.ResultStatement.FromString(payload)
    except DecodeError as error:
        raise signing.SignatureInvalid("the signed payload is no statement") from error
    if statement.header_sha256 != hashlib.sha256(header.payload).digest():
        raise signing.SignatureInvalid("the statement is about another header")
    if (statement.node_id, statement.task_id, statement.attempt) != (
        connection.node_id,
        ended.task_id,
        ended.attempt,
    ):
        raise signing.SignatureInvalid("the statement names another node, task or attempt")
    if (statement.first_index, statement.prompt_tokens) != (ordered.first_index, ordered.prompt_token_count):
        raise signing.SignatureInvalid("the statement gives another first index or prompt length than the header")
    if len(statement.token_ids) != 4 * statement.completion_tokens:
        raise signing.SignatureInvalid("the statement counts other than its ids")
    fault = energy_fault(statement)
    if fault is not None:
        raise signing.SignatureInvalid(fault)
    return statement


def _check_output(
    spec: TaskSpec,
    statement: statement_pb2.ResultStatement,
    embedding: bytes,
    scores: Sequence[completion_pb2.PositionLogprobs],
) -> None:
    if (spec.kind is not TaskKind.EMBED and embedding) or (spec.kind is not TaskKind.SCORE and scores):
        raise signing.SignatureInvalid("an output of another kind of task lies beside the statement")
    if spec.kind is TaskKind.GENERATE:
        return
    if statement.completion_tokens:
        raise signing.SignatureInvalid("the statement counts ids of a task that makes none")
    if spec.kind is TaskKind.EMBED:
        output = embedding
        if not output or len(output) % FLOAT32_BYTES:
            raise signing.SignatureInvalid("the embedding is no row of float32")
    else:
        chosen = chosen_from_wire(scores)
        output = scores_bytes(chosen)
        if [position.chosen.token_id for position in chosen] != list(spec.prompt_ids[1:]):
            raise signing.SignatureInvalid("the scores are not those of the prompt's ids after the first")
    if statement.output_sha256 != hashlib.sha256(output).digest():
        raise signing.SignatureInvalid("the output beside the statement is not the one that it states")
