"""A node's signed word: what it must agree with before it counts."""

import hashlib
import struct
from collections.abc import Sequence

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.api.completion import KIND_TO_WIRE, logprobs_to_wire
from coordinator.scheduler.events import ConnectionId
from coordinator.scheduler.statements import read_statement
from coordinator.scheduler.testing import task_spec
from coordinator.scheduler.testing_driver import FakeConnection, ended, sign_result
from coordinator.stated_energy import StatedEnergy, stated_energy
from inference.task import (
    FinishReason,
    PositionLogprobs,
    TaskKind,
    TokenLogprob,
    pack_token_ids,
    scores_bytes,
)
from protos import signing
from protos.signing import SignatureInvalid
from protos.slackwater.common.v1 import completion_pb2, statement_pb2
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope
from protos.slackwater.node.v1 import node_service_pb2 as wire

COORDINATOR_KEY = Ed25519PrivateKey.generate()
NODE = FakeConnection("node", ConnectionId(1))
IDS = (20, 21, 22)
VECTOR = struct.pack("<2f", 0.6, 0.8)


def header_for(kind: TaskKind = TaskKind.GENERATE, *, lease_epoch: int = 9) -> SignedEnvelope:
    spec = task_spec()
    header = statement_pb2.TaskHeader(
        cluster_id="cluster",
        node_id=NODE.node_id,
        task_id=spec.task_id,
        attempt=1,
        lease_epoch=lease_epoch,
        kind=KIND_TO_WIRE[kind],
        max_tokens=8,
        prompt_token_count=5,
        first_index=2,
    )
    return signing.seal(signing.TASK_TYPE, header.SerializeToString(), COORDINATOR_KEY)


HEADER = header_for()


def read(
    statement: SignedEnvelope, finished: wire.AttemptFinished | None = None, kind: TaskKind = TaskKind.GENERATE
) -> object:
    return read_statement(NODE, task_spec(kind=kind), HEADER, ended(statement, finished=finished))


def scores_of(ids: Sequence[int]) -> tuple[PositionLogprobs, ...]:
    return tuple(PositionLogprobs(TokenLogprob(token_id, -0.25 * token_id, 1)) for token_id in ids)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def test_an_honest_statement_becomes_the_event_that_it_says() -> None:
    event = read_statement(NODE, task_spec(), HEADER, ended(sign_result(NODE, HEADER, IDS)))
    assert (event.node_id, event.connection_id, event.task_id, event.attempt) == ("node", 1, "task", 1)
    assert (list(event.token_ids), event.finish_reason) == (list(IDS), FinishReason.LENGTH)
    assert event.statement == sign_result(NODE, HEADER, IDS)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"header_sha256": bytes(32)}, "another header"),
        ({"header_sha256": b""}, "another header"),
        ({"node_id": "node-2"}, "another node, task or attempt"),
        ({"task_id": "task-2"}, "another node, task or attempt"),
        ({"attempt": 2}, "another node, task or attempt"),
        ({"first_index": 0}, "another first index or prompt length"),
        ({"prompt_tokens": 500}, "another first index or prompt length"),
        ({"token_ids": pack_token_ids(IDS[:2])}, "counts other than its ids"),
        ({"token_ids": pack_token_ids(IDS)[:-1]}, "counts other than its ids"),
        ({"completion_tokens": 300}, "counts other than its ids"),
        ({"finish_reason": 0}, "no finish reason"),
        ({"finish_reason": 77}, "no finish reason"),
        ({"energy_mj": 1, "energy_method": statement_pb2.ENERGY_METHOD_NONE}, "says are not known"),
        ({"energy_mj": 1}, "says are not known"),
        ({"energy_mj": 2**64 - 1, "energy_method": statement_pb2.ENERGY_METHOD_COUNTER, "total_ms": 1}, "cards draw"),
        ({"energy_mj": 10**9, "energy_method": 77, "total_ms": 9000}, "cards draw"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_field_that_is_not_true_is_refused_for_what_it_is(changes: dict[str, object], why: str) -> None:
    """Mutations seen to fail here: each check of read_statement left out."""
    with pytest.raises(SignatureInvalid, match=why):
        read(sign_result(NODE, HEADER, IDS, **changes))


@pytest.mark.parametrize(
    ("changes", "energy"),
    [
        ({}, StatedEnergy(0, "none")),
        ({"energy_method": statement_pb2.ENERGY_METHOD_NONE}, StatedEnergy(0, "none")),
        (
            {"energy_mj": 5, "energy_method": statement_pb2.ENERGY_METHOD_INTEGRATED_POWER},
            StatedEnergy(5, "integrated_power"),
        ),
        ({"energy_mj": 0, "energy_method": statement_pb2.ENERGY_METHOD_COUNTER}, StatedEnergy(0, "counter")),
        # A newer node.
        ({"energy_mj": 5, "energy_method": 77}, StatedEnergy(5, "unknown")),
        # Any time that the field can hold fits the column.
        (
            {"energy_mj": 4 * 10**14, "energy_method": statement_pb2.ENERGY_METHOD_ESTIMATE, "total_ms": 2**32 - 1},
            StatedEnergy(4 * 10**14, "estimate"),
        ),
    ],
)
def test_energy_is_taken_as_the_node_states_it(changes: dict[str, object], energy: StatedEnergy) -> None:
    statement = sign_result(NODE, HEADER, IDS, **changes)
    read(statement)
    assert stated_energy(statement) == energy
    assert energy.energy_mj < 2**63


def test_a_statement_for_an_earlier_lease_of_the_same_attempt_is_refused() -> None:
    """Everything but the header's bytes is the same."""
    with pytest.raises(SignatureInvalid, match="another header"):
        read(sign_result(NODE, header_for(lease_epoch=8), IDS))


def test_only_the_key_of_the_connected_node_signs_for_it() -> None:
    """Mutation seen to fail here: parse without opening the envelope."""
    with pytest.raises(SignatureInvalid, match="no signature"):
        read(sign_result(FakeConnection("node", ConnectionId(1)), HEADER, IDS))


def test_neither_a_signed_task_nor_signed_garbage_passes_as_a_statement() -> None:
    """Mutation seen to fail here: let DecodeError through."""
    with pytest.raises(SignatureInvalid, match="payload type"):
        read(HEADER)
    with pytest.raises(SignatureInvalid, match="no statement"):
        read(signing.seal(signing.RESULT_TYPE, b"\xff\xff\xff", NODE.key))
    with pytest.raises(SignatureInvalid):
        read(SignedEnvelope())


def test_the_ended_message_names_the_attempt_that_its_statement_is_about() -> None:
    with pytest.raises(SignatureInvalid, match="another node, task or attempt"):
        read_statement(NODE, task_spec(), HEADER, ended(sign_result(NODE, HEADER, IDS), attempt=2))


@pytest.mark.parametrize("kind", [TaskKind.EMBED, TaskKind.SCORE])
def test_an_output_has_the_hash_that_was_signed(kind: TaskKind) -> None:
    """Mutation seen to fail here: no comparison of output_sha256."""
    scores = scores_of((11, 12))
    if kind is TaskKind.EMBED:
        output, finished = VECTOR, wire.AttemptFinished(embedding=VECTOR)
    else:
        output, finished = scores_bytes(scores), wire.AttemptFinished(scores=logprobs_to_wire(scores))
    honest = sign_result(
        NODE, HEADER, finish_reason=completion_pb2.FINISH_REASON_UNSPECIFIED, output_sha256=sha256(output)
    )
    event = read_statement(NODE, task_spec(kind=kind), HEADER, ended(honest, finished=finished))
    assert (event.embedding, tuple(event.scores)) == ((VECTOR, ()) if kind is TaskKind.EMBED else (b"", scores))
    for forged in (b"", sha256(b"else"), sha256(output)[:-1]):
        with pytest.raises(SignatureInvalid, match="not the one that it states"):
            read(
                sign_result(NODE, HEADER, finish_reason=completion_pb2.FINISH_REASON_UNSPECIFIED, output_sha256=forged),
                finished,
                kind,
            )


@pytest.mark.parametrize("embedding", [b"", VECTOR[:-1]])
def test_an_embedding_is_a_row_of_floats(embedding: bytes) -> None:
    finished = wire.AttemptFinished(embedding=embedding)
    statement = sign_result(NODE, HEADER, output_sha256=sha256(embedding))
    with pytest.raises(SignatureInvalid, match="no row of float32"):
        read(statement, finished, TaskKind.EMBED)


@pytest.mark.parametrize("scored", [(), (11,), (11, 13), (10, 11, 12)])
def test_scores_are_about_the_prompt_and_all_of_it(scored: tuple[int, ...]) -> None:
    """The prompt is 10, 11, 12, of which the first has no score. Mutation seen to fail here: no such check."""
    scores = scores_of(scored)
    finished = wire.AttemptFinished(scores=logprobs_to_wire(scores))
    statement = sign_result(NODE, HEADER, output_sha256=sha256(scores_bytes(scores)))
    with pytest.raises(SignatureInvalid, match="not those of the prompt's ids"):
        read(statement, finished, TaskKind.SCORE)


def test_a_prompt_of_one_id_has_no_scores_and_that_is_no_lie() -> None:
    statement = sign_result(NODE, HEADER, output_sha256=sha256(b""))
    spec = task_spec(kind=TaskKind.SCORE, prompt=(10,))
    assert tuple(read_statement(NODE, spec, HEADER, ended(statement)).scores) == ()


@pytest.mark.parametrize("kind", [TaskKind.EMBED, TaskKind.SCORE])
def test_ids_are_not_counted_for_a_task_that_makes_none(kind: TaskKind) -> None:
    with pytest.raises(SignatureInvalid, match="makes none"):
        read(sign_result(NODE, HEADER, IDS), kind=kind)


@pytest.mark.parametrize(
    ("kind", "finished"),
    [
        (TaskKind.GENERATE, wire.AttemptFinished(embedding=VECTOR)),
        (TaskKind.GENERATE, wire.AttemptFinished(scores=logprobs_to_wire(scores_of((11, 12))))),
        (TaskKind.SCORE, wire.AttemptFinished(embedding=VECTOR)),
        (TaskKind.EMBED, wire.AttemptFinished(scores=logprobs_to_wire(scores_of((11, 12))))),
    ],
)
def test_an_output_that_was_not_asked_for_reaches_nobody(kind: TaskKind, finished: wire.AttemptFinished) -> None:
    with pytest.raises(SignatureInvalid, match="another kind of task"):
        read(sign_result(NODE, HEADER, IDS), finished, kind)
